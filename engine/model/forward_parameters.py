"""Which inputs a model's forward takes, by name."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def forward_parameters(model: PreTrainedModel | nn.Module) -> frozenset[str]:
    """The names; where a forward takes `**kwargs`, also those of the forward that it replaces."""
    replaced: list[Any] = [
        vars(model_class).get("forward") for model_class in type(model).__mro__ if model_class is not nn.Module
    ]
    names: set[str] = set()
    for forward in [vars(model).get("forward"), *replaced]:
        if forward is not None:
            parameters = inspect.signature(forward).parameters
            names |= parameters.keys()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return frozenset(names)
