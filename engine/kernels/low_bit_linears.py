"""Linear layers with weights of 8 or 4 bits, for `EngineConfig(weights=...)` on a CPU.

The products are kernels of this package, with inputs in float32. Where there are none they are torch's
operators, which are fast with bfloat16 only: a float32 layer casts its input and its output.
Where neither is fast, as with many rows, torch multiplies with the weights in full, a block of them at a time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional

from caches.platform.torch_api import KeepsDataTypes, int4_product, int8_product, pack_int4
from engine.errors import OptionError
from engine.kernels.linear_kernels import has_matrix_units, kernels

_FEW_ROWS = 16  # up to so many torch's operators are faster than products with the weights in full
_BLOCK = 2**22  # elements of the weights in full at a time
_FITTED = 2**18  # those whose codes are found at a time: they fit a processor's cache
GROUP = 64  # inputs with one scale, 4 bits
_PACKED = 64  # outputs that are packed together, 4 bits: the most of all processors
_RANGES = torch.linspace(0.75, 1, 4, device="cpu").tolist()  # parts of a group's range that are tried
_FITS = 5  # of scale and offset to codes, for each


class LowBitLinear(KeepsDataTypes):
    """in_features, out_features, bias: as of `nn.Linear`. weight: [outs, width] without values (NaN) and memory: models
    and PEFT read its data type, size and device. Codes and scales are made anew of weights that are loaded into it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        kernels()  # compiles them, if need be
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
        self.register_load_state_dict_pre_hook(_load_codes)

    def coded(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers for weights [outs, width]."""
        raise NotImplementedError

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.weight = fn(self.weight[0, 0]).expand(self.weight.shape)

    def state_dict(self, *arguments: object, **options: object) -> NoReturn:
        """Raises `OptionError`: a checkpoint would have no weights of this layer, and load with random ones."""
        raise OptionError(
            f"this model's linear layers keep codes in place of their {self.out_features} x {self.in_features} weights "
            "and others (EngineConfig(weights=...)), so there is no checkpoint of it: save the model before it is "
            "given to a Generator with weights='int8' or 'int4', or load it again"
        )


def _load_codes(
    layer: LowBitLinear,
    state: dict[str, torch.Tensor],
    prefix: str,
    metadata: object,
    strict: bool,
    *lists: list[str],
) -> None:
    """Before a state dict is loaded: put codes in the place of the layer's weights in it. lists: the errors last."""
    weight = state.pop(f"{prefix}weight", None)
    if weight is None:
        return
    wanted = layer.out_features, layer.in_features
    if tuple(weight.shape) != wanted:
        lists[-1].append(f"{prefix}weight has the shape {tuple(weight.shape)}, and the layer {wanted}")
        return
    with torch.no_grad():
        state |= {f"{prefix}{name}": part for name, part in layer.coded(weight).items()}


class Int8Linear(LowBitLinear):
    """codes: int8 [outs, width]. scales: float32 [outs], one per output; the weights are codes * scales."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        for name, part in self.coded(weight).items():
            self.register_buffer(name, part)
        self._most_rows, self._most_in_bfloat16 = _most_rows()  # numbers: asking is nothing that can be compiled

    codes: torch.Tensor
    scales: torch.Tensor

    def coded(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = weight.float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-30)
        return {"codes": (weight / scales[:, None]).round().to(torch.int8), "scales": scales}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        if rows.shape[0] <= (self._most_in_bfloat16 if input.dtype == torch.bfloat16 else self._most_rows):
            out = _int8_product(rows, self.codes, self.scales)
        else:
            dtype = torch.float32 if input.dtype == torch.float16 else input.dtype  # sums of codes exceed 65504
            blocks = (codes.to(dtype) for codes in self.codes.split(_block(input)))
            out = torch.cat([functional.linear(rows.to(dtype), block) for block in blocks], dim=-1) * self.scales
        return _shaped(out.to(input.dtype), input, self.bias)


def _most_rows() -> tuple[int, int]:
    """Up to so many rows, in float32 and bfloat16, products with codes of 8 bits beat those with the weights in full.

    Measured. A compiled layer has one kind of product: its rows are between two of `linear_routes.ROW_LIMITS`.
    """
    if kernels() is None:
        return _FEW_ROWS, _FEW_ROWS
    if has_matrix_units():
        return sys.maxsize, 128  # torch's product in bfloat16 uses them too
    most = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16
    return most, most


def _int8_product(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if (operators := kernels()) is not None:
        out: torch.Tensor = operators.int8_linears(rows.float().contiguous(), [codes], [scales.float()])
        return out
    # torch's operator takes scales in bfloat16, which would change all weights of an output alike.
    ones = torch.ones_like(scales, dtype=torch.bfloat16)
    return int8_product(rows.to(torch.bfloat16).contiguous(), codes, ones) * scales


class Int4Linear(LowBitLinear):
    """packed: codes of 4 bits in the order of torch's operator. scales: bfloat16 [width / 64, outs, 2], by group of 64
    inputs and output a scale and an offset; the weights are (codes - 8) * scale + offset.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(weight, bias)
        self.layout = _layout()
        for name, part in self.coded(weight).items():
            self.register_buffer(name, part)

    packed: torch.Tensor
    scales: torch.Tensor
    group: torch.Tensor

    def coded(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = functional.pad(weight, (0, 0, 0, -weight.shape[0] % _PACKED))
        blocks = weight.view(weight.shape[0], -1, GROUP).split(max(1, _FITTED // weight.shape[1]))
        codes, scales = zip(*(_four_bits(block.float()) for block in blocks), strict=True)
        group = torch.tensor([[GROUP]], device="cpu")  # a scalar would be part of compiled code
        return {"packed": pack_int4(torch.cat(codes)), "scales": torch.cat(scales, dim=1), "group": group}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        layout, scales = self.layout, self.scales.to(torch.bfloat16)
        if layout is not None and layout.suits_kernels and (operators := kernels()) is not None:
            found = operators.int4_linears(rows.float().contiguous(), [self.packed], [scales], layout.outs)
            out = found.to(input.dtype)
        elif rows.shape[0] <= _FEW_ROWS or layout is None:
            found = int4_product(rows.to(torch.bfloat16).contiguous(), self.packed, self.group, scales)
            out = found.to(input.dtype)
        else:
            step = -(-_block(input) // _PACKED) * _PACKED
            parts = zip(self.packed.split(step), self.scales.split(step, dim=1), strict=True)
            blocks = (_decoded(layout.unpack(packed), scales.transpose(0, 1)) for packed, scales in parts)
            out = torch.cat([functional.linear(rows, block.to(input.dtype)) for block in blocks], dim=-1)
        return _shaped(out[:, : self.out_features], input, self.bias)


class Int8Embedding(nn.Module):
    """Embeddings that read the codes of the output layer `head`: those of models with tied weights.

    embed_scale: what rows are multiplied with, as in the embeddings of several models.
    """

    def __init__(self, table: nn.Embedding, head: Int8Linear):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.head = head
        self.register_load_state_dict_pre_hook(_load_into_head)
        scale = getattr(table, "embed_scale", 1.0)
        if isinstance(scale, torch.Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    @property
    def weight(self) -> torch.Tensor:
        """See `LowBitLinear`."""
        return self.head.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return scaled((self.head.codes[input] * self.head.scales[input, None]).to(self.weight.dtype), self.embed_scale)


def _load_into_head(table: Int8Embedding, state: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
    """Before a state dict is loaded: the embeddings in it are the weights of the output layer."""
    if (weight := state.pop(f"{prefix}weight", None)) is not None:
        state[f"{prefix}head.weight"] = weight


def scaled(rows: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return rows * (scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else scale)


def _decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., width]. scales [..., width / 64, 2]: of `Int4Linear`. Returns the weights, float32."""
    scale, offset = scales.float()[..., None].unbind(dim=-2)
    return ((codes.unflatten(-1, (-1, GROUP)) - 8.0) * scale + offset).flatten(-2)


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [outs, width] and scales of `Int4Linear` for groups [outs, width / 64, 64].

    Each group has the scale and the offset with the least squared error of those tried: for several ranges around its
    middle, then the ones that fit the codes found so far best, a few times.
    """
    least, most = groups.aminmax(dim=-1, keepdim=True)
    mean = groups.mean(dim=-1, keepdim=True)
    best = [torch.full_like(least, torch.inf), groups, least, least]  # error, codes, scale, offset
    for part in _RANGES:
        scale = (most - least) * (part / 15)
        offset = (least + most + scale) / 2
        for _ in range(_FITS):
            scale, offset = (one.to(torch.bfloat16).float() for one in (scale.clamp_min(1e-30), offset))
            codes = ((groups - offset) / scale).round_().clamp_(-8, 7)
            error = torch.addcmul(offset, codes, scale).sub_(groups).square_().sum(dim=-1, keepdim=True)
            better, tried = error < best[0], [error, codes, scale, offset]
            best = [torch.where(better, *pair) for pair in zip(tried, best, strict=True)]
            middle = codes.mean(dim=-1, keepdim=True)
            codes = codes - middle
            scale = (codes * groups).sum(dim=-1, keepdim=True) / codes.square().sum(dim=-1, keepdim=True).clamp_min(1)
            offset = mean - scale * middle
    _, codes, scale, offset = best
    scales = torch.cat([scale, offset], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
    return (codes + 8).flatten(1).to(torch.int32), scales


class _Layout(NamedTuple):
    """How torch's operator orders codes of 4 bits, which depends on the processor.

    outs: outputs whose codes of one input follow each other. halves: whether a byte has an output of the first half of
    them and one of the second, or two neighbours.
    """

    outs: int
    halves: bool

    @property
    def suits_kernels(self) -> bool:
        return self.halves and self.outs >= 32

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes [outs, width]."""
        bytes = packed.view(packed.shape[0] // self.outs, -1, self.outs // 2)
        pair = bytes & 15, bytes >> 4
        codes = torch.cat(pair, dim=-1) if self.halves else torch.stack(pair, dim=-1).flatten(-2)
        return codes.transpose(1, 2).flatten(0, 1)


@functools.cache
def _layout() -> _Layout | None:
    """The order on this processor; None where it is none of those known."""
    codes = torch.randint(0, 16, (64, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0), device="cpu")
    packed = pack_int4(codes)
    known = [_Layout(outs, halves) for outs in (64, 32, 16) for halves in (True, False)]
    return next((layout for layout in known if torch.equal(layout.unpack(packed), codes)), None)


def _block(input: torch.Tensor) -> int:
    """Outputs whose weights are in full at a time."""
    return max(1, _BLOCK // input.shape[-1])


def _shaped(out: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = out.reshape(*input.shape[:-1], out.shape[-1])
    return out if bias is None else out + bias
