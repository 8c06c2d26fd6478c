"""Checks of the data type and the device that a model is loaded with."""

from __future__ import annotations

import torch

from configs import nearest
from engine.errors import OptionError

_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's device maps over all devices
_USUAL = ["float32", "bfloat16", "float16", "float64"]
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # names in other tools


def read_dtype(name: torch.dtype | str) -> torch.dtype:
    """torch's data type of that name. Raises `OptionError` if there is none or it is not floating point."""
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise OptionError(
            f"dtype={name!r} is no data type of torch; {nearest(_SHORT.get(str(name).lower(), str(name)), _USUAL)}"
        )
    if not dtype.is_floating_point:
        raise OptionError(f"dtype={name!r} is no floating-point type, which weights need; {nearest('', _USUAL)}")
    return dtype


def read_device(name: torch.device | str) -> torch.device:
    """torch's device of that name, which may be missing on this machine. Raises `OptionError` for an invalid name."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device={name!r} is no device of torch: cpu, cuda, cuda:1, mps, ...") from error


def check_here(device_map: str) -> None:
    """Raise `OptionError` unless `device_map` is a map of accelerate or a device of this machine."""
    if device_map in _SPREADS:
        return
    device, devices = read_device(device_map), ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    name = device.type if device.index is None or device.type == "cpu" else str(device)
    if device.type != "meta" and name not in devices and f"{name}:0" not in devices:
        raise OptionError(f"there is no device {device_map!r} here: torch finds {', '.join(devices)}")


def is_on_cpu(device_map: str) -> bool:
    """Whether a model that is loaded with `device_map` is on the CPU as a whole."""
    if device_map in _SPREADS:
        return torch.accelerator.current_accelerator(check_available=True) is None
    return read_device(device_map).type == "cpu"
