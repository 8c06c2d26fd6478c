"""Linear layers and embeddings whose weights are codes of few bits, on a CPU.

The products are kernels of this package, in float32. Without them, and with many rows where that is faster, torch
multiplies with the weights in full, some outputs at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn
from torch.nn import functional

from caches.platform.torch_api import KeepsDataTypes
from engine.errors import InputError, OptionError
from engine.kernels.block_codes import GROUP, BlockCodes, eight_bits, four_bits
from engine.kernels.linear_kernels import has_integer_products, has_matrix_units, kernels
from engine.tables import outside

_IN_FULL = 2**22  # elements of weights at a time
_TENSORS = BlockCodes._fields

ENCODERS: dict[str, Callable[[torch.Tensor], BlockCodes]] = {"int8": eight_bits, "int4": four_bits}
"""From weights [outs, width] to their codes, by the choices of `EngineConfig(weights=...)`."""


class LowBitLinear(KeepsDataTypes):
    """in_features, out_features, bias: as of `nn.Linear`. weight: [outs, width] without values (NaN) and memory: models
    and PEFT read its data type, size and device. codes, scales, factors, input_scales: of `BlockCodes`; they are made
    anew, by `encode`, of weights that are loaded into the layer. rounds_inputs: see `EngineConfig.activations`."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    input_scales: torch.Tensor

    def __init__(
        self,
        blocks: BlockCodes,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        encode: Callable[[torch.Tensor], BlockCodes],
    ):
        """weight: [outs, width], whose values are not kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.encode = encode
        self.weight = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
        for name, tensor in zip(_TENSORS, blocks, strict=True):
            self.register_buffer(name, tensor)
        self.rounds_inputs = False
        self._most_rows = _most_rows()  # a number: asking is nothing that can be compiled
        self.register_load_state_dict_pre_hook(_load_codes)

    @property
    def blocks(self) -> BlockCodes:
        return BlockCodes(self.codes, self.scales, self.factors, self.input_scales)

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.weight = fn(self.weight[0, 0]).expand(self.weight.shape)

    def state_dict(self, *arguments: object, **options: object) -> NoReturn:
        """Raises `OptionError`: a checkpoint would have no weights of this layer, and load with random ones."""
        raise OptionError(
            f"this model's linear layers keep codes in place of their {self.out_features} x {self.in_features} weights "
            "and others (EngineConfig(weights=...)), so there is no checkpoint of it: save the model before it is "
            "given to a Generator with weights='int8' or 'int4', or load it again (a GGUF file with weights='full')"
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features  # `Size.numel` would make a constant of it in compiled code
        if (rows <= self._most_rows or self.rounds_inputs) and (operators := kernels()) is not None:
            product = operators.rounded_block_linears if self.rounds_inputs else operators.block_linears
            out = product(input.float().contiguous(), *([tensor] for tensor in self.blocks))
        else:
            full = _product_in_full(input.reshape(-1, self.in_features).float(), self.blocks)
            out = full.reshape(*input.shape[:-1], full.shape[-1])
        if out.shape[-1] > self.out_features:
            out = out[..., : self.out_features]
        out = out.to(input.dtype)
        return out if self.bias is None else out + self.bias


def _product_in_full(rows: torch.Tensor, blocks: BlockCodes) -> torch.Tensor:
    width = blocks.codes.shape[1] * GROUP
    if rows.shape[1] < width:
        rows = functional.pad(rows, (0, width - rows.shape[1]))
    elements = width * 16
    split = (tensor.split(max(1, _IN_FULL // elements)) for tensor in (blocks.codes, blocks.scales, blocks.factors))
    weights = (
        BlockCodes(codes, scales, factors, blocks.input_scales).weights()
        for codes, scales, factors in zip(*split, strict=True)
    )
    return torch.cat([functional.linear(rows, weight) for weight in weights], dim=-1)


def _most_rows() -> int:
    """Up to so many rows products with codes are faster than those with the weights in full.

    Measured. A compiled layer has one kind of product: its rows are between two of `linear_routes.ROW_LIMITS`.
    """
    if kernels() is None:
        return 0
    if has_matrix_units():
        return sys.maxsize
    return 256 if has_integer_products() else 64


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
        blocks = layer.encode(weight)
    for name, tensor in zip(_TENSORS, blocks, strict=True):
        if getattr(layer, name).shape != tensor.shape:  # those of a GGUF file have scales of other forms
            setattr(layer, name, torch.empty_like(tensor))
        state[f"{prefix}{name}"] = tensor


class LowBitEmbedding(nn.Module):
    """Embeddings that read the codes of `head`, which is the output layer where weights are tied.

    embed_scale: what rows are multiplied with, as in the embeddings of several models.
    """

    def __init__(self, table: nn.Embedding, head: LowBitLinear):
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
        try:
            rows = self.head.blocks.rows(input)
        except (RuntimeError, IndexError):  # the ids are looked at only now: a step has no time for it
            self._check(input)
            raise
        return scaled(rows[..., : self.embedding_dim].to(self.head.weight.dtype), self.embed_scale)

    def _check(self, ids: torch.Tensor) -> None:
        """Raise `InputError` if there are other numbers than ids of the vocabulary among them."""
        if ids.is_floating_point():
            raise InputError(f"token ids are {ids.dtype}: give integers, such as ids.long()") from None
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.num_embeddings:
            wrong = outside(low if low < 0 else high, self.num_embeddings)
            raise InputError(f"{wrong}: give ids of this model's own tokenizer") from None


def _load_into_head(table: LowBitEmbedding, state: dict[str, torch.Tensor], prefix: str, *others: object) -> None:
    """Before a state dict is loaded: the embeddings in it are the weights of the output layer."""
    if (weight := state.pop(f"{prefix}weight", None)) is not None:
        state[f"{prefix}head.weight"] = weight


def scaled(rows: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return rows * scale.to(rows.dtype)
    return rows if scale == 1.0 else rows * scale
