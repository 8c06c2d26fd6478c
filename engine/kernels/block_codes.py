"""Weights as codes of 4, 5, 6 or 8 bits in blocks: 32 inputs of an output have a scale, and 16 outputs are next to each
other.

`native/products/blocks.h` multiplies with them, and `codes.h` says in which order the bytes are. Their values are those
of the types Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, Q6_K, Q5_K and Q4_K of GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.kernels.linear_kernels import kernels

GROUP = 32  # inputs with one scale
_OUTS = 16  # outputs of a block
_FIELDS = {4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # of codes by their bits: the lowest bits first
_AT_ONCE = 2**18  # elements whose codes are looked for together: they fit a processor's cache
_SAMPLED = 64  # outputs, at least, whose errors are compared
_RANGES = (0.75, 0.8333, 0.9167, 1.0)  # shares of a group's range that are tried
_FITS = 5  # of scale and least value to codes, for each


class BlockCodes(NamedTuple):
    """codes: uint8 [outs / 16, width / 32, 64 * bits]. scales: float16 [outs / 16, width / 32, 1 or 2, 16].

    With one scale: weight = (code - 2 ** (bits - 1)) * scale; with two: weight = code * scale + least. Outputs and
    inputs are filled up with zeros.

    factors: int8 [outs / 16, width / 32, 0 or 2, 16]. If there are two, the scales are [outs / 16, width / 256, 1 or 2,
    16], and each 32 inputs have factors of them: of the scale and of the least value, or of the one scale for the first
    16 inputs (6 bits only) and for the last 16.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    input_scales: torch.Tensor

    @property
    def bits(self) -> int:
        return self.codes.shape[2] // 64

    def weights(self) -> torch.Tensor:
        """All in full, float32 [outs, width]."""
        if (operators := kernels()) is not None and self.codes.device.type == "cpu":
            full: torch.Tensor = operators.block_weights(self.codes, self.scales, self.factors)
            return self._of_scaled_inputs(full)
        return self.rows(torch.arange(self.codes.shape[0] * _OUTS, device=self.codes.device))

    def rows(self, outs: torch.Tensor) -> torch.Tensor:
        """The weights in full of the outputs `outs` [...], float32 [..., width]."""
        if (operators := kernels()) is not None and self.codes.device.type == "cpu":
            integers = outs if outs.is_floating_point() else outs.long()  # the operator refuses floats
            full: torch.Tensor = operators.block_rows(self.codes, self.scales, self.factors, integers.contiguous())
            return self._of_scaled_inputs(full)
        block, place = outs // _OUTS, outs % _OUTS
        packed = self.codes.view(*self.codes.shape[:2], -1, _OUTS, 4)[block, :, :, place]  # [..., groups, 8 * bits, 4]
        lower, *upper = packed.flatten(-2).split([4 * width for width in _FIELDS[self.bits]], dim=-1)
        codes = unpacked(lower, _FIELDS[self.bits][0], run=4)
        for fields in upper:
            codes = codes | unpacked(fields, self.bits - 4, run=4) << 4
        values = codes.float()  # [..., groups, 32]
        scales = self.scales[block, :, :, place].float()  # [..., groups, 1 or 2]
        has_least = scales.shape[-1] == 2
        if self.factors.shape[2]:
            factors = self.factors[block, :, :, place].float()
            scales = (factors.unflatten(-2, (scales.shape[-2], -1)) * scales[..., None, :]).flatten(-3, -2)
        if has_least:
            return self._of_scaled_inputs((values * scales[..., :1] + scales[..., 1:]).flatten(-2))
        parts = (values - 2 ** (self.bits - 1)).unflatten(-1, (scales.shape[-1], -1))
        return self._of_scaled_inputs((parts * scales[..., None]).flatten(-3))

    def _of_scaled_inputs(self, weights: torch.Tensor) -> torch.Tensor:
        return weights * self.input_scales if self.input_scales.shape[0] else weights


def unpacked(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """The fields of `width` bits in bytes [..., n], uint8 [..., 8 * n / width].

    Of each `run` bytes those of the lowest bits come first.
    """
    runs = packed.unflatten(-1, (-1, run))
    fields = [runs >> at & 2**width - 1 for at in range(0, 8, width)]
    return torch.stack(fields, dim=-2).flatten(-3)


def pack(codes: torch.Tensor, scales: torch.Tensor, bits: int, factors: torch.Tensor | None = None) -> BlockCodes:
    """Blocks of codes uint8 [outs, groups, 32] with scales float16 [outs, groups, 1 or 2].

    factors: int8 [outs, groups, 2], with scales [outs, groups / 8, 1 or 2].
    """
    without_scales = torch.empty(0, device=codes.device)
    if factors is None:
        factors = torch.empty(*codes.shape[:2], 0, dtype=torch.int8, device=codes.device)
    fill = -codes.shape[0] % _OUTS
    codes, scales, factors = (functional.pad(of, (0, 0, 0, 0, 0, fill)) for of in (codes, scales, factors))
    quads = codes.view(-1, _OUTS, codes.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    lines, least_bit = [], 0
    for width in _FIELDS[bits]:
        fields = (quads >> least_bit & 2**width - 1).unflatten(2, (width, -1))
        line = fields[:, :, :, 0]
        for at in range(1, 8 // width):
            line = line | fields[:, :, :, at] << at * width
        lines.append(line.flatten(2))
        least_bit += width
    scales, factors = (of.unflatten(0, (-1, _OUTS)).permute(0, 2, 3, 1).contiguous() for of in (scales, factors))
    return BlockCodes(torch.cat(lines, dim=2), scales, factors, without_scales)


def eight_bits(weight: torch.Tensor) -> BlockCodes:
    """Weights [outs, width], rounded to the nearest of 255 multiples of a scale."""
    return _leveled(weight, _rounded)


def four_bits(weight: torch.Tensor) -> BlockCodes:
    """Weights [outs, width] in 4 bits, or in 5 where there are fewer outputs than inputs.

    Errors of those weigh most per byte: in a Llama these are keys, values, and what goes back out of an MLP.
    """
    return fitted(weight, bits=4 if weight.shape[0] >= weight.shape[1] else 5)


def fitted(weight: torch.Tensor, bits: int) -> BlockCodes:
    """Weights [outs, width], with the scales and least values of the smallest squared error that was found."""
    return _leveled(weight, partial(_fitted, bits=bits))


def _leveled(weight: torch.Tensor, encode: Callable[[torch.Tensor], BlockCodes]) -> BlockCodes:
    """Codes of weights whose inputs have equal mean squares, with the scales that this takes.

    The range of a group is that of its largest inputs, and the error of the others is as large. Weights that lie on a
    grid, as those that were decoded before, are found again with scales of 1 only.

    encode: from some outputs of the weights, float32 [outs, width], to their codes.
    """
    pieces = weight.split(max(1, _AT_ONCE // weight.shape[1] // _OUTS) * _OUTS)
    squares = torch.stack([piece.float().square().sum(dim=0) for piece in pieces]).sum(dim=0)
    scales = (squares / weight.shape[0]).sqrt_()
    scales = torch.where(scales > 1e-12, scales, 1.0)
    if not weight.is_meta:  # there only sizes are asked for
        some = weight[:: max(1, weight.shape[0] // _SAMPLED)].float()
        if _error(some, encode) < _error(some / scales, encode) / 4:
            scales = torch.ones_like(scales)
    filled = functional.pad(scales, (0, -weight.shape[1] % GROUP), value=1.0)
    codes, of_codes, factors, _ = map(torch.cat, zip(*(encode(piece / scales) for piece in pieces), strict=True))
    return BlockCodes(codes, of_codes, factors, filled)


def _error(weight: torch.Tensor, encode: Callable[[torch.Tensor], BlockCodes]) -> float:
    """The mean square of it, relative to that of the weights."""
    decoded = encode(weight).weights()[: weight.shape[0], : weight.shape[1]]
    return float((decoded - weight).square().sum() / weight.square().sum().clamp_min(1e-30))


def _rounded(weight: torch.Tensor) -> BlockCodes:
    """8 bits."""
    groups = _groups(weight)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).half()
    codes = (groups / scales.float().clamp_min(1e-30)).round_().clamp_(-127, 127) + 128
    return pack(codes.to(torch.uint8), scales, bits=8)


def _fitted(weight: torch.Tensor, bits: int) -> BlockCodes:
    """See `fitted`."""
    groups = _groups(weight)
    operators = kernels() if weight.device.type == "cpu" else None
    if operators is None and not weight.is_meta:
        return pack(*_fit(groups, 2**bits - 1), bits)
    filled = functional.pad(groups.flatten(1), (0, 0, 0, -weight.shape[0] % _OUTS)).contiguous()
    blocks = filled.shape[0] // _OUTS, groups.shape[1]
    codes = torch.empty(*blocks, 64 * bits, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*blocks, 2, _OUTS, dtype=torch.float16, device=weight.device)
    factors = torch.empty(*blocks, 0, _OUTS, dtype=torch.int8, device=weight.device)
    if operators is not None:
        operators.encode_weights(filled, codes, scales, factors)
    return BlockCodes(codes, scales, factors, torch.empty(0, device=weight.device))


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """Float32 [outs, groups, 32]."""
    return functional.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _fit(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8, from 0 to `most`, and scales for groups [outs, groups, 32].

    As `Fit` of `native/products/codes.h`, which is faster.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    mean = groups.mean(dim=-1, keepdim=True)
    best = [torch.full_like(low, torch.inf), groups, low, low]  # error, codes, scale, least
    for share in _RANGES:
        scale = (high - low) * (share / most)
        least = (low + high) / 2 - most / 2 * scale
        for _ in range(_FITS):
            scale, least = (value.half().float() for value in (scale, least))
            codes = ((groups - least) / scale.clamp_min(1e-30)).round_().clamp_(0, most)
            error = torch.addcmul(least, codes, scale).sub_(groups).square_().sum(dim=-1, keepdim=True)
            better, tried = error < best[0], [error, codes, scale, least]
            best = [torch.where(better, *pair) for pair in zip(tried, best, strict=True)]
            middle = codes.mean(dim=-1, keepdim=True)
            codes = codes - middle
            scale = (codes * groups).sum(dim=-1, keepdim=True) / codes.square().sum(dim=-1, keepdim=True).clamp_min(1)
            least = mean - scale * middle
    _, codes, scale, least = best
    return codes.to(torch.uint8), torch.cat([scale, least], dim=-1).half()
