"""How a model's forward takes a cache."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from caches.layers.quirks import quirks_of
from caches.platform.transformers_api import supports_default_dynamic_cache
from engine.model.forward_parameters import forward_parameters


@dataclass(frozen=True)
class CacheArgument:
    """The parameter of a model's forward for the cache.

    name: of the parameter. can_be_ours: whether the model accepts this project's caches. has_own: see
    `caches.layers.quirks`.
    """

    name: str
    can_be_ours: bool
    has_own: bool

    def inputs(self, handle: object) -> dict[str, object]:
        """The keyword arguments for a forward with this cache; handle: None for no cache."""
        return {self.name: handle, "use_cache": handle is not None and not self.has_own}


def cache_argument(model: PreTrainedModel) -> CacheArgument:
    """The cache parameter of `model`."""
    parameters = forward_parameters(model)
    # Models that keep only states call it cache_params.
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    has_own = quirks_of(model.config).has_own_cache
    return CacheArgument(name, name in parameters and (has_own or supports_default_dynamic_cache(model)), has_own)
