"""The twin of a model with outliers: a few channels of its keys are far larger, and every output is the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch


@torch.no_grad()
def outlier_twin(model: Any, factor: float, pairs: Iterable[int] = (5, 20, 29)) -> Any:
    """A copy of a Llama-like model whose keys have `factor` times larger channels, and its queries smaller ones.

    pairs: the rotary pairs (i, i + head_dim / 2) of every head. Scores, and so all outputs, are the same in exact
    arithmetic.
    """
    twin = copy.deepcopy(model)
    width = twin.config.head_dim
    channels = [channel for pair in pairs for channel in (pair, pair + width // 2)]
    for layer in twin.model.layers:
        for projection, times in ((layer.self_attn.k_proj, factor), (layer.self_attn.q_proj, 1 / factor)):
            for weights in filter(lambda tensor: tensor is not None, (projection.weight, projection.bias)):
                weights.unflatten(0, (-1, width))[:, channels] *= times
    return twin
