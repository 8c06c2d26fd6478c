"""Weights as codes of 4 or 8 bits in blocks: 32 inputs of an output have a scale, 16 outputs are next to each other.

`native/products/blocks.h` multiplies with them, and says in which order the bytes are. Their values are those of the
types Q8_0, Q4_0 and Q4_1 of GGUF files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from engine.kernels.linear_kernels import kernels

GROUP = 32  # inputs with one scale
_OUTS = 16  # outputs of a block
_AT_ONCE = 2**18  # elements whose codes are looked for together: they fit a processor's cache
_RANGES = (0.75, 0.8333, 0.9167, 1.0)  # shares of a group's range that are tried
_FITS = 5  # of scale and least value to codes, for each


class BlockCodes(NamedTuple):
    """codes: uint8 [outs / 16, width / 32, 64 * bits]. scales: float16 [outs / 16, width / 32, 1 or 2, 16].

    With one scale: weight = (code - 2 ** (bits - 1)) * scale; with two: weight = code * scale + least. Outputs and
    inputs are filled up with zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def bits(self) -> int:
        return self.codes.shape[2] // 64

    def weights(self) -> torch.Tensor:
        """All in full, float32 [outs, width]."""
        if (operators := kernels()) is not None and self.codes.device.type == "cpu":
            full: torch.Tensor = operators.block_weights(self.codes, self.scales)
            return full
        return self.rows(torch.arange(self.codes.shape[0] * _OUTS, device=self.codes.device))

    def rows(self, outs: torch.Tensor) -> torch.Tensor:
        """The weights in full of the outputs `outs` [...], float32 [..., width]."""
        block, place = outs // _OUTS, outs % _OUTS
        quads = self.codes.view(*self.codes.shape[:2], -1, _OUTS, 4)[block, :, :, place]  # [..., groups, quads, 4]
        if self.bits == 4:
            quads = torch.stack([quads & 15, quads >> 4], dim=-2).flatten(-3, -2)
        scales = self.scales[block, :, :, place].float()  # [..., groups, 1 or 2]
        codes, scale = quads.flatten(-2).float(), scales[..., :1]
        if scales.shape[-1] == 1:
            return ((codes - 2 ** (self.bits - 1)) * scale).flatten(-2)
        return (codes * scale + scales[..., 1:]).flatten(-2)


def without_values(shape: torch.Size, bits: int, values: int) -> BlockCodes:
    """Codes of weights of this shape on the meta device, whose bytes can be counted. values: 1 or 2, per group."""
    blocks = -(-shape[0] // _OUTS), -(-shape[1] // GROUP)
    return BlockCodes(
        torch.empty(*blocks, 64 * bits, dtype=torch.uint8, device="meta"),
        torch.empty(*blocks, values, _OUTS, dtype=torch.float16, device="meta"),
    )


def pack(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> BlockCodes:
    """Blocks of codes uint8 [outs, groups, 32] with scales float16 [outs, groups, 1 or 2]."""
    fill = -codes.shape[0] % _OUTS
    codes, scales = functional.pad(codes, (0, 0, 0, 0, 0, fill)), functional.pad(scales, (0, 0, 0, 0, 0, fill))
    quads = codes.view(-1, _OUTS, codes.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    in_order = scales.view(-1, _OUTS, *scales.shape[1:]).permute(0, 2, 3, 1)
    return BlockCodes(quads.flatten(2).contiguous(), in_order.contiguous())


def eight_bits(weight: torch.Tensor) -> BlockCodes:
    """Weights [outs, width], rounded to the nearest of 255 multiples of a scale."""
    if weight.is_meta:
        return without_values(weight.shape, bits=8, values=1)
    groups = _groups(weight)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).half()
    codes = (groups / scales.float().clamp_min(1e-30)).round_().clamp_(-127, 127) + 128
    return pack(codes.to(torch.uint8), scales, bits=8)


def four_bits(weight: torch.Tensor) -> BlockCodes:
    """Weights [outs, width], with the scales and least values of the smallest squared error that was found."""
    if weight.is_meta:
        return without_values(weight.shape, bits=4, values=2)
    groups = _groups(weight)
    if (operators := kernels()) is not None and weight.device.type == "cpu":
        filled = functional.pad(groups.flatten(1), (0, 0, 0, -weight.shape[0] % _OUTS)).contiguous()
        blocks = filled.shape[0] // _OUTS, groups.shape[1]
        codes = torch.empty(*blocks, 256, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(*blocks, 2, _OUTS, dtype=torch.float16, device=weight.device)
        operators.encode_four_bits(filled, codes, scales)
        return BlockCodes(codes, scales)
    fitted = [_fitted(piece) for piece in groups.split(max(1, _AT_ONCE // weight.shape[1]))]
    codes, scales = (torch.cat(tensors) for tensors in zip(*fitted, strict=True))
    return pack(codes, scales, bits=4)


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """Float32 [outs, groups, 32]."""
    return functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _fitted(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and scales of 4 bits for groups [outs, groups, 32].

    As `FourBitFit` of `native/products/blocks.h`, which is faster.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    mean = groups.mean(dim=-1, keepdim=True)
    best = [torch.full_like(low, torch.inf), groups, low, low]  # error, codes, scale, least
    for share in _RANGES:
        scale = (high - low) * (share / 15)
        least = (low + high) / 2 - 7.5 * scale
        for _ in range(_FITS):
            scale, least = (value.half().float() for value in (scale, least))
            codes = ((groups - least) / scale.clamp_min(1e-30)).round_().clamp_(0, 15)
            error = torch.addcmul(least, codes, scale).sub_(groups).square_().sum(dim=-1, keepdim=True)
            better, tried = error < best[0], [error, codes, scale, least]
            best = [torch.where(better, *pair) for pair in zip(tried, best, strict=True)]
            middle = codes.mean(dim=-1, keepdim=True)
            codes = codes - middle
            scale = (codes * groups).sum(dim=-1, keepdim=True) / codes.square().sum(dim=-1, keepdim=True).clamp_min(1)
            least = mean - scale * middle
    _, codes, scale, least = best
    return codes.to(torch.uint8), torch.cat([scale, least], dim=-1).half()
