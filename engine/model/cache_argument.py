"""How a model's forward takes a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from caches.platform.transformers_api import supports_default_dynamic_cache
from engine.model.forward_parameters import forward_parameters

# Model types whose forward refuses other classes of caches with use_cache=True, but uses them with use_cache=False.
_REFUSES_OTHER_CLASSES = ("minimax",)


@dataclass(frozen=True)
class CacheArgument:
    """The parameter of a model's forward for the cache.

    name: of the parameter. can_be_ours: whether the model accepts this project's caches. refuses_other_classes: see
    `_REFUSES_OTHER_CLASSES`.
    """

    name: str
    can_be_ours: bool
    refuses_other_classes: bool

    def inputs(self, handle: Any) -> dict[str, Any]:
        """The keyword arguments for a forward with this cache; handle: None for no cache."""
        return {self.name: handle, "use_cache": handle is not None and not self.refuses_other_classes}


def cache_argument(model: PreTrainedModel) -> CacheArgument:
    """The cache parameter of `model`."""
    taken = forward_parameters(model)
    # Models that keep only states call it cache_params.
    name = "cache_params" if "cache_params" in taken else "past_key_values"
    refuses = model.config.model_type in _REFUSES_OTHER_CLASSES
    return CacheArgument(name, name in taken and (refuses or supports_default_dynamic_cache(model)), refuses)
