"""Models with accelerate's hooks, which move weights and inputs to the device on which a layer computes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from caches.platform.transformers_api import accelerate_hook


def is_dispatched(model: PreTrainedModel) -> bool:
    """Whether a module of the model has a hook of accelerate."""
    return any(accelerate_hook(module) is not None for module in model.modules())


def swaps_weights(module: nn.Module) -> bool:
    """Whether accelerate keeps the module's own weights elsewhere, and brings them in while it computes."""
    hook = accelerate_hook(module)
    return hook is not None and any(getattr(inner, "offload", False) for inner in getattr(hook, "hooks", [hook]))


def input_embeddings(model: PreTrainedModel) -> object:
    """The module that embeds token ids; None if transformers does not know it."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def prompt_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids. With hooks, `model.device` may be "meta": weights are moved in when they are used."""
    for module in (input_embeddings(model), model):
        hook = accelerate_hook(module)
        for inner in getattr(hook, "hooks", [hook]):
            device = getattr(inner, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device
