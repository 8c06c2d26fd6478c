"""Pruners in the way of kvpress: a hook behind each attention shortens the layer's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


def largest(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The columns whose keys have the largest norms, as an index [rows, heads, count]."""
    return lambda keys: keys.norm(dim=-1).topk(min(count, keys.shape[-2]), dim=-1).indices.sort(dim=-1).values


def last(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The last columns, as an index [rows, heads, count]."""
    return lambda keys: torch.arange(keys.shape[-2])[-count:].expand(*keys.shape[:2], -1)


@contextmanager
def pruning(model: PreTrainedModel, choose: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[int]]:
    """While it lasts, prompts are pruned to what `choose` says. Yields how many columns each layer had before."""
    before: list[int] = []

    def prune(module, args, kwargs, output):
        if kwargs["hidden_states"].shape[1] == 1:
            return
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        before.append(layer.keys.shape[-2])
        index = choose(layer.keys)[..., None]
        keys, values = (kept.gather(2, index.expand(-1, -1, -1, kept.shape[-1])) for kept in (layer.keys, layer.values))
        layer.keys, layer.values = keys, values

    attentions = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")]
    hooks = [module.register_forward_hook(prune, with_kwargs=True) for module in attentions]
    try:
        yield before
    finally:
        for hook in hooks:
            hook.remove()
