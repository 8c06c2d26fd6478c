"""Codecs that quantize keys and values in groups: `codes * scale + offset`, with a scale and an offset per group.

A group is either per token (neighbouring channels of one slot) or per channel (one channel of a block of slots). Codecs
differ in how they choose codes and scales. A group never spans rows. A codec knows neither time nor layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from caches.attention.fused import KERNELS, QuantizedSegment, check_fused, is_supported
from caches.attention.rotation import RotatedSegment, rotated
from caches.attention.segments import AffineSegment, DenseSegment, Segment
from configs import CODECS, CodecFacts, ConfigError, QuantizedCacheConfig, require_positive
from configs.plugins import check_name

Parts = dict[str, torch.Tensor]  # "codes", "scale" and, but for fp8, "offset": [rows, heads, slots or blocks, ...]
NewScratch = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Returns scratch for the decoded elements, [rows, heads, slots, head_dim], and flat uint8 scratch, one byte per
element. Both are valid until the next call."""
Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes [groups, size], scale and offset [groups, 1]


class Codec(Protocol):
    """Quantizes keys or values, and decodes them for attention."""

    @property
    def block(self) -> int:
        """How many slots have to be quantized together; 1 if they are independent of each other."""

    def encode(self, dense: torch.Tensor) -> Parts:
        """Quantize [rows, heads, slots, head_dim]; `slots` is a multiple of `block`."""

    def decode(self, parts: Parts, new_scratch: NewScratch, in_codes: bool = False) -> Segment:
        """A segment of whole blocks; the scratch tensor has as many slots as are wanted of them. in_codes: without
        scratch, for a kernel."""

    def per_block(self, name: str) -> bool:
        """Whether the part `name` has one entry per block, not one per slot."""

    def has_kernel(self, dense: torch.Tensor) -> bool:
        """Whether a kernel computes attention over the codes of what is like `dense`, and over dense segments."""


@dataclass(frozen=True)
class Affine:
    """The codec of all libraries; they differ in `choose`.

    bits: of a code. group: elements that share a scale and an offset. per_channel: a group is one channel of `group`
    slots; else it is `group` neighbouring channels of one slot, or the most below that which divide the head's width.
    choose: see `CHOICES`. scale_dtype: of scales, offsets and the arithmetic of decoding; None is the keys' data type.
    rotate: groups are rotated before they are encoded: see `RotatedSegment`. Not with per_channel.
    fused: attention multiplies with the codes where it has a kernel; True: encoding refuses the rest.
    """

    bits: int
    group: int
    per_channel: bool
    choose: Callable[[torch.Tensor, int], Choice]
    scale_dtype: torch.dtype | None = None
    rotate: bool = False
    fused: bool | None = field(default=False, compare=False)  # the codes are the same

    @property
    def block(self) -> int:
        return self.group if self.per_channel else 1

    def has_kernel(self, dense: torch.Tensor) -> bool:
        return self.fused is not False and is_supported(dense) and KERNELS.or_none() is not None

    def per_block(self, name: str) -> bool:
        return self.per_channel and name != "codes"

    def encode(self, dense: torch.Tensor) -> Parts:
        if self.fused:
            check_fused(dense)
        rows, heads, count, width = dense.shape
        size = self.group if self.per_channel else _divisor(width, self.group)
        exact = dense.to(torch.promote_types(dense.dtype, torch.float32))
        exact = rotated(exact) if self.rotate else exact
        grouped = exact.unflatten(2, (-1, size)).transpose(-1, -2) if self.per_channel else exact
        codes, *affine = self.choose(grouped.reshape(-1, size), self.bits)
        codes = codes if codes.dtype == torch.float8_e4m3fn else codes.to(torch.uint8)
        codes = codes.view(rows, heads, -1, width, size).transpose(-1, -2) if self.per_channel else codes
        groups = (rows, heads, -1, width if self.per_channel else width // size)
        scales = zip(("scale", "offset"), affine, strict=True)
        dtype = self.scale_dtype or dense.dtype
        return {"codes": _packed(codes.reshape(rows, heads, count, width), self.bits)} | {
            name: value.reshape(groups).to(dtype) for name, value in scales if value is not None
        }

    def decode(self, parts: Parts, new_scratch: NewScratch, in_codes: bool = False) -> Segment:
        segment = self._in_codes(parts, new_scratch) if in_codes else self._unpacked(parts, new_scratch)
        return RotatedSegment(segment) if self.rotate else segment

    def _in_codes(self, parts: Parts, new_scratch: NewScratch) -> Segment:
        return QuantizedSegment(
            parts["codes"],
            parts["scale"],
            parts.get("offset"),
            self.bits,
            self.group if self.per_channel else 0,
            partial(self._unpacked, parts, new_scratch),
        )

    def _unpacked(self, encoded: Parts, new_scratch: NewScratch) -> Segment:
        out, scratch = new_scratch()
        count, dtype = out.shape[2], encoded["scale"].dtype
        target = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
        _unpack(encoded["codes"], self.bits, target, scratch)
        if not self.per_channel:
            segment = AffineSegment(target, encoded["scale"], encoded.get("offset"))
            if target is out and torch.finfo(dtype).bits >= 32:
                return segment
            segment.materialize()
        else:
            complete = count // self.group  # the last block may be cut off
            segments = target.split([complete * self.group, count - complete * self.group], dim=2)
            with torch.no_grad():  # derivatives of several views in place are refused, and codes have none
                for segment, blocks in zip(segments, (slice(complete), slice(complete, None)), strict=True):
                    if segment.shape[2]:
                        grouped = segment.unflatten(2, (-1, min(self.group, segment.shape[2])))
                        grouped.mul_(encoded["scale"][:, :, blocks, None])
                        if "offset" in encoded:
                            grouped.add_(encoded["offset"][:, :, blocks, None])
        return DenseSegment(target if target is out else out.copy_(target))


def _divisor(width: int, limit: int) -> int:
    """The largest divisor of `width` that is at most `limit`: 40 for a width of 80 and a limit of 64."""
    return next(size for size in range(min(width, limit), 0, -1) if width % size == 0)


# Codes of less than a byte share bytes within a slot. With 4 bits, byte i holds the channels i and i + width / 2: this
# way unpacking writes contiguous ranges of channels. 3 bits are stored as 2 bits, then 1 bit.


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8))
    if bits == 3:
        return torch.cat([_packed(codes & 3, 2), _packed(codes >> 2, 1)], dim=-1)
    per_byte = 8 // bits
    planes = codes.chunk(per_byte, dim=-1)
    packed = planes[0].clone()
    for number, plane in enumerate(planes[1:], 1):
        packed |= plane << (bits * number)
    return packed


def _unpack(packed: torch.Tensor, bits: int, out: torch.Tensor, scratch: torch.Tensor, times: int = 0) -> None:
    """Unpack codes into `out`, in its data type. times: if not 0, add `times * codes` to `out` instead."""
    if bits == 8:
        out.copy_(packed)
    elif bits == 3:
        low = -(-out.shape[-1] // 8) * 2  # bytes of a slot that hold the 2 bits
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
    """Scratch of the shape of `packed` and with slots outermost in memory, as in the buffers of `packed`."""
    rows, heads, slots, width = packed.shape
    return scratch[: packed.numel()].view(slots, rows, heads, width).permute(1, 2, 0, 3)


# How codes and scales are chosen: functions of elements [groups, size] and the number of bits.


def _kivi(groups: torch.Tensor, bits: int) -> Choice:
    """Equal steps from the smallest to the largest element, as in KIVI (arXiv 2402.02750)."""
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scale = ((highest - lowest) / (2**bits - 1)).clamp(min=torch.finfo(groups.dtype).tiny)
    return ((groups - lowest) / scale).round().clamp(0, 2**bits - 1), scale, lowest


def _quanto(groups: torch.Tensor, bits: int) -> Choice:
    from optimum.quanto import MaxOptimizer, qint2, qint4

    scale, shift = MaxOptimizer()(groups, {2: qint2, 4: qint4}[bits], axis=0)
    scale = scale.where(scale > 0, 1)  # a group of equal elements has scale 0
    codes = torch.ops.quanto.quantize_affine(groups, bits=bits, axis=0, group_size=None, scale=scale, shift=shift)
    return codes, scale, -shift


def _hqq(groups: torch.Tensor, bits: int) -> Choice:
    from hqq.core.quantize import Quantizer

    # Without hqq's optimizer, which stops by the mean error of all groups: rows would depend on each other.
    codes, meta = Quantizer.quantize(
        groups, nbits=bits, group_size=groups.shape[-1], axis=1, optimize=False, bitpack=False, device=groups.device
    )
    return codes, meta["scale"], -meta["zero"] * meta["scale"]


def _fp8(groups: torch.Tensor, bits: int) -> Choice:
    """float8_e4m3fn, scaled so that the largest element of a group is the largest float8. Without an offset."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (groups.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=torch.finfo(groups.dtype).tiny)
    return (groups / scale).to(torch.float8_e4m3fn), scale, None


CHOICES: dict[str, Callable[[torch.Tensor, int], Choice]] = {
    "quanto": _quanto,
    "hqq": _hqq,
    "fp8": _fp8,
    "kivi": _kivi,
}
"""By backend, the names of `configs.CODECS`."""
_PACKED_BITS = (1, 2, 3, 4, 8)


def register_codec(
    name: str, facts: CodecFacts, choose: Callable[[torch.Tensor, int], Choice], *, replace: bool = False
) -> None:
    """Make a codec known as a `backend` of the quantized caches.

    facts: what it supports. choose: (elements [groups, size], bits) -> codes [groups, size], whole numbers from 0 to
    2 ** bits - 1, and scale and offset, [groups, 1] each; None for an offset of 0. The same function may be registered
    again. Raises `ConfigError` for facts that cannot be, and where another function has the name, unless `replace`.
    """
    if not isinstance(name, str) or name != name.lower():
        raise ConfigError(f"a codec named {name!r} would never be found: write its name in small letters")
    if not isinstance(facts, CodecFacts) or not callable(choose):
        raise ConfigError(
            f"codec {name!r}: facts={facts!r:.80} and choose={choose!r:.80}, but they have to be a configs.CodecFacts "
            "and a function"
        )
    if not facts.bits or not set(facts.bits) <= set(_PACKED_BITS):
        raise ConfigError(f"codec {name!r}: bits={facts.bits}, but codes of {_PACKED_BITS} bits alone can be packed")
    require_positive(f"codec {name!r}", group=facts.group)
    if name in CHOICES:
        check_name(f"a codec named {name!r}", [CHOICES[name]], [choose], replace)
    CODECS[name], CHOICES[name] = facts, choose


def new_codec(options: QuantizedCacheConfig, name: str) -> Affine:
    """The codec for `name`, "keys" or "values". Raises `ConfigError` if the backend's library is not installed."""
    facts = CODECS[options.backend]
    if options.backend not in CHOICES:
        raise ConfigError(
            f"backend={options.backend!r} is in configs.CODECS, but no function chooses its codes: register both with "
            "caches.register_codec"
        )
    if facts.package is not None and importlib.util.find_spec(facts.package) is None:
        raise ConfigError(
            f"backend={options.backend!r} needs the package {facts.distribution}, which is not installed: "
            f"pip install {facts.distribution}, or choose backend='kivi' or 'fp8', which need none"
        )
    if options.fused:
        KERNELS.or_error()
    return Affine(
        bits=options.bits_of(name),
        group=options.group,
        per_channel=options.is_per_channel(name),
        choose=CHOICES[options.backend],
        scale_dtype=None if options.compute_dtype is None else getattr(torch, options.compute_dtype),
        rotate=options.rotates,
        fused=options.fused if options.has_kernels else False,
    )
