"""Products with the weights of a linear layer, in C++ kernels on a CPU."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import library

from caches.platform.native import Operators
from caches.platform.warn_once import warn_once
from configs import ConfigError


def kernels() -> Any:
    """The operators of `native/products.cpp`; None where there are no kernels. Traceable after one call."""
    return _OPERATORS.or_none()


def warn_without_kernels() -> None:
    """Say so where torch computes products with codes: it decodes all weights for each of them."""
    try:
        _OPERATORS.or_error()
    except ConfigError as error:
        warn_once(f"all weights in few bits are decoded in every step, which takes many times as long: {error}")


def join_products(graph: torch.fx.Graph) -> None:
    """Let products of the same input be one call: threads start and end together once, not for each of them."""
    if kernels() is None:
        return
    targets = _products()
    groups = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in targets and all(map(_is_given, _weights(node))):
            groups[node.target, _input(node), len(_weights(node))].append(node)  # with or without a bias
    for nodes in groups.values():
        if len(nodes) > 1:
            _join(graph, nodes)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in targets:
            node.args = (*node.args[:3], *map(_without_empty, node.args[3:]))  # factors and scales of inputs


def c_functions() -> dict[Any, list[str]]:
    """The operators that compiled code calls, with their C declarations: see native/products.cpp."""
    tensor, tensors, out = "AtenTensorHandle", "const AtenTensorHandle*, int64_t", "AtenTensorHandle*"
    lists = ", ".join([tensors] * 4)
    of_codes = {
        operator: [f"AOTITorchError aoti_torch_cpu_{name}({tensor}, {lists}, {out})"]
        for name, operator in _products_with_codes().items()
    }
    return of_codes | {
        torch.ops.kvengine.linears.default: [
            f"AOTITorchError aoti_torch_cpu_linears({tensor}, {tensors}, {tensors}, {out})"
        ]
    }


def has_matrix_units() -> bool:
    """Whether the kernels, once loaded, multiply many rows with codes by the processor's matrix units (Intel AMX)."""
    return bool(torch.ops.kvengine.matrix_units())


def has_integer_products() -> bool:
    """Whether the kernels, once loaded, multiply codes as integers (AVX-512 VNNI)."""
    return bool(torch.ops.kvengine.integer_products())


def _make_traceable() -> None:
    library.register_fake(torch.ops.kvengine.linears.default, _empty_product)
    for operator in _products_with_codes().values():
        library.register_fake(operator, _empty_block_product)
    library.register_fake(torch.ops.kvengine.block_weights.default, _empty_weights)
    library.register_fake(torch.ops.kvengine.block_rows.default, _empty_rows)


def _products() -> list[Any]:
    return [torch.ops.kvengine.linears.default, *_products_with_codes().values()]


def _products_with_codes() -> dict[str, Any]:
    return {name: getattr(torch.ops.kvengine, name).default for name in ("block_linears", "rounded_block_linears")}


def _empty_product(input: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    if any(tensor.dtype != input.dtype for tensor in (*weights, *biases)):
        raise TypeError("inputs, weights and biases have to be of one data type")
    return input.new_empty(*input.shape[:-1], sum(weight.shape[0] for weight in weights))


def _empty_block_product(
    input: torch.Tensor,
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
    factors: list[torch.Tensor],
    input_scales: list[torch.Tensor],
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], sum(some.shape[0] * 16 for some in codes))


def _empty_weights(codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    blocks, groups, _, outs = factors.shape
    return codes.new_empty(blocks * outs, groups * 32, dtype=torch.float32)


def _empty_rows(codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, outs: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(*outs.shape, codes.shape[1] * 32, dtype=torch.float32)


def _weights(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a product has in lists, of one element each before it is joined with others."""
    return [one for tensors in node.args[1:] if isinstance(tensors, list) for one in tensors]


def _input(node: torch.fx.Node) -> object:
    """What the input is: each product has a view of its own of the same tensor."""
    view: Any = node.args[0]
    is_view = view.op == "call_function" and view.target in (
        torch.ops.aten.reshape.default,
        torch.ops.aten.view.default,
    )
    return (view.args[0], str(view.args[1])) if is_view else view


def _without_empty(argument: object) -> object:
    """No list where all its tensors are empty: a step takes longer for each tensor that it has to look at."""
    are_empty = isinstance(argument, list) and all(tensor.meta["val"].numel() == 0 for tensor in argument)
    return [] if are_empty else argument


def _is_given(tensor: torch.fx.Node) -> bool:
    """Whether it is there before the first product."""
    return tensor.op in ("placeholder", "get_attr")


def _join(graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
    """One product in place of `nodes`, with a slice of its outputs for each."""
    lists: list[Any] = list(zip(*(node.args[1:] for node in nodes), strict=True))
    arguments = (nodes[0].args[0], *(list(chain(*tensors)) for tensors in lists))
    with graph.inserting_before(nodes[0]):
        joined = _call(graph, nodes[0].target, arguments)
        begin = 0
        for node in nodes:
            axis, outs = node.meta["val"].dim() - 1, node.meta["val"].shape[-1]
            end = begin + outs
            node.replace_all_uses_with(_call(graph, torch.ops.aten.slice.Tensor, (joined, axis, begin, end)))
            begin = end
    for node in nodes:
        graph.erase_node(node)


def _call(graph: torch.fx.Graph, target: Any, arguments: tuple[Any, ...]) -> torch.fx.Node:
    call, values = graph.call_function(target, arguments), torch.fx.map_arg(arguments, lambda node: node.meta["val"])
    call.meta["val"] = target(*values)
    call.meta["eager_input_vals"] = (values, {})  # the compiler keeps these strides, which the kernels need
    return call


_OPERATORS = Operators("The fastest product of linear layers", _make_traceable)
