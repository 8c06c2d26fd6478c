"""The device and data type that a cache's configuration expects of the model's keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from caches.errors import StepError
from configs import PlacedCacheConfig


@dataclass(frozen=True)
class ExpectedDevice:
    """Checks keys against the device and dtype of a configuration. Buffers are allocated where the keys are anyway."""

    options: PlacedCacheConfig

    def check(self, layer_idx: int, keys: torch.Tensor) -> None:
        """Raise `StepError` if `keys`, those of layer `layer_idx`, is on another device or has another data type."""
        options = self.options
        device = (options.layer_device_map or {}).get(str(layer_idx), options.device)
        actual, expected = keys.device, None if device is None else torch.device(device)
        if expected is not None and (expected.type != actual.type or expected.index not in (None, actual.index)):
            raise StepError(
                f"the {options.name} cache was built for layer {layer_idx} on {expected}, but the layer computes on "
                f"{actual}: leave device and layer_device_map out, each layer's tensors go where it computes"
            )
        if options.dtype is not None and keys.dtype != getattr(torch, options.dtype, None):
            raise StepError(
                f"the {options.name} cache was built for {options.dtype}, but layer {layer_idx} computes in "
                f"{keys.dtype}: leave dtype out, or give the model's"
            )

    @property
    def is_given(self) -> bool:
        """Whether the configuration expects anything."""
        return any((self.options.device, self.options.dtype, self.options.layer_device_map))
