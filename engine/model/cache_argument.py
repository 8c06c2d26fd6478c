"""How a model's forward is given a cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from caches.transformers_api import supports_default_dynamic_cache

# A forward of these refuses every class but its own while `use_cache` is true. Without it, it drives what it is given.
_REFUSES_OTHER_CLASSES = ("minimax",)


@dataclass(frozen=True)
class CacheArgument:
    """The argument of a model's forward that takes a cache. can_be_ours: whether it takes keys and values of ours."""

    name: str
    can_be_ours: bool
    refuses_other_classes: bool

    def inputs(self, handle: Any) -> dict[str, Any]:
        """The arguments that give the forward this cache; None for no cache."""
        return {self.name: handle, "use_cache": handle is not None and not self.refuses_other_classes}


def cache_argument(model: PreTrainedModel) -> CacheArgument:
    """How `model` is given a cache."""
    taken = inspect.signature(model.forward).parameters
    # Models that keep nothing but states have a name of their own for it.
    name = "cache_params" if "cache_params" in taken else "past_key_values"
    refuses = model.config.model_type in _REFUSES_OTHER_CLASSES
    return CacheArgument(name, name in taken and (refuses or supports_default_dynamic_cache(model)), refuses)
