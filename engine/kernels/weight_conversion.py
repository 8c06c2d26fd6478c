"""Puts layers with weights of few bits in the place of a model's linear layers: `EngineConfig(weights=...)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from caches.layers.quirks import read_layers
from caches.platform.accelerate_hooks import is_dispatched
from caches.platform.host_allocator import give_back_freed_memory
from caches.platform.transformers_api import plan_name
from caches.platform.warn_once import warn_once
from engine.errors import OptionError
from engine.kernels.block_codes import eight_bits
from engine.kernels.linear_kernels import has_integer_products, kernels, warn_without_kernels
from engine.kernels.low_bit_linears import ENCODERS, LowBitEmbedding, LowBitLinear, scaled

_MUCH = 0.25  # share of the bytes in full from which on there is a warning


def convert_linears(model: PreTrainedModel, weights: str) -> None:
    """Replace the linear layers of a model by those with `weights`, "int8" or "int4", one after the other.

    Layers that quanto or hqq has quantized are replaced too. An output layer that is tied to the embeddings shares its
    codes with them, of 8 bits always; if they do more than look up rows and scale them, it stays as it is. So do
    adapters and layers whose weights a model reads by itself. Raises `OptionError` if there is none to replace, or some
    have another number of bits. A model on the meta device gets layers without values, whose bytes can be counted.
    """
    known = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    tied_heads = [module.head for module in model.modules() if isinstance(module, LowBitEmbedding)]
    if any(module.encode is not ENCODERS[weights] and module not in tied_heads for module in known):
        raise OptionError(
            f"weights={weights!r}, but linear layers of this {type(model).__name__} were converted to another number "
            "of bits already: load it again"
        )
    if is_dispatched(model) or any(tensor.device.type not in ("cpu", "meta") for tensor in model.parameters()):
        raise OptionError(
            f"weights={weights!r}: products of that kind are for CPUs, and {type(model).__name__} is elsewhere"
        )
    linears = linears_of(model)
    replaced = len(known)
    with torch.no_grad():
        for name in list(linears):
            module = linears.pop(name)  # its weights are freed once it is replaced
            tied = tables_tied_to(model, module)
            encode = eight_bits if tied else ENCODERS[weights]
            if (reason := why_in_full(model, tied)) is not None:
                warn_once(f"weights={weights!r}: {name} of {type(model).__name__} keeps its weights in full, {reason}")
                continue
            weight, bias = _weight(module), getattr(module, "bias", None)
            replace_linear(model, name, LowBitLinear(encode(weight), weight, bias, encode), tied)
            del weight
            replaced += 1
    if replaced == 0:
        raise OptionError(f"weights={weights!r}, but {type(model).__name__} has no linear layers that can be converted")
    _warn_of_rest(model, weights)
    warn_without_kernels()
    keep_data_type(model)
    give_back_freed_memory()  # of the weights in full: gaps as large as the model would stay


def round_inputs(model: PreTrainedModel) -> None:
    """Let all products with codes round their inputs to 8 bits. Raises `OptionError` where there are none, or no kernel
    for it."""
    layers = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    if not layers:
        raise OptionError(
            f"activations='int8' is for products with codes, and {type(model).__name__} has none: ask for "
            "weights='int8' or 'int4' too, or give a GGUF file"
        )
    if kernels() is None or not has_integer_products():
        raise OptionError(
            "activations='int8' needs the kernels of the package and a processor with AVX-512 VNNI, which multiplies "
            "bytes: leave it out"
        )
    for layer in layers:
        layer.rounds_inputs = True


def linears_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers whose weights may become codes, by name: no adapters, and none that a model reads by itself."""
    read = read_layers()
    adapters = {inner for module in model.modules() for inner in _of_adapters(module)}
    return {name: module for name, module in model.named_modules()
            if _is_linear(module) and module not in adapters and name.rpartition(".")[2] not in read}  # fmt: skip


def tables_tied_to(model: PreTrainedModel, linear: nn.Module) -> list[str]:
    """The names of the embeddings that share their weights with a linear layer."""
    weight = getattr(linear, "weight", None)
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return [name for name, table in tables.items() if table.weight is weight]


def why_in_full(model: PreTrainedModel, tables: list[str]) -> str | None:
    """Why an output layer that is tied to the embeddings `tables` has to keep its weights; None where it has not."""
    modules = [model.get_submodule(name) for name in tables]
    others = [type(module).__name__ for module in modules if not only_scales(module)]
    return f"because the {others[0]} that shares them does more than look them up" if others else None


def replace_linear(model: PreTrainedModel, name: str | None, layer: LowBitLinear, tables: list[str]) -> None:
    """Put `layer` in the place of a linear layer, if there is one, and embeddings that read it in that of `tables`."""
    if name is not None:
        model.set_submodule(name, layer.eval())
    for path in tables:
        model.set_submodule(path, LowBitEmbedding(model.get_submodule(path), layer).eval())


def keep_data_type(model: PreTrainedModel) -> None:
    """Leave a parameter in a model of codes alone: transformers reads the data type and device from the first one."""
    if next(model.parameters(), None) is None:
        dtype = next(module.weight.dtype for module in model.modules() if isinstance(module, LowBitLinear))
        model.register_parameter(
            "low_bit_dtype", nn.Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=False)
        )


def weights_in_words(model: PreTrainedModel) -> str:
    """What its weights are: their data type, or the bits of their codes, with the data type of the rest."""
    dtype = str(model.dtype).removeprefix("torch.")
    layers = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    bits = sorted({layer.blocks.bits for layer in layers})
    if not bits:
        return dtype
    *smaller_bits, largest_bits = map(str, bits)
    listed = f"{', '.join(smaller_bits)} and {largest_bits}" if smaller_bits else largest_bits
    inputs = ", times inputs of 8 bits" if any(layer.rounds_inputs for layer in layers) else ""
    return f"codes of {listed} bits{inputs} (the rest {dtype})"


def only_scales(table: Any) -> bool:
    """Whether embeddings look up rows and multiply them with their `embed_scale`, if they have one, and do no more."""
    if type(table) is nn.Embedding:
        return True
    if table.weight.is_meta:  # it cannot be tried
        return hasattr(table, "embed_scale")
    if (scale := getattr(table, "embed_scale", None)) is None:
        return False
    ids = torch.arange(0, table.num_embeddings, max(1, table.num_embeddings // 8), device="cpu")[None]
    return torch.equal(table(ids), scaled(functional.embedding(ids, table.weight), scale))


def _warn_of_rest(model: PreTrainedModel, weights: str) -> None:
    """Warn where much stays in full, such as experts that are one tensor. Embeddings do not count: a step reads few."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kept: Counter[str] = Counter()
    for name, tensor in model.named_parameters():
        if id(tensor) not in tables:
            kept[plan_name(name)] += tensor.nbytes
    converted = sum(module.weight.nbytes for module in model.modules() if isinstance(module, LowBitLinear))
    share = kept.total() / (kept.total() + converted)
    if share > _MUCH:
        warn_once(
            f"weights={weights!r}: {100 * share:.0f} % of the bytes of {type(model).__name__} without its embeddings "
            f"stay as they are, most of them in {kept.most_common(1)[0][0]}. Only linear layers are converted"
        )


def _of_adapters(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that PEFT has added to a layer."""
    if type(module).__module__.partition(".")[0] == "peft":
        for name, child in module.named_children():
            if name != "base_layer":
                yield from child.modules()


def _is_linear(module: Any) -> bool:
    if type(module) in (nn.Linear, Conv1D):
        return torch.is_floating_point(module.weight)
    library, kind = type(module).__module__.partition(".")[0], type(module).__name__
    return (library, kind) in (("optimum", "QLinear"), ("hqq", "HQQLinear"))


def _weight(module: Any) -> torch.Tensor:
    """The weights of a linear layer, [outs, width]."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().T.contiguous()
    return module.dequantize() if type(module).__name__ == "HQQLinear" else module.qweight.dequantize()
