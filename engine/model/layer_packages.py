"""Decode steps whose layers are compiled code, for `EngineConfig(compile="auto")`.

The code of a layer's step is compiled by another process of low priority, once for all layers and models of that shape,
and kept in the user's cache folder. Until it is there, steps are computed without it. Before it is used, one step is
computed in both ways and compared.
"""

from __future__ import annotations

import operator
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache as cached
from functools import partial
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from caches import Cache, CacheError, StepError
from caches.out_of_memory import is_out_of_memory
from caches.quantization.machine import cache_folder, processor
from caches.torch_api import (
    buffers_of,
    hooks_of,
    load_package,
    parameters_of,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from caches.transfer.export_buffers import LayerBuffers
from caches.transformers_api import attn_implementation, records_outputs
from engine.errors import OptionError
from engine.model.layer_chain import LayerChain, Run, are_chained
from engine.model.layer_step import Call, LayerStep, Shape, have_shapes, rows_like, tensors_of
from engine.model.linear_backend import Table
from engine.model.package_builder import LAYER, failure_of, write_job
from engine.out_of_memory import first_line, in_words

_FORMAT = 6  # of packages: those of other versions are ignored
_PRIORITY = 5  # a lower one costs more: every slice that it gets delays both threads of a product, for longer in all
_MOST_ROWS = 16  # of a step: with 32, the products take so long that compiled layers gain nothing (Intel Xeon)
_PATIENCE = 16  # steps between two looks for a package
_OTHERS = 4  # runs in a row whose tensors the code cannot take, until it is compiled for these
_ATTENTIONS = ("sdpa", "eager")  # transformers' own: others may compute anything by their names
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative differences that are rounding
_LOW_TOLERANCE = 5e-2  # of data types with few bits
_log = getLogger("engine")


class LayerPackages:
    """The compiled layers of one model. linears: the matrix products of its linear layers.

    state: what became of it, in words. Call its methods in the model's turn, except for `wait`.
    """

    def __init__(self, model: PreTrainedModel, linears: Table | None):
        self.model, self.linears = model, linears
        self._sets: dict[Any, _Set] = {}
        self.state = "off: no step on a cache of fixed size yet"
        self._retries = False

    def __len__(self) -> int:
        """How many sets of compiled layers are in use."""
        return sum(one.phase in ("join", "use") for one in self._sets.values())

    def clear(self) -> None:
        self._sets.clear()

    def retry(self) -> None:
        """Build packages that could not be built before, also in other processes."""
        self._retries = True
        self._sets = {key: one for key, one in self._sets.items() if one.phase != "refused"}

    def wait(self) -> None:
        """Wait for the processes that build packages."""
        for one in list(self._sets.values()):
            one.wait()

    def next_step(self, cache: Any, rows: int) -> Callable[..., ModelOutput] | None:
        """What computes the next step of one token per row, in place of the model; None if that is the model itself.

        cache: one that compiled code can take (`why_not_compiled`).
        """
        if type(cache) is not Cache or cache.total_tokens == 0:
            return None
        if rows > _MOST_ROWS:
            self.state = f"off: for more than {_MOST_ROWS} rows it gains nothing"
            return None
        if torch.is_autocast_enabled("cpu"):
            self.state = "off: autocast chooses data types as it goes"
            return None
        attention = _attention_of(self.model)
        if attention not in _ATTENTIONS:
            self.state = f"off: attn_implementation={attention!r}"
            return None
        bounds = tuple(None if one.retention.bound is None else one.room for one in cache.stack.timelines)
        key = rows_like(rows), bounds, torch.get_num_threads(), attention
        if key not in self._sets:
            self._sets[key] = _Set(self.model, self.linears, self._retries)
        found = self._sets[key]
        computes = found.advance(cache)
        self.state = found.state
        return partial(found.compute, cache) if computes else None

    def begin_run(self) -> None:
        """Look again for hooks and for the place of the weights, before the next step: once per run, as it takes longer
        than some steps. What changes in the middle of a run takes part from the next run on."""
        for one in self._sets.values():
            one.is_checked = False

    def open(self, cache: Any) -> None:
        """Call it in the open step, before its inputs are made."""
        for timeline in cache.stack.timelines:
            timeline.read_used_slots()


class ComputeAgain(Exception):
    """A step has failed with compiled layers: it is to be computed again, without them."""


class _OtherInputs(Exception):
    """Layers are called with other tensors than those that their code was compiled for."""


class _Layer:
    """One layer of the model, with its last call and its compiled code."""

    def __init__(self, module: nn.Module, index: int):
        self.module, self.index, self.forward = module, index, module.forward
        self.call: Call | None = None
        self.returned: Any = None
        self.slots: int | None = None
        self.package = Path()
        self.run: Run | None = None
        self.inputs: list[Shape] = []  # of the tensors that the code takes: those of the call
        self.kept: list[Shape] = []  # and those of the cache
        self.weights: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self.result: tuple[list[Any], Any] | None = None  # what it returns, flattened; None for a tensor

    def load(self) -> None:
        """Load the package and bind it to this layer's weights, without a copy of them."""
        self.weights = [tensor.detach() for tensor in self._present_weights()]
        self._addresses = [tensor.data_ptr() for tensor in self.weights]
        named = dict([*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers()])
        self.run = load_package(
            str(self.package), lambda names: {name: named[name.removeprefix(LAYER)].detach() for name in names}
        )

    @property
    def loaded(self) -> Run:
        assert self.run is not None
        return self.run

    @property
    def has_its_weights(self) -> bool:
        """Whether the layer's weights are still where the code reads them."""
        return self._addresses == [tensor.data_ptr() for tensor in self._present_weights()]

    def _present_weights(self) -> Iterator[torch.Tensor]:
        for module in self.module.modules():
            for kept in (parameters_of(module), buffers_of(module)):
                yield from (tensor for tensor in kept.values() if tensor is not None)

    def check(self, inputs: list[torch.Tensor]) -> None:
        """Raise `_OtherInputs` for tensors of a call that the code cannot take."""
        if not have_shapes(inputs, self.inputs, inputs[0].shape[0]):
            raise _OtherInputs


class _Set:
    """The compiled layers for one range of rows. Its phases, one per step:

    record: the layers' calls of one step are recorded. find: packages are looked for, and those missing are asked for.
    wait: until another process has built them. compare: one step is computed in both ways. join: in another one it is
    tried whether all layers can be one call. use: all later ones.
    """

    def __init__(self, model: PreTrainedModel, linears: Table | None, retries: bool):
        self._model, self._linears, self._retries = model, linears, retries
        self._layers: list[_Layer] = []
        self._builder: subprocess.Popen[bytes] | None = None
        self._waited = 0
        self._has_hooks = False
        self._errors: list[float] = []
        self._list = nn.ModuleList()  # of the model's layers
        self._place: tuple[nn.Module, str] = (model, "")  # where the model has it: in which module, by which name
        self._modules: list[nn.Module] = []  # of all layers
        self._compiled: list[nn.Module] = []  # of those that are compiled
        self._can_be_chained = self._is_chained = False
        self._others = 0  # runs in a row whose tensors the code cannot take
        self._is_left_out = False  # in this run
        self._checked: WeakSet[Cache] = WeakSet()  # those that have the tensors that the code was compiled for
        self.is_checked = True
        self.phase, self.state = "record", "not yet"

    def advance(self, cache: Cache) -> bool:
        """Go on to the next phase, before a step; whether `compute` computes the step."""
        if self.phase == "refused":
            return False
        try:
            if self.phase == "find":
                self._find(cache)
            elif self.phase == "wait":
                self._check_build()
            elif not self.is_checked:
                self._check_hooks()
                self.is_checked, self._is_left_out = True, False
                self._checked.clear()
                if self.phase in ("join", "use"):
                    self.state = f"{len(self._layers)} layers"
                if self.phase in ("compare", "join", "use") and not self._has_its_layers():
                    self.phase = "record"
        except Exception as error:  # a package, its job and its process have as many as they have libraries
            if is_out_of_memory(error):
                raise
            self._refuse(first_line(error) if isinstance(error, (OptionError, CacheError)) else in_words(error))
        is_ready = self.phase in ("record", "compare", "join", "use")
        return is_ready and not (self._has_hooks or self._is_left_out)

    def compute(self, cache: Cache, **inputs: Any) -> ModelOutput:
        """The model's forward in the open step. Raises `ComputeAgain` where it has to be computed without."""
        try:
            outputs = self._compute(cache, inputs)
            self._others = 0
            return outputs
        except _OtherInputs:
            self._others, self._is_left_out = self._others + 1, True
            self.state = "off: its layers were compiled for tensors of other data types or sizes"
            if self._others == _OTHERS:
                self.phase, self._others, self._is_left_out = "record", 0, False
            raise ComputeAgain from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._refuse(in_words(error))
            raise ComputeAgain from error

    def _compute(self, cache: Cache, inputs: dict[str, Any]) -> ModelOutput:
        if self.phase == "record":
            return self._record(inputs, cache)
        self._check_cache(cache, inputs["input_ids"].shape[0])
        if self._is_chained:
            return self._chained(cache, inputs)
        compared = self.phase == "compare"
        self._errors.clear()
        chained = self._try_chain(cache, inputs) if self.phase == "join" else None
        outputs = self._with_forwards(inputs, {layer: self._forward(layer, cache, compared) for layer in self._layers})
        if compared:
            types = {tensor.dtype for layer in self._layers for tensor in layer.weights}
            limit = max(_TOLERANCE.get(dtype, _LOW_TOLERANCE) for dtype in types)
            if len(self._errors) == len(self._layers) and all(error <= limit for error in self._errors):
                self.phase, self.state = "join", f"{len(self._layers)} layers"
            else:
                self._refuse(f"the compiled layers differ by {max(self._errors):.1%} from the model's own")
        elif self.phase == "join":
            self.phase, self._is_chained = "use", chained is not None and torch.equal(chained, outputs.logits)
        return outputs

    def _try_chain(self, cache: Cache, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The logits of a chain, if it can be one. Layers write again where it has written."""
        if not self._can_be_chained or self._calls_hooks(self._model.modules()):  # they would be called twice
            return None
        try:
            return self._chained(cache, inputs).logits
        except _OtherInputs:
            raise
        except Exception as error:  # a model may want its layers by number
            if is_out_of_memory(error):
                raise
            return None

    def _chained(self, cache: Cache, inputs: dict[str, Any]) -> ModelOutput:
        """The model's forward with a chain in place of its list of layers."""
        owner, name = self._place
        links = [(one.module, one.loaded, LayerBuffers(cache, one.index)) for one in self._layers]
        chain, attributes = LayerChain(self._list, links, self._layers[0].check), vars(owner)
        try:
            attributes[name] = chain  # is found before the module of this name
            outputs = self._model(**inputs)
        finally:
            attributes.pop(name, None)
        if chain.calls != 1:
            raise ValueError(f"the model computes its layers {chain.calls} times in a step")
        return outputs

    def _has_its_layers(self) -> bool:
        """Whether the model has the same layers, with their weights where compiled code reads them."""
        owner, name = self._place
        modules = [module for child, one in owner.named_children() if child == name for module in one.modules()]
        same = len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))
        return same and all(layer.has_its_weights for layer in self._layers)

    def _check_cache(self, cache: Cache, rows: int) -> None:
        """Raise `_OtherInputs` where the tensors of a cache are others than those that the code was compiled for."""
        if cache not in self._checked:
            for layer in self._layers:
                if not have_shapes(LayerBuffers(cache, layer.index).tensors(rows), layer.kept, rows):
                    raise _OtherInputs
            self._checked.add(cache)

    def _check_hooks(self) -> None:
        """Look for hooks and replaced forwards within the layers, which compiled code would not call."""
        replaced = any("forward" in vars(module) for module in self._compiled)
        self._has_hooks = replaced or self._calls_hooks(self._compiled)

    def _calls_hooks(self, modules: Iterable[nn.Module]) -> bool:
        """Whether they have hooks but transformers' own, which record outputs, in steps that are not compiled."""
        hooks = (hook for module in modules for kind in hooks_of(module) for hook in kind.values())
        return not all(map(records_outputs, hooks))

    def wait(self) -> None:
        """Wait for the process that builds packages."""
        if self.phase == "wait" and self._builder is not None:
            self._builder.wait()

    def _refuse(self, why: str) -> None:
        self.phase, self.state, self._layers = "refused", f"off: {why}", []
        _say_once(f"compile='auto' computes {type(self._model).__name__} without compiled layers: {why}")

    def _with_forwards(self, inputs: dict[str, Any], forwards: dict[_Layer, Callable[..., Any]]) -> ModelOutput:
        before = {layer: vars(layer.module).get("forward") for layer in forwards}
        try:
            for layer, forward in forwards.items():
                vars(layer.module)["forward"] = forward
            return self._model(**inputs)
        finally:
            for layer, own in before.items():
                vars(layer.module).pop("forward", None)
                if own is not None:
                    vars(layer.module)["forward"] = own

    def _record(self, inputs: dict[str, Any], cache: Cache) -> ModelOutput:
        """Record the layers' calls. A model's layers are a `ModuleList` as long as the cache."""
        lists = {path: child for path, child in self._model.named_modules()
                 if isinstance(child, nn.ModuleList) and len(child) == len(cache.layers)}  # fmt: skip
        layers = {path: [_Layer(module, index) for index, module in enumerate(one)] for path, one in lists.items()}
        forwards = {layer: _recording(layer) for one in layers.values() for layer in one}
        outputs = self._with_forwards(inputs, forwards)
        path = next((path for path, one in layers.items() if all(layer.call is not None for layer in one)), None)
        if path is None:
            self._refuse("its layers are not called once per step")
            return outputs
        called, (owner, _, name) = layers[path], path.rpartition(".")
        self._layers, self._is_chained = [], False
        self._list, self._place = lists[path], (self._model.get_submodule(owner), name)
        self._modules = list(self._list.modules())
        self._can_be_chained = are_chained([(layer.call, layer.returned) for layer in called if layer.call is not None])
        try:
            for layer in called:
                with suppress(StepError):  # a layer of another kind keeps its own forward
                    layer.slots = LayerBuffers(cache, layer.index).slots
                    assert layer.call is not None
                    step = LayerStep(layer.module, layer.call, cache, layer.index, layer.slots)
                    layer.package, (layer.inputs, layer.kept) = (
                        _package_of(self._model, step, self._linears),
                        step.shapes,
                    )
                    self._layers.append(layer)
        except (OptionError, OSError) as error:
            self._refuse(str(error))
            return outputs
        self._can_be_chained &= len(self._layers) == len(called)
        if not self._layers:
            self._refuse(f"no layer of this {cache.name} cache keeps keys and values alone")
            return outputs
        self._compiled = [module for layer in self._layers for module in layer.module.modules()]
        self.phase = "find"
        return outputs

    def _find(self, cache: Cache) -> None:
        packages = {layer.package: layer for layer in self._layers}
        missing = {package: layer for package, layer in packages.items() if not package.exists()}
        if missing:
            self._build(cache, missing)
        else:
            self._load()

    def _build(self, cache: Cache, missing: dict[Path, _Layer]) -> None:
        for package in missing:
            if self._retries:
                failure_of(package).unlink(missing_ok=True)
            elif failure_of(package).exists():
                raise OptionError(f"{failure_of(package).read_text()} (`engine compile` tries again)")
        compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
        if shutil.which(compiler) is None:
            raise OptionError(f"there is no C++ compiler ({compiler}), for example of the package g++")
        folder = next(iter(missing)).parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, job = tempfile.mkstemp(dir=folder, suffix=".job")
        os.close(handle)
        steps = {package: (layer.module, layer.call, layer.index, layer.slots) for package, layer in missing.items()}
        write_job(Path(job), cache, torch.get_num_threads(), self._linears, steps)
        command = [sys.executable, "-m", "engine.model.package_builder", job]
        # The second one: heads that share keys and values read them where they are, also with a mask.
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRANSFORMERS_SDPA_FORCE_GQA": "1"}
        self._builder = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _give_way(self._builder.pid)
        threading.Thread(target=self._builder.wait, daemon=True).start()  # or it stays as a zombie
        for layer in self._layers:
            layer.call = layer.returned = None
        self.phase, self.state, self._waited = "wait", "off: another process compiles the layers", 0

    def _check_build(self) -> None:
        """Whether the packages are there, now and then."""
        self._waited += 1
        has_ended = self._builder is None or self._builder.poll() is not None
        if self._waited % _PATIENCE and not has_ended:
            return
        missing = [package for layer in self._layers if not (package := layer.package).exists()]
        if not missing:
            self._load()
        elif has_ended:
            failure = failure_of(missing[0])
            raise OptionError(failure.read_text() if failure.exists() else "the process that compiles its layers ended")

    def _load(self) -> None:
        for layer in self._layers:
            layer.call = layer.returned = None
            layer.load()
        self._check_hooks()
        self._checked.clear()
        self.phase = "compare"

    def _forward(self, layer: _Layer, cache: Cache, compared: bool) -> Callable[..., Any]:
        buffers, thread, run = LayerBuffers(cache, layer.index), threading.get_ident(), layer.loaded

        def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            inputs = list(tensors_of((*args, *kwargs.values())))
            layer.check(inputs)
            return inputs, buffers.tensors(inputs[0].shape[0])

        def compiled(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:  # another caller of the model
                return layer.forward(*args, **kwargs)
            inputs, kept = tensors(args, kwargs)
            out = run([*inputs, *kept])
            return out[0] if layer.result is None else _filled(layer.result, _present(out))

        def both(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return layer.forward(*args, **kwargs)
            inputs, kept = tensors(args, kwargs)
            copies = [tensor.clone() for tensor in kept]
            out = _present(run([*inputs, *copies]))
            result = layer.forward(*args, **kwargs)
            layer.result = None if isinstance(result, torch.Tensor) else tree_flatten(result)
            expected = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            pairs = zip([*out, *copies[:-2]], [*expected, *kept[:-2]], strict=True)
            self._errors.append(max(_difference(one, other) for one, other in pairs))
            return result

        return both if compared else compiled


def _give_way(process: int) -> None:
    """Lower a process's priority. At the lowest one it would not end while both processors generate."""
    with suppress(OSError, AttributeError):  # Windows has no priorities of this kind
        os.setpriority(os.PRIO_PROCESS, process, _PRIORITY)


def _recording(layer: _Layer) -> Callable[..., Any]:
    calls = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        layer.call = calls[0] if len(calls) == 1 else None
        layer.returned = layer.forward(*args, **kwargs)
        return layer.returned

    return forward


def _present(results: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors among the results of a package, which has None where a layer returns None."""
    return [one for one in results if one is not None]


def _filled(result: tuple[list[Any], Any], tensors: list[torch.Tensor]) -> Any:
    """A flattened result of a layer, with other tensors."""
    given = iter(tensors)
    return tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in result[0]], result[1])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative difference of two tensors; NaN where they are not numbers."""
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))


def _attention_of(model: PreTrainedModel) -> str | None:
    return attn_implementation(model.config.get_text_config(decoder=True))


def _package_of(model: PreTrainedModel, step: LayerStep, linears: Table | None) -> Path:
    """The path of the package for a step, by everything that shapes it."""
    releases = [torch.__version__, transformers.__version__, sys.version]
    parts = [
        str(_FORMAT),
        str(_attention_of(model)),
        *step.describe(),
        str(linears),
        str(torch.get_num_threads()),
        processor(),
        *releases,
    ]
    key = sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_folder() / "layers" / f"{key}.pt2"


@cached
def _say_once(message: str) -> None:
    _log.warning(message)
