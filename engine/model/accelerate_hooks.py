"""Models that accelerate has dispatched: its hooks bring weights and inputs together wherever a layer computes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from caches.transformers_api import accelerate_hook


def is_dispatched(model: PreTrainedModel) -> bool:
    return any(accelerate_hook(module) is not None for module in model.modules())


def input_embeddings(model: PreTrainedModel) -> Any:
    """The module that looks up token ids; None where that is of a kind of its own."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def prompt_device(model: PreTrainedModel) -> torch.device:
    """Where the model begins to compute: not `model.device`, which is "meta" where weights wait elsewhere."""
    for module in (input_embeddings(model), model):
        hook = accelerate_hook(module)
        for part in getattr(hook, "hooks", [hook]):
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device
