"""How columns of keys and values are written down in few bits. Neither time nor layers are known here.

All codecs give every group of numbers a scale and an offset of its own and keep `codes * scale + offset`. They differ
in who chooses the codes and in what a group is: neighbouring channels of one column, so that columns are independent of
each other, or one channel of a block of columns. Rows never share a group.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from caches.attention.segments import AffineSegment, Attend, DenseSegment, Segment
from caches.quantization.fused_attention import QuantizedSegment, attention, check_fused, kernels
from configs import CODECS, ConfigError, QuantizedCacheConfig

Parts = dict[str, torch.Tensor]  # [rows, heads, columns or blocks, ...]
ExpectedDevice = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Where the numbers go, [rows, heads, columns, head_dim], and bytes to work with, flat, as many as there are numbers.
Asked for when it is needed; the next request may give the same memory."""
Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes [groups, size], scale and offset [groups, 1]


class Codec(Protocol):
    @property
    def block(self) -> int:
        """How many columns have to be encoded together; 1 where they are independent of each other."""

    def encode(self, columns: torch.Tensor) -> Parts:
        """Columns [rows, heads, whole blocks of columns, head_dim] in few bits."""

    def decode(self, parts: Parts, place: ExpectedDevice) -> Segment:
        """Whole blocks, of which the last may be cut off where its place ends."""

    def per_block(self, name: str) -> bool:
        """Whether the part of that name has one entry per block, not one per column."""

    @property
    def attend(self) -> Attend | None:
        """What computes attention over such segments, and those in full, in one go."""


@dataclass(frozen=True)
class Affine:
    """bits: of a code. group: numbers that share a scale and an offset.

    over_columns: a group is one channel of `group` columns; else it is as many neighbouring channels of one column, or
    the most that divide the head's width. choose: see `CHOICES`. scale_dtype: of scales and offsets, and what decoding
    computes in; None is the type of the keys. fused: whether attention multiplies with the codes as they are.
    """

    bits: int
    group: int
    over_columns: bool
    choose: Callable[[torch.Tensor, int], Choice]
    scale_dtype: torch.dtype | None = None
    fused: bool = field(default=False, compare=False)  # what is written is the same

    @property
    def block(self) -> int:
        return self.group if self.over_columns else 1

    @property
    def attend(self) -> Attend | None:
        return attention if self.fused else None

    def per_block(self, name: str) -> bool:
        return self.over_columns and name != "codes"

    def encode(self, columns: torch.Tensor) -> Parts:
        if self.fused:
            check_fused(columns)
        rows, heads, count, width = columns.shape
        size = self.group if self.over_columns else _divisor(width, self.group)
        grouped = columns.unflatten(2, (-1, size)).transpose(-1, -2) if self.over_columns else columns
        exact = torch.promote_types(columns.dtype, torch.float32)
        codes, *beside = self.choose(grouped.reshape(-1, size).to(exact), self.bits)
        codes = codes if codes.dtype == torch.float8_e4m3fn else codes.to(torch.uint8)
        codes = codes.view(rows, heads, -1, width, size).transpose(-1, -2) if self.over_columns else codes
        groups = (rows, heads, -1, width if self.over_columns else width // size)
        scales = zip(("scale", "offset"), beside, strict=True)
        dtype = self.scale_dtype or columns.dtype
        return {"codes": _packed(codes.reshape(rows, heads, count, width), self.bits)} | {
            name: value.reshape(groups).to(dtype) for name, value in scales if value is not None
        }

    def decode(self, parts: Parts, place: ExpectedDevice) -> Segment:
        if not self.fused:
            return self._unpacked(parts, place)
        return QuantizedSegment(
            parts["codes"],
            parts["scale"],
            parts.get("offset"),
            self.bits,
            self.group if self.over_columns else 0,
            partial(self._unpacked, parts, place),
        )

    def _unpacked(self, parts: Parts, place: ExpectedDevice) -> Segment:
        out, scratch = place()
        count, dtype = out.shape[2], parts["scale"].dtype
        target = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
        _unpack(parts["codes"], self.bits, target, scratch)
        if not self.over_columns:
            segment = AffineSegment(target, parts["scale"], parts.get("offset"))
            if target is out and torch.finfo(dtype).bits >= 32:
                return segment
            segment.materialize()
        else:
            whole = count // self.group
            segments = target.split([whole * self.group, count - whole * self.group], dim=2)
            for of_whole, blocks in zip(segments, (slice(whole), slice(whole, None)), strict=True):
                if of_whole.shape[2]:
                    columns = of_whole.unflatten(2, (-1, min(self.group, of_whole.shape[2])))
                    columns.mul_(parts["scale"][:, :, blocks, None])
                    if "offset" in parts:
                        columns.add_(parts["offset"][:, :, blocks, None])
        return DenseSegment(target if target is out else out.copy_(target))


def _divisor(width: int, wanted: int) -> int:
    """The largest group that divides the head's width and is no larger than wanted: 40 of 80 for 64."""
    return next(size for size in range(min(width, wanted), 0, -1) if width % size == 0)


# Codes of less than a byte share bytes with others of the same column: byte i of a column holds channel i, i + width/2,
# ..., so unpacking writes contiguous segments. Three bits are two and one.


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8))
    if bits == 3:
        return torch.cat([_packed(codes & 3, 2), _packed(codes >> 2, 1)], dim=-1)
    per_byte = 8 // bits
    segments = codes.chunk(per_byte, dim=-1)
    packed = segments[0].clone()
    for number, segment in enumerate(segments[1:], 1):
        packed |= segment << (bits * number)
    return packed


def _unpack(packed: torch.Tensor, bits: int, out: torch.Tensor, scratch: torch.Tensor, times: int = 0) -> None:
    """Write the codes into `out` as numbers, or add them that many times to what is there."""
    if bits == 8:
        out.copy_(packed)
    elif bits == 3:
        low = -(-out.shape[-1] // 8) * 2  # bytes of the two bits of a column
        _unpack(packed[..., :low], 2, out, scratch)
        _unpack(packed[..., low:], 1, out, scratch, times=4)
    else:
        codes = _like(packed, scratch)
        size = packed.shape[-1]
        for number, begin in enumerate(range(0, out.shape[-1], size)):
            if number:
                torch.bitwise_right_shift(packed, bits * number, out=codes)
            if (number + 1) * bits < 8:
                torch.bitwise_and(codes if number else packed, 2**bits - 1, out=codes)
            channels = out[..., begin : begin + size]
            if times:
                channels.add_(codes[..., : channels.shape[-1]], alpha=times)
            else:
                channels.copy_(codes[..., : channels.shape[-1]])


def _like(packed: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Scratch of that shape, with columns outermost in memory as in the buffers that `packed` comes from."""
    rows, heads, columns, width = packed.shape
    return scratch[: packed.numel()].view(columns, rows, heads, width).permute(1, 2, 0, 3)


# Who chooses the codes of groups [groups, size].


def _kivi(groups: torch.Tensor, bits: int) -> Choice:
    """Smallest to largest number in equal steps, as in KIVI (arXiv 2402.02750)."""
    least, most = groups.aminmax(dim=-1, keepdim=True)
    scale = ((most - least) / (2**bits - 1)).clamp(min=torch.finfo(groups.dtype).tiny)
    return ((groups - least) / scale).round().clamp(0, 2**bits - 1), scale, least


def _quanto(groups: torch.Tensor, bits: int) -> Choice:
    from optimum.quanto import MaxOptimizer, qint2, qint4

    scale, shift = MaxOptimizer()(groups, {2: qint2, 4: qint4}[bits], axis=0)
    scale = scale.where(scale > 0, 1)  # a group of equal numbers
    codes = torch.ops.quanto.quantize_affine(groups, bits=bits, axis=0, group_size=None, scale=scale, shift=shift)
    return codes, scale, -shift


def _hqq(groups: torch.Tensor, bits: int) -> Choice:
    from hqq.core.quantize import Quantizer

    # Its optimiser stops when the mean error of all groups does: then a row would depend on its neighbours.
    codes, meta = Quantizer.quantize(
        groups, nbits=bits, group_size=groups.shape[-1], axis=1, optimize=False, bitpack=False, device=groups.device
    )
    return codes, meta["scale"], -meta["zero"] * meta["scale"]


def _fp8(groups: torch.Tensor, bits: int) -> Choice:
    """Numbers of 8 bits with a floating point, the largest of a group at the end of their range."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = (groups.abs().amax(dim=-1, keepdim=True) / most).clamp(min=torch.finfo(groups.dtype).tiny)
    return (groups / scale).to(torch.float8_e4m3fn), scale, None


CHOICES: dict[str, Callable[[torch.Tensor, int], Choice]] = {
    "quanto": _quanto,
    "hqq": _hqq,
    "fp8": _fp8,
    "kivi": _kivi,
}
"""By the names of `configs.CODECS`."""


def new_codec(options: QuantizedCacheConfig, name: str) -> Affine:
    """The codec for "keys" or "values". Raises `ConfigError` when the library it needs is not installed."""
    facts = CODECS[options.backend]
    if facts.package is not None and importlib.util.find_spec(facts.package) is None:
        raise ConfigError(
            f"backend={options.backend!r} needs the package {facts.distribution}, which is not installed: "
            f"pip install {facts.distribution}, or choose backend='kivi' or 'fp8', which need none"
        )
    if options.fused:
        kernels()
    return Affine(
        bits=options.bits,
        group=options.group,
        over_columns=options.groups_over_columns(name),
        choose=CHOICES[options.backend],
        scale_dtype=None if options.compute_dtype is None else getattr(torch, options.compute_dtype),
        fused=options.fused,
    )
