"""Global state of a device: its random number generator, and its peak of allocated memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
ASYNCHRONOUS = ("cuda", "xpu")  # device types whose work the host does not wait for


class Peak:
    """The peak of allocated memory on a device since this object was made, by the whole process.

    The device's statistics are only read, never reset: they belong to the user and to other runs.
    """

    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None
        self._earlier_peak = self._most = 0
        if self._device is not None:
            self._earlier_peak = torch.cuda.max_memory_allocated(self._device)

    def record(self) -> None:
        """Record the memory that is allocated now."""
        if self._device is not None:
            self._most = max(self._most, torch.cuda.memory_allocated(self._device))

    @property
    def bytes(self) -> int | None:
        """The peak, or the most of the records if an earlier peak of the process was higher; None without CUDA."""
        if self._device is None:
            return None
        self.record()
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak if peak > self._earlier_peak else self._most


def random_state(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """The state of `generator`, or without one of the device's default generator."""
    if generator is not None:
        return generator.get_state()
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device, generator: torch.Generator | None = None) -> None:
    """Restore a `random_state`."""
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator with the numbers that follow `torch.manual_seed(seed)`; None without a seed."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def reads_late(device: torch.device) -> bool:
    """Whether reading a tensor on the host waits for everything that was asked of `device` before."""
    return device.type in ASYNCHRONOUS


def rewinding(work: Callable[[], T], device: torch.device, generator: torch.Generator | None) -> Callable[[], T]:
    """`work` that draws the same random numbers when it is repeated; new ones where other code has drawn in between."""
    begin_state: torch.Tensor | None = None
    end_state: torch.Tensor | None = None

    def drawn() -> T:
        nonlocal begin_state, end_state
        now = random_state(device, generator)
        if begin_state is not None and end_state is not None and torch.equal(now, end_state):
            set_random_state(begin_state, device, generator)
        else:
            begin_state = now
        try:
            return work()
        finally:
            end_state = random_state(device, generator)

    return drawn
