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

    def check(self, layer_idx: int, new: torch.Tensor) -> None:
        """Raise `StepError` if `new`, keys of layer `layer_idx`, is on another device or has another data type."""
        options = self.options
        device = (options.layer_device_map or {}).get(str(layer_idx), options.device)
        found, wanted = new.device, None if device is None else torch.device(device)
        if wanted is not None and (wanted.type != found.type or wanted.index not in (None, found.index)):
            raise StepError(
                f"the {options.name} cache was built for layer {layer_idx} on {wanted}, but the layer computes on "
                f"{found}: leave device and layer_device_map out, each layer's tensors go where it computes"
            )
        if options.dtype is not None and new.dtype != getattr(torch, options.dtype, None):
            raise StepError(
                f"the {options.name} cache was built for {options.dtype}, but layer {layer_idx} computes in "
                f"{new.dtype}: leave dtype out, or give the model's"
            )

    @property
    def is_given(self) -> bool:
        """Whether the configuration expects anything."""
        return any((self.options.device, self.options.dtype, self.options.layer_device_map))
