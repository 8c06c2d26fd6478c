"""The twin of a Llama: other weights, the same outputs in exact arithmetic.

Weights that came out of a file of 4 bits lie on its grid, and any code with the same groups finds them again: it looks
lossless. The twin's weights are those times random factors per channel, which the next matrix takes back.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from transformers import LlamaForCausalLM


@torch.no_grad()
def twin_of(model: LlamaForCausalLM, seed: int = 0) -> LlamaForCausalLM:
    """A copy whose linear layers lie on no grid. Factors are log-uniform in [0.5, 2]. They move

    from both norms of a layer into the columns of the matrices behind them, from the rows of `up` into the columns of
    `down`, and from the rows of `v` into the columns of `o` of all query heads that share them. Embeddings and the
    output layer stay as they are.
    """
    twin = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    for layer in twin.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, behind in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            factors = _factors(norm.weight, random)
            norm.weight /= factors
            for linear in behind:
                linear.weight *= factors
        factors = _factors(mlp.up_proj.weight[:, 0], random)
        _scale_rows(mlp.up_proj, factors)
        mlp.down_proj.weight /= factors
        factors = _factors(attention.v_proj.weight[:, 0], random)
        _scale_rows(attention.v_proj, factors)
        heads = factors.view(-1, attention.head_dim).repeat_interleave(attention.num_key_value_groups, dim=0)
        attention.o_proj.weight /= heads.flatten()
    return twin


def _factors(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    exponents = 2 * torch.rand(like.shape, generator=random, dtype=torch.float64) - 1
    return (exponents * math.log(2)).exp().to(like.dtype)


def _scale_rows(linear: nn.Linear, factors: torch.Tensor) -> None:
    linear.weight *= factors[:, None]
    if linear.bias is not None:
        linear.bias *= factors
