"""The one place that chooses how attention is computed.

| keys and values | new tokens per row | computed by |
|---|---|---|
| of several caches | 1 | the kernel of `kernels.attention`; otherwise cache by cache as below |
| with a shared prefix | up to 64 | the same kernel |
| codes of a quantized cache | up to 16 queries of a head | the kernel of `fused.attention` |
| other segments | up to 64 | torch, segment by segment |
| one tensor, many keys | 1 | the kernel of `kernels.attention` |
| one tensor in full precision | 1 | torch, the query heads of a key head packed |
| one tensor, many keys | several, causal or masked | the kernel of `kernels.prompt_attention` |
| anything else | | torch, on one tensor |

Kernels are those of float32, bfloat16 and float16 on a CPU, and where they cannot compute something, torch does. The
first line, and those of one tensor, are for steps of the engine, in place of transformers' function:
`engine.kernels.attention_hook` asks here. In compiled layers `kernels.open_layers` takes the place of the table where
all layers of a step are open.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from caches.attention import fused, kernels
from caches.attention.segments import CacheRows, group_rows, ungroup_rows

FEW_TOKENS = 64  # above it the scores of segments would take more memory than the materialized keys
_MUCH = 2**17  # elements of the keys: with fewer, calling a kernel takes as long as what it saves
_MUCH_IN_HALF = 2**14  # the same in half precision, where torch's takes longer

FULL_PRECISION = (torch.float32, torch.float64)
"""The data types whose texts do not change with the order of sums."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    is_causal: bool,
) -> torch.Tensor | None:
    """Attention over one tensor each, [rows, tokens, heads, width of a value]; None where torch computes it.

    torch's kernel for grouped heads reads the keys and values once per query head, and a model that repeats them copies
    them. Packed, the query heads of a group are the tokens of one head, and the kernel reads its keys once. Results
    differ by rounding: in half precision only kernels pack them, which sum in float32.

    query: [rows, heads, tokens, width]. key, value: [rows, KV heads, slots, width]. mask: 4D, or None. scale: of the
    scores; None for width**-0.5. is_causal: whether, without a mask, a token sees the tokens up to itself alone.
    """
    is_plain = query.is_cpu and type(key) is torch.Tensor
    if not is_plain or query.ndim != 4 or key.ndim != 4:
        return None
    (rows, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    is_of_groups = heads >= kv_heads == value.shape[1] and rows == key.shape[0]
    if not is_of_groups or (mask is not None and (mask.shape[1] != 1 or mask.shape[-1] != key.shape[2])):
        return None
    is_full = query.dtype in FULL_PRECISION
    has_many_keys = key.numel() >= (_MUCH if is_full else _MUCH_IN_HALF)
    if tokens > 1:
        sees_all = mask is None and not is_causal  # which torch computes as fast
        return kernels.prompt_attention(query, key, value, mask, scale) if has_many_keys and not sees_all else None
    if has_many_keys:
        output = kernels.attention(query, [CacheRows.of_tensor(key)], [CacheRows.of_tensor(value)], mask, scale)
        if output is not None:
            return output.transpose(1, 2)
    if not is_full:
        return None
    packed = query.reshape(rows, kv_heads, -1, width)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return output.reshape(rows, 1, heads, value.shape[-1])


def segmented_attention(
    query: torch.Tensor, key: CacheRows, value: CacheRows, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor | None:
    """Attention over the segments of a cache, [rows, heads, tokens, width of a value]; None for many tokens,
    where one tensor of them is better.

    query: [rows, heads, tokens, width]. mask: 4D, added or bool, or None. scale: see `attention`.
    """
    (rows, heads, tokens, width), rows_per_prefix = query.shape, key.rows_per_prefix
    if tokens > FEW_TOKENS:
        return None
    if rows_per_prefix > 1:
        output = kernels.attention(query, [key], [value], mask, scale)
        if output is not None:
            return output
    scale = width**-0.5 if scale is None else scale
    added = None if mask is None else kernels.to_add(mask, query.dtype)
    by_head = None
    if added is not None:
        by_head = added.expand(rows, heads, tokens, key.shape[2]).unflatten(1, (key.shape[1], -1))
    if key.in_codes and value.in_codes:
        queries = (query.float() * scale).reshape(rows, key.shape[1], -1, width)
        output = fused.attention(queries, key.segments(), value.segments(), by_head, value.shape[3])
        if output is not None:
            return output.reshape(rows, heads, tokens, -1).to(query.dtype)
    queries = (query * scale).reshape(rows, key.shape[1], -1, width)
    scores = key.scores(group_rows(queries, rows_per_prefix))
    if by_head is not None:
        by_row = scores.unflatten(2, (rows_per_prefix, -1, tokens)).permute(0, 2, 1, 3, 4, 5)
        by_row += by_head.unflatten(0, (-1, rows_per_prefix))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    output = ungroup_rows(value.mixed(weights), rows_per_prefix).reshape(rows, heads, tokens, -1)
    if added is None or tokens == 1:  # a new token sees itself
        return output
    # 0 for a query that sees no slot, such as one of padding: as torch has it.
    return output.masked_fill(added.isneginf().all(dim=-1, keepdim=True), 0)
