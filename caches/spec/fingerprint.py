"""What identifies the model that filled a cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from caches.torch_api import storage_key, write_count

_SUMS = 1021  # a prime, so that two rows of a weight that change places always change the sums


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The model inside wrappers such as PEFT's. Raises `TypeError` if there is none."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"a {type(model).__name__} is no PreTrainedModel")


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Words and a digest of the weights; one of them differs where another model would compute other keys and values.

    All weights are read, at about the speed of memory; of those that are not in memory, the name and the shape. Where
    several processes compute the model, each has its own: caches have other heads.
    """
    inner = inner_model(model)
    config = inner.config.get_text_config(decoder=True)
    rope = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)
    digest = sha256()
    for part in _weights(inner):
        digest.update(part)
    return {
        "model": type(inner).__name__,
        "dtype": str(inner.dtype).removeprefix("torch."),
        "rope": rope,
        "adapters": active_adapters(inner),
        "weights": digest.hexdigest(),
    }


def weights_version(model: nn.Module) -> int:
    """A number that is another one once weights in memory were written or replaced, or other adapters are active.

    Nothing is read of the weights. What is written through `parameter.data` is not noticed.
    """
    inner = inner_model(model)
    return hash((active_adapters(inner), *map(_version, inner.parameters())))


def _version(weight: torch.Tensor) -> tuple[Any, ...]:
    weight = _own_part(weight)
    is_plain = type(weight) in (nn.Parameter, torch.Tensor)  # others are quantized
    if not is_plain or weight.is_inference():  # which counts no writes
        return (id(weight),)
    return storage_key(weight), write_count(weight), weight.dtype, weight.device


def _weights(model: nn.Module) -> Iterator[bytes]:
    # Buffers that are not saved are left out: some change while a model computes.
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        tensor = _own_part(tensor)
        yield f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel():
            yield _sums(tensor)


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a weight that is split over processes, the part that is in this one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sums(weight: torch.Tensor) -> bytes:
    """Sums of every 1,021st of the integers that the bytes of a weight are: the same on every machine."""
    content = weight.detach().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    size = len(content) // (8 * _SUMS) * 8 * _SUMS
    sums = content[:size].view(torch.int64).view(-1, _SUMS).sum(dim=0)
    return sums.cpu().numpy().tobytes() + content[size:].cpu().numpy().tobytes()


def active_adapters(model: nn.Module) -> str:
    """The adapters that are active and those that are merged into weights, as PEFT's layers say, with their scales."""
    if "peft" not in sys.modules:
        return "none"
    layers = [module for module in model.modules() if hasattr(type(module), "active_adapters")]
    return ", ".join(sorted({text for layer in layers for text in _adapters_of(layer)})) or "none"


def _adapters_of(layer: Any) -> Iterator[str]:
    active = getattr(layer, "active_adapters", ())
    if not isinstance(active, (list, tuple)):  # a model has a method of that name
        return
    scales = getattr(layer, "scaling", None)
    scales = scales if isinstance(scales, dict) else {}  # a wrapper shows that of the attention in it
    for name in () if getattr(layer, "disable_adapters", False) else active:
        yield f"{name} (scale {scales[name]:g})" if name in scales else str(name)
    for name in getattr(layer, "merged_adapters", ()):  # PEFT writes them into weights in a way that is not counted
        yield f"{name} (merged)"
