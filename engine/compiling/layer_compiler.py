"""Decode steps whose layers are compiled code, for `EngineConfig(compile="auto")`.

The code of a layer's step is compiled by another process of low priority, once for all layers and models of that shape,
and kept in the user's cache folder. Until it is there, steps are computed without it. Before it is used, one step is
computed in both ways and compared.
"""

from __future__ import annotations

import operator
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache, read_specs
from caches.attention.kernels import KERNELS, close_layers
from caches.platform.out_of_memory import first_line, in_words, is_out_of_memory
from caches.platform.torch_api import hooks_of
from caches.platform.transformers_api import attn_implementation, records_outputs
from caches.platform.warn_once import warn_once
from engine.compiling.compiled_layer import (
    Attentions,
    CompiledLayer,
    LayerChain,
    OtherInputs,
    are_chained,
    attentions_with,
)
from engine.compiling.layer_attention import Compute
from engine.compiling.layer_step import plain_attributes, rows_like
from engine.compiling.package_builder import check_can_be_built, package_of, start_building, why_failed
from engine.errors import OptionError
from engine.kernels.linear_backend import Table

_MOST_ROWS, _MOST_TOKENS = 64, 16  # of a step, and of its one row: with more, the products take the time
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")  # what hooks within layers record
_NO_STEP = "off: no step after a prompt yet"
_PATIENCE = 16  # steps between two looks for a package
_OTHERS = 4  # runs in a row whose tensors the code cannot take, until it is compiled for these
_ATTENTIONS = ("sdpa", "eager")  # transformers' own: others may compute anything by their names
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative differences that are rounding
_LOW_TOLERANCE = 5e-2  # of data types with few bits


class LayerCompiler:
    """The compiled layers of one model. linears: the matrix products of its linear layers.

    state: what became of it, in words. Call its methods in the model's turn, except for `wait`.
    """

    def __init__(self, model: PreTrainedModel, linears: Table | None):
        self.model, self.linears = model, linears
        self._sets: dict[tuple[object, ...], _Set] = {}
        self.state, self._config = _NO_STEP, model.config.get_text_config(decoder=True)
        self._retries = False

    def __len__(self) -> int:
        """How many sets of compiled layers are in use."""
        return sum(layer_set.phase in ("join", "use") for layer_set in self._sets.values())

    def clear(self) -> None:
        self._sets.clear()

    def retry(self) -> None:
        """Build packages that could not be built before, also in other processes."""
        self._retries = True
        self._sets = {key: layer_set for key, layer_set in self._sets.items() if layer_set.phase != "refused"}

    def wait(self) -> None:
        """Wait for the processes that build packages."""
        for layer_set in list(self._sets.values()):
            layer_set.wait()

    def next_step(
        self, cache: EngineCache, inputs: dict[str, object], rows: int, tokens: int
    ) -> Callable[..., ModelOutput] | None:
        """What computes the next step in place of the model; None for the model itself. tokens: of each row."""
        if cache.handle is None or cache.total_tokens == 0 or tokens > (_MOST_TOKENS if rows == 1 else 1):
            return None
        attention, reason = attn_implementation(self._config), None
        if rows > _MOST_ROWS:
            reason = f"for more than {_MOST_ROWS} rows it gains nothing"
        elif torch.is_autocast_enabled("cpu"):
            reason = "autocast chooses data types as it goes"
        elif attention not in _ATTENTIONS:
            reason = f"attn_implementation={attention!r}"
        elif any(map(inputs.get, _RECORDED)):
            reason = "a step returns what its layers record"
        elif "input_ids" not in inputs:
            reason = "a step has no input_ids"
        if reason is not None:
            self.state = f"off: {reason}"
            return None
        key = rows_like(rows), rows_like(tokens), torch.get_num_threads(), attention
        if key not in self._sets:
            self._sets[key] = _Set(self.model, self.linears, self._retries)
        layer_set = self._sets[key]
        computes = layer_set.advance()
        self.state = layer_set.state
        return partial(layer_set.compute, cache.handle) if computes else None

    def begin_run(self) -> None:
        """Look again for hooks and for the place of the weights, before the next step: once per run, as it takes longer
        than some steps. What changes in the middle of a run takes part from the next run on."""
        self.state, self._config = _NO_STEP, self.model.config.get_text_config(decoder=True)
        for layer_set in self._sets.values():
            layer_set.is_checked = False


class ComputeAgain(Exception):
    """A step has failed with compiled layers: it is to be computed again, without them."""


class _Set:
    """The compiled layers for one range of rows. Its phases, one per step:

    record: the layers' calls of one step are recorded. find: packages are looked for, and those missing are asked for.
    wait: until another process has built them. compare: one step is computed in both ways. join: in another one it is
    tried whether all layers can be one call. use: all later ones.
    """

    def __init__(self, model: PreTrainedModel, linears: Table | None, retries: bool):
        self._model, self._linears, self._retries = model, linears, retries
        self._layers: list[CompiledLayer] = []
        self._builder: subprocess.Popen[bytes] | None = None
        self._waited = 0
        self._changed = ""  # why the layers' own forwards compute this run, in words
        self._list = nn.ModuleList()  # of the model's layers
        self._place: tuple[nn.Module, str] = (model, "")  # where the model has it: in which module, by which name
        self._modules: list[nn.Module] = []  # of all layers
        self._recorded: list[object] = []  # what of them compiled code has as constants
        self._compiled: list[nn.Module] = []  # of those that are compiled
        self._can_be_chained = self._is_chained = False
        self._others = 0  # runs in a row whose tensors the code cannot take
        self._is_left_out = False  # in this run
        self.is_checked = True
        self.phase, self.state = "record", "not yet"

    def advance(self) -> bool:
        """Go on to the next phase, before a step; whether `compute` computes the step."""
        if self.phase == "refused":
            return False
        try:
            if self.phase == "find":
                self._find()
            elif self.phase == "wait":
                self._check_build()
            elif not self.is_checked:
                self._check_hooks()
                self.is_checked, self._is_left_out = True, False
                if self.phase in ("join", "use"):
                    self.state = f"{len(self._layers)} layers"
                if self.phase in ("compare", "join", "use") and not self._has_its_layers():
                    self.phase = "record"
        except Exception as error:  # a package, its job and its process have as many as they have libraries
            if is_out_of_memory(error):
                raise
            self._refuse(_why(error))
        is_ready = self.phase in ("record", "compare", "join", "use")
        if is_ready and self._changed:
            self.state = self._changed
        return is_ready and not (self._changed or self._is_left_out)

    def compute(self, handle: TransformersCache, **inputs: object) -> ModelOutput:
        """The model's forward in the open step of the cache that is its argument `handle`.

        Raises `ComputeAgain` where it has to be computed without compiled layers.
        """
        try:
            outputs = self._compute(handle, inputs)
            self._others = 0
            return outputs
        except ComputeAgain:
            raise
        except OtherInputs:
            self._others, self._is_left_out = self._others + 1, True
            self.state = "off: its layers were compiled for tensors of other data types or sizes"
            if self._others == _OTHERS:
                self.phase, self._others, self._is_left_out = "record", 0, False
            raise ComputeAgain from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._refuse(_why(error))
            raise ComputeAgain from error
        finally:
            close_layers()

    def _compute(self, handle: TransformersCache, inputs: dict[str, object]) -> ModelOutput:
        if self.phase == "record":
            outputs = self._record(inputs, handle)
            if len(self._layers) < len(self._list):  # others may have read keys of these layers: the new ones alone
                raise ComputeAgain
            return outputs
        if self.phase == "compare":
            return self._compare(inputs, handle)
        if self.phase == "join":
            return self._try_chain(inputs, handle)
        attentions = attentions_with(handle)
        if self._is_chained:
            return self._chained(inputs, attentions)
        return self._with_forwards(inputs, {layer: layer.computing(attentions) for layer in self._layers})

    def _compare(self, inputs: dict[str, object], handle: TransformersCache) -> ModelOutput:
        """Compute the model's own layers, and compare them with the compiled ones."""
        errors: list[float] = []
        outputs = self._with_forwards(inputs, {layer: layer.comparing(handle, errors) for layer in self._layers})
        types = {tensor.dtype for layer in self._layers for tensor in layer.weights}
        limit = max(_TOLERANCE.get(dtype, _LOW_TOLERANCE) for dtype in types)
        if len(errors) == len(self._layers) and all(error <= limit for error in errors):
            self.phase, self.state = "join", f"{len(self._layers)} layers"
        else:
            self._refuse(f"the compiled layers differ by {max(errors):.1%} from the model's own")
        return outputs

    def _try_chain(self, inputs: dict[str, object], handle: TransformersCache) -> ModelOutput:
        """Compute compiled layers one by one, then as one call with the same results of attention: are they equal?"""
        results: dict[CompiledLayer, torch.Tensor] = {}

        def recording(layers: Sequence[CompiledLayer], mask: object) -> list[Compute]:
            [layer] = layers

            def compute(*tensors: torch.Tensor) -> torch.Tensor:
                result = layer.known_attention.compute(handle, mask, *tensors)
                results[layer] = result.clone()  # the code may write other values there
                return result

            return [compute]

        def repeated(layers: Sequence[CompiledLayer], mask: object) -> list[Compute]:
            return [lambda *tensors, layer=layer: results[layer] for layer in layers]

        outputs = self._with_forwards(inputs, {layer: layer.computing(recording) for layer in self._layers})
        if self._can_be_chained and not self._calls_hooks(self._model.modules()):  # they would be called twice
            try:
                chained = self._chained(inputs, repeated).logits
                self._is_chained = torch.equal(chained, outputs.logits)
            except OtherInputs:
                raise
            except Exception as error:  # a model may want its layers by number
                if is_out_of_memory(error):
                    raise
        self.phase = "use"
        return outputs

    def _chained(self, inputs: dict[str, object], attentions: Attentions) -> ModelOutput:
        """The model's forward with a chain in place of its list of layers."""
        owner, name = self._place
        chain, attributes = LayerChain(self._list, self._layers, attentions), vars(owner)
        try:
            attributes[name] = chain  # is found before the module of this name
            outputs = self._model(**inputs)
        finally:
            attributes.pop(name, None)
            chain.discard()
        if chain.calls != 1:
            raise ValueError(f"the model computes its layers {chain.calls} times in a step")
        return outputs

    def _has_its_layers(self) -> bool:
        """Whether the model has the same layers, with their weights where compiled code reads them."""
        owner, name = self._place
        modules = [module for path, child in owner.named_children() if path == name for module in child.modules()]
        is_same = len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))
        is_same = is_same and self._recorded == _constants_of(modules)
        return is_same and all(layer.has_its_weights for layer in self._layers)

    def _check_hooks(self) -> None:
        """Look for hooks, replaced forwards and training within the layers, which compiled code leaves out."""
        self._changed = ""
        if any(module.training or "forward" in vars(module) for module in self._compiled):
            self._changed = "off: a module of its layers is in training mode, or its forward was replaced"
        elif self._calls_hooks(self._compiled):
            self._changed = "off: its layers have hooks"

    def _calls_hooks(self, modules: Iterable[nn.Module]) -> bool:
        """Whether they have hooks but transformers' own, which record outputs, in steps that are not compiled."""
        hooks = (hook for module in modules for table in hooks_of(module) for hook in table.values())
        return not all(map(records_outputs, hooks))

    def wait(self) -> None:
        """Wait for the process that builds packages."""
        if self.phase == "wait" and self._builder is not None:
            self._builder.wait()

    def _refuse(self, reason: str) -> None:
        self.phase, self.state, self._layers = "refused", f"off: {reason}", []
        warn_once(f"compile='auto' computes {type(self._model).__name__} without compiled layers: {reason}")

    def _with_forwards(
        self, inputs: dict[str, object], forwards: dict[CompiledLayer, Callable[..., object]]
    ) -> ModelOutput:
        previous = {layer: vars(layer.module).get("forward") for layer in forwards}
        try:
            for layer, forward in forwards.items():
                vars(layer.module)["forward"] = forward
            return self._model(**inputs)
        finally:
            for layer, previous_forward in previous.items():
                vars(layer.module).pop("forward", None)
                if previous_forward is not None:
                    vars(layer.module)["forward"] = previous_forward

    def _record(self, inputs: dict[str, object], handle: TransformersCache) -> ModelOutput:
        """Record the layers' calls. A model's layers are a `ModuleList` as long as the cache."""
        lists = {path: child for path, child in self._model.named_modules()
                 if isinstance(child, nn.ModuleList) and len(child) == len(handle.layers)}  # fmt: skip
        layers = {path: list(map(CompiledLayer, modules, range(len(modules)))) for path, modules in lists.items()}
        forwards = {layer: layer.recording(handle) for compiled in layers.values() for layer in compiled}
        outputs = self._with_forwards(inputs, forwards)
        path = next(
            (path for path, compiled in layers.items() if all(layer.call is not None for layer in compiled)), None
        )
        if path is None:
            self._refuse("its layers are not called once per step")
            raise ComputeAgain
        called, (owner, _, name) = layers[path], path.rpartition(".")
        self._is_chained = False
        self._list, self._place = lists[path], (self._model.get_submodule(owner), name)
        self._modules = list(self._list.modules())
        self._recorded = _constants_of(self._modules)
        attention = attn_implementation(self._model.config.get_text_config(decoder=True))
        can_be_chained = are_chained([(layer.call, layer.returned) for layer in called if layer.call is not None])
        try:  # a layer of another kind keeps its own forward
            self._layers = [
                layer for layer in called if layer.bind(handle, lambda step: package_of(step, attention, self._linears))
            ]
        except (OptionError, OSError) as error:
            self._refuse(str(error))
            raise ComputeAgain from error
        # A chain is given one mask: layers that look back differently share one, None, only while texts are short.
        layer_types = {(spec.layer_type, spec.attention_span) for spec in read_specs(self._model.config)}
        self._can_be_chained = can_be_chained and len(self._layers) == len(called) and len(layer_types) == 1
        self._can_be_chained &= len({layer.mask_place for layer in self._layers}) == 1
        if not self._layers:
            self._refuse("none of its layers attends to the cache alone")
            raise ComputeAgain
        self._compiled = [module for layer in self._layers for module in layer.module.modules()]
        self.phase = "find"
        return outputs

    def _find(self) -> None:
        packages = {layer.package: layer for layer in self._layers}
        missing = {package: layer for package, layer in packages.items() if not package.exists()}
        if missing:
            self._build(missing)
        else:
            self._load()

    def _build(self, missing: dict[Path, CompiledLayer]) -> None:
        check_can_be_built(missing, self._retries)
        steps = {package: layer.step_arguments for package, layer in missing.items()}
        self._builder = start_building(steps, self._linears)
        for layer in self._layers:
            layer.step_call = None  # whose tensors are no longer needed
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
            raise OptionError(why_failed(missing))

    def _load(self) -> None:
        KERNELS.or_error()  # its operator is what packages call for attention
        for package in {layer.package for layer in self._layers}:
            try:
                CompiledLayer.load([layer for layer in self._layers if layer.package == package])
            except Exception as error:
                if not (is_out_of_memory(error) or isinstance(error, OSError)):  # as of a full disk
                    package.unlink(missing_ok=True)  # it is damaged: a later call builds it again
                raise
        self._check_hooks()
        self.phase = "compare"


def _why(error: Exception) -> str:
    return first_line(error) if isinstance(error, (OptionError, CacheError)) else in_words(error)


def _constants_of(modules: Iterable[nn.Module]) -> list[object]:
    """The attention of all, and the code and the plain attributes of each."""
    per_module = [(module.__class__.forward, plain_attributes(module) | {"training": False}) for module in modules]
    return [ALL_ATTENTION_FUNCTIONS["sdpa"], *per_module]
