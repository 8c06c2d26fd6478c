"""Every private name of torch that the project uses, one function or constant each; here and nowhere else.

All are in torch 2.11 to 2.13. `tests/unit/test_private_names.py` calls each of them on the installed release.
"""

from __future__ import annotations

import ctypes
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "COMPILED_MARK", "DisableTorchFunctionSubclass", "KeepsDataTypes", "TorchDispatchMode", "TreeSpec",
    "always_writable", "buffers_of", "compile_package", "compiled_graphs", "discard_compiled", "graph_errors",
    "has_onednn", "hooks_of", "inside_compiled", "load_package", "make_wrapper_subclass", "module_call_code",
    "onednn_linear", "parameters_of", "parts_of", "schema_of", "set_grad_enabled", "state_without_hooks", "storage_key",
    "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "write_count",
]  # fmt: skip

COMPILED_MARK = "_is_torch_compile"
"""The attribute that `torch.compile` leaves on a module that it has wrapped; nothing that is computed reads it."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context in which functions take subclasses of `torch.Tensor` as they are: no `__torch_function__` is called."""

make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Of a subclass of `torch.Tensor`, a shape, `dtype` and `device`: a tensor of that class without any memory."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Derivatives of this thread on or off. C code: Ctrl-C does not stop it halfway, as it can `torch.set_grad_enabled`."""

always_writable: Callable[[], AbstractContextManager[None]] = partial(torch._C._InferenceMode, False)
"""A context in which tensors are made that can be written outside of inference mode too.

C code: where Ctrl-C stops `torch.inference_mode` as it ends, the state of its beginning comes back much later, when the
traceback is freed, and derivatives stay off.
"""

schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
"""Of an operator: the arguments that it writes to, or of which it returns views, have an `alias_info`."""

write_count: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written in place. Raises `RuntimeError` for one made in inference mode."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The parameters of a module itself by name, those that are None too; not those that are computed when asked for."""


parts_of: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = attrgetter(
    "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"
)
"""Of a module itself the modules, parameters and buffers in it by name, None among them, and the names of the buffers
that are not saved."""


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module itself by name."""
    return module._buffers


class KeepsDataTypes(nn.Module):
    """A module whose buffers keep their data types where it is cast (`half()`, `to(dtype)`); `follow` hears of it."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeepsDataTypes:
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, now in self._buffers.items():
            if now is not None and (tensor := buffers[name]) is not None and now.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(now.device)
        self.follow(fn)
        return self

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do with tensors that are neither parameters nor buffers what `fn` does with those."""


def state_without_hooks(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, as if no hook had been registered."""
    return {name: type(value)() if name.endswith("_hooks") else value for name, value in vars(module).items()}


def compile_package(
    program: torch.export.ExportedProgram,
    path: str,
    change: Callable[[torch.fx.Graph], None],
    c_functions: dict[Any, list[str]],
) -> None:
    """Compile a program into an AOTInductor package without its constants. change: called with its graph before.

    c_functions: for operators the C declaration of `aoti_torch_cpu_` and their name, which the code calls.
    """
    from torch._inductor import aoti_compile_and_package  # slow to import

    # Without the second one, constants of up to 8 numbers are part of the code.
    options: dict[str, object] = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
    options |= {"post_grad_custom_pre_pass": change, "fx_graph_cache": False}  # whose key needs the pass in a file
    # On a new machine torch would compile tests of the processor's instructions, 8 s, and headers for later, 10 s: what
    # the processor has is known, and a package takes 1 s more without them.
    options |= {"cpp.vec_isa_ok": True, "aot_inductor.precompile_headers": False}
    options["aot_inductor.custom_ops_to_c_shims"] = c_functions
    aoti_compile_and_package(program, package_path=path, inductor_configs=options)


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The dicts of hooks around a module's forward: first those of all modules, then its own. A hook that is registered
    later appears in them."""
    from torch.nn.modules import module as base

    everywhere = [base._global_forward_hooks, base._global_forward_pre_hooks]
    return [*everywhere, module._forward_hooks, module._forward_pre_hooks]


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for all tensors that share memory, on the meta device too, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


def load_package(path: str, constants: Sequence[Mapping[str, torch.Tensor]]) -> list[Callable[..., Any]]:
    """For each set of constants the function of an AOTInductor package, from a list of tensors to one.

    constants: the package's tensors by name, those that it does not have among them; they are read where they are, and
    have to be kept. The functions share one library of 2 MB: torch's loader of packages makes copies.
    """
    functions = []
    unpacked = tempfile.TemporaryDirectory(prefix="package-", ignore_cleanup_errors=True)
    with unpacked as folder, zipfile.ZipFile(path) as package:
        [library] = (member for member in package.namelist() if member.endswith(".so"))
        for member in package.namelist():
            if member.startswith(library.removesuffix(".so")):  # with what it reads about operators
                (Path(folder) / Path(member).name).write_bytes(package.read(member))
        for tensors in constants:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(Path(folder) / Path(library).name), 1)
            names = runner.get_constant_names_to_original_fqns()
            used = {name: _unowned(tensors[path]) for name, path in names.items()}
            runner.update_constant_buffer(used, False, False, user_managed=True)
            functions.append(runner.run)
    return functions


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that does not keep it: torch never frees the tensors of a package's constants."""
    if tensor.numel() == 0:
        return tensor
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_byte * (elements * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def module_call_code() -> CodeType:
    """The code of the frames in which a module is called; their `self` is the module."""
    return nn.Module._wrapped_call_impl.__code__


def inside_compiled(module: object) -> object:
    """The module inside the wrapper that `torch.compile` made; None where `module` is no such wrapper."""
    return module._modules.get("_orig_mod") if isinstance(module, nn.Module) else None


def compiled_graphs(function: Callable[..., object]) -> int:
    """How many graphs there are of a function that was given to `torch.compile`."""
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function))


def discard_compiled(function: Callable[..., object]) -> None:
    """Discard all graphs of a function that was given to `torch.compile`; the next call compiles again."""
    torch._dynamo.eval_frame.remove_from_cache(function)


def graph_errors() -> tuple[type[Exception], ...]:
    """What a compiled function raises where it cannot be one graph, or needs more graphs than are allowed."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


def has_onednn() -> bool:
    """Whether torch was built with `onednn_linear`."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` of float32 by oneDNN, which packs `weight` in each call."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
