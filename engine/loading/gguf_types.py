"""How the types of GGUF files keep codes and scales: as in `quants.py` of the package gguf."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kernels.block_codes import GROUP, BlockCodes, pack, unpacked


class _Layout(NamedTuple):
    """Of a type: the bits of a code, and what a block has, with its bytes, in their order.

    scales: of float16, for the whole block. factors: int8, of 16 inputs each; packed: of 6 bits, for the scale and the
    least value of 32 inputs each. lower, upper: the lowest bits of codes and those above. runs: so many bytes of lower
    and of upper have the lowest bits of an equal number of inputs, then those of the next.
    """

    bits: int
    sizes: dict[str, int]
    runs: tuple[int, int]


LAYOUTS = {
    "Q8_0": _Layout(8, {"scales": 2, "lower": 32}, (32, 0)),
    "Q4_0": _Layout(4, {"scales": 2, "lower": 16}, (16, 0)),
    "Q4_1": _Layout(4, {"scales": 4, "lower": 16}, (16, 0)),
    "Q5_0": _Layout(5, {"scales": 2, "upper": 4, "lower": 16}, (16, 1)),
    "Q5_1": _Layout(5, {"scales": 4, "upper": 4, "lower": 16}, (16, 1)),
    "Q4_K": _Layout(4, {"scales": 4, "packed": 12, "lower": 128}, (32, 0)),
    "Q5_K": _Layout(5, {"scales": 4, "packed": 12, "upper": 32, "lower": 128}, (32, 32)),
    "Q6_K": _Layout(6, {"lower": 128, "upper": 64, "factors": 16, "scales": 2}, (64, 32)),
}
"""By the type's name: those whose codes are kept."""


def blocks_of(raw: torch.Tensor, type_name: str) -> BlockCodes:
    """The codes of a tensor [outs, width] in our order, from its bytes uint8 [outs, bytes]."""
    bits, sizes, runs = LAYOUTS[type_name]
    parts = raw.unflatten(1, (-1, sum(sizes.values()))).split(list(sizes.values()), dim=-1)  # [outs, blocks, bytes]
    content = dict(zip(sizes, parts, strict=True))
    lower = 8 if bits == 8 else 4
    codes = unpacked(content["lower"], lower, runs[0])
    if "upper" in content:
        codes |= unpacked(content["upper"], bits - lower, runs[1]) << lower
    if bits == 8:
        codes ^= 128  # they have a sign
    scales, factors = content["scales"].contiguous().view(torch.float16), None
    if "packed" in content:
        factors = _unpacked_factors(content["packed"])
        scales = torch.stack([scales[..., 0], -scales[..., 1]], dim=-1)  # the least value is subtracted
    elif "factors" in content:
        factors = content["factors"]
    if factors is not None:
        factors = factors.contiguous().view(torch.int8).flatten(1).unflatten(1, (-1, 2))
    return pack(codes.flatten(1).unflatten(1, (-1, GROUP)), scales, bits, factors)


def blocks_without_values(weight: torch.Tensor, type_name: str) -> BlockCodes:
    """Of a weight [outs, width], on the meta device: their bytes can be counted."""
    bits, sizes, _ = LAYOUTS[type_name]
    outs, width = weight.shape
    inputs = sizes["lower"] if bits == 8 else 2 * sizes["lower"]  # of a block
    raw = torch.empty(outs, width // inputs * sum(sizes.values()), dtype=torch.uint8, device="meta")
    return blocks_of(raw, type_name)


def _unpacked_factors(packed: torch.Tensor) -> torch.Tensor:
    """From 12 bytes, pairs of 6 bits for 8 times 32 inputs: the factor of the scale, and that of the least value."""
    scale, least, others = packed.unflatten(-1, (3, 4)).unbind(-2)  # 6 bits of the first four, with 2 of the others
    first = torch.stack([scale & 63, least & 63], dim=-1)
    last = torch.stack([others & 15 | scale >> 2 & 48, others >> 4 | least >> 2 & 48], dim=-1)
    return torch.cat([first, last], dim=-2)
