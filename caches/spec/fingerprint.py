"""What identifies the model that filled a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_SAMPLES = 64  # elements of each weight


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The model inside wrappers such as PEFT's. Raises `TypeError` if there is none."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"a {type(model).__name__} is no PreTrainedModel")


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Words and a digest of the weights; one of them differs where another model would compute other keys and values.

    Of every weight 64 elements are read, evenly spaced; of weights that are not in memory, the name and the shape.
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
        "adapters": _adapters(inner),
        "weights": digest.hexdigest(),
    }


def _weights(model: nn.Module) -> Iterator[bytes]:
    # Buffers that are not saved are left out: some change while a model computes.
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        yield f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel():
            flat = tensor.reshape(-1)
            spaced = torch.linspace(0, len(flat) - 1, min(_SAMPLES, len(flat)), dtype=torch.float64).long()
            yield flat[spaced.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _adapters(model: nn.Module) -> str:
    """The adapters that are active, as PEFT's layers say."""
    active = {
        name
        for module in model.modules()
        if not getattr(module, "disable_adapters", False)
        for name in _names(getattr(module, "active_adapters", ()))
    }
    return ", ".join(sorted(active)) or "none"


def _names(adapters: Any) -> tuple[str, ...]:
    """Of a layer; a model has a method of that name."""
    return tuple(map(str, adapters)) if isinstance(adapters, (list, tuple)) else ()
