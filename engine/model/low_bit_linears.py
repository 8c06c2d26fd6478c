"""Linear layers with weights of 8 or 4 bits, for `EngineConfig(weights=...)` on a CPU.

The products are torch's own operators. They are fast with bfloat16 activations only: a float32 layer casts its input
and its output. Steps of many rows multiply with the weights in full, a block of them at a time.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from caches.torch_api import int4_product, int8_product, pack_int4
from engine.errors import OptionError
from engine.model.accelerate_hooks import is_dispatched

_FEW_ROWS = 16  # up to so many the low-bit product is the faster one
_BLOCK = 2**22  # elements of the weights in full at a time
_GROUP = 64  # inputs with one scale, 4 bits
_SHRUNK = torch.linspace(0.75, 1, 6).tolist()  # parts of a group's range that are tried


class Int8Linear(nn.Module):
    """codes: int8 [outs, width]. scales: bfloat16 [outs], one per output; the weights are codes * scales."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.bias = layer.bias
        weight = layer.weight.detach().float()
        # The codes are of the scale that is kept: rounding it to bfloat16 afterwards would change all of a row alike.
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-30).mul(1 + 2**-8).to(torch.bfloat16)
        codes = (weight / scales[:, None].float()).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    codes: torch.Tensor
    scales: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        if rows.shape[0] <= _FEW_ROWS:
            out = int8_product(rows.to(torch.bfloat16), self.codes, self.scales).to(input.dtype)
        else:
            blocks = (codes.to(input.dtype) for codes in self.codes.split(_block(input)))
            out = torch.cat([functional.linear(rows, block) for block in blocks], dim=-1) * self.scales.to(input.dtype)
        return _shaped(out, input, self.bias)


class Int4Linear(nn.Module):
    """packed: codes of 4 bits in the order of torch's operator. scales: bfloat16 [width / 64, outs, 2], by group of 64
    inputs and output a scale and an offset; the weights are (codes - 8) * scale + offset.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.bias = layer.bias
        blocks = layer.weight.detach().view(layer.out_features, -1, _GROUP).split(_block(layer.weight))
        codes, scales = zip(*(_four_bits(block.float()) for block in blocks), strict=True)
        self.register_buffer("packed", pack_int4(torch.cat(codes)))
        self.register_buffer("scales", torch.cat(scales, dim=1))
        self.register_buffer("group", torch.tensor([[_GROUP]]))  # a scalar would be part of compiled code

    packed: torch.Tensor
    scales: torch.Tensor
    group: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, outs = input.reshape(-1, input.shape[-1]), self.packed.shape[0]
        if rows.shape[0] <= _FEW_ROWS or (layout := _layout()) is None or outs % layout[0]:
            out = int4_product(rows.to(torch.bfloat16), self.packed, self.group, self.scales).to(input.dtype)
        else:
            step = -(-_block(input) // layout[0]) * layout[0]
            blocks = (
                self._in_full(slice(begin, begin + step), layout).to(input.dtype) for begin in range(0, outs, step)
            )
            out = torch.cat([functional.linear(rows, block) for block in blocks], dim=-1)
        return _shaped(out, input, self.bias)

    def _in_full(self, outs: slice, layout: tuple[int, bool]) -> torch.Tensor:
        """The weights of some outputs, [outs, width]."""
        codes = _unpacked(self.packed[outs], *layout)
        scale, offset = (part.T[..., None] for part in self.scales[:, outs].float().unbind(dim=-1))
        return ((codes.view(len(codes), -1, _GROUP) - 8.0) * scale + offset).flatten(1)


def _four_bits(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [outs, width] and scales of `Int4Linear` for groups [outs, width / 64, 64].

    Of several ranges around a group's middle, each group takes the one with the least squared error.
    """
    least, most = groups.aminmax(dim=-1, keepdim=True)
    middle, best = (least + most) / 2, torch.full_like(least, torch.inf)
    codes, kept = torch.zeros_like(groups), torch.zeros_like(torch.stack([least, most]))
    for part in _SHRUNK:
        scale = ((most - least) * part / 15).clamp_min(1e-30).to(torch.bfloat16).float()
        offset = (middle + scale / 2).to(torch.bfloat16).float()
        tried = ((groups - offset) / scale + 8).round().clamp(0, 15)
        error = ((tried - 8) * scale + offset - groups).square().sum(dim=-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, tried, codes)
        kept = torch.where(better, torch.stack([scale, offset]), kept)
    scales = kept[..., 0].permute(2, 1, 0).to(torch.bfloat16).contiguous()
    return codes.flatten(1).to(torch.int32), scales


@functools.cache
def _layout() -> tuple[int, bool] | None:
    """How torch's operator orders codes on this processor, see `_unpacked`; None where that is not known."""
    codes = torch.randint(0, 16, (64, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0), device="cpu")
    packed = pack_int4(codes)
    known = [(outs, halves) for outs in (64, 32, 16) for halves in (True, False)]
    return next((layout for layout in known if torch.equal(_unpacked(packed, *layout), codes)), None)


def _unpacked(packed: torch.Tensor, outs: int, halves: bool) -> torch.Tensor:
    """Codes [outs, width]. outs: outputs whose codes of one input follow each other. halves: whether a byte has an
    output of the first half of them and one of the second, or two neighbours."""
    bytes = packed.view(packed.shape[0] // outs, -1, outs // 2)
    pair = bytes & 15, bytes >> 4
    codes = torch.cat(pair, dim=-1) if halves else torch.stack(pair, dim=-1).flatten(-2)
    return codes.transpose(1, 2).flatten(0, 1)


def _block(input: torch.Tensor) -> int:
    """Outputs whose weights are in full at a time."""
    return max(1, _BLOCK // input.shape[-1])


def _shaped(out: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = out.view(*input.shape[:-1], -1)
    return out if bias is None else out + bias


KINDS: dict[str, type[Int8Linear] | type[Int4Linear]] = {"int8": Int8Linear, "int4": Int4Linear}


def convert_linears(model: PreTrainedModel, weights: str) -> None:
    """Replace the linear layers of a model by those with `weights`, "int8" or "int4", one after the other.

    Layers of a width that torch's operator does not take (4 bits: no multiple of 64) stay as they are. Raises
    `OptionError` if there is none to replace.
    """
    named = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if any(isinstance(module, KINDS[weights]) for module in model.modules()):
        return  # another `Generator` has done so
    if is_dispatched(model) or any(module.weight.device.type != "cpu" for module in named.values()):
        raise OptionError(
            f"weights={weights!r}: torch's products of that kind are for CPUs, and {type(model).__name__} is elsewhere"
        )
    if weights == "int4":
        named = {name: module for name, module in named.items() if module.in_features % _GROUP == 0}
    named = {name: module for name, module in named.items() if module.weight.is_floating_point()}
    if not named:
        raise OptionError(f"weights={weights!r}, but {type(model).__name__} has no linear layers that can be converted")
    with torch.no_grad():
        for name, module in named.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, KINDS[weights](module).train(module.training))
