"""`ModelVersion`: what keys and values depend on besides tokens: weights, buffers, adapters and settings of modules."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from caches.errors import UnsupportedLayerError
from caches.layers.layer_spec import LayerSpec, read_specs
from caches.platform.accelerate_hooks import swaps_weights
from caches.platform.torch_api import DisableTorchFunctionSubclass, parts_of, write_count

_SAMPLE = 16  # elements of a tensor that are read
_TABLE = 64  # first elements of a buffer that is not saved: models make longer ones of it while they compute
_SETTING_TYPES = {bool, int, float}
_MODULE = tuple(vars(nn.Module()))  # attributes of every module, which come first
_NO_SETTINGS = {*_MODULE, "gradient_checkpointing"}
_PLAIN = {nn.Parameter, torch.Tensor}
_BY_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose module changes its frequencies with the length of a text


@dataclass(frozen=True)
class ModelVersion:
    """What a model was at one moment. Two versions of one model object are equal where nothing has changed in between.

    adapters: see `active_adapters`. weights: parameters and saved buffers: where each is in memory, how often it was
    written in place, and 16 of its elements, evenly spread. buffers: the first 64 elements of each that is not saved.
    settings: the numbers (int, float, bool) among the public attributes of modules; of dropout, while it is active.
    classes: those of modules. layers: what the configuration says of them; None where it says too little.

    Not noticed: what is written through `parameter.data` or numpy and leaves these elements as they were, tensors that
    are plain attributes, and weights that accelerate keeps elsewhere. Adapters that are not active do not count, nor
    does what models change while they compute: frequencies of RoPE that depend on the length of a text.
    """

    adapters: str
    weights: int
    buffers: int
    settings: tuple[float, ...]
    classes: int
    layers: tuple[LayerSpec, ...] | None

    def difference(self, later: ModelVersion) -> str | None:
        """What has changed until `later`; None if nothing has."""
        if self.adapters != later.adapters:
            return f"the active adapters changed from {self.adapters} to {later.adapters}"
        changed = {
            "weights were written or replaced": self.weights != later.weights,
            "buffers that are not saved were written (such as the frequencies of RoPE)": self.buffers != later.buffers,
            "settings of modules were changed (numbers such as an epsilon)": self.settings != later.settings,
            "modules were replaced by others (such as an activation)": self.classes != later.classes,
            "the configuration says something else of the layers (such as a window)": self.layers != later.layers,
        }
        return " and ".join(text for text, is_so in changed.items() if is_so) or None


_latest: WeakKeyDictionary[nn.Module, ModelVersion] = WeakKeyDictionary()


def model_version(model: nn.Module) -> ModelVersion:
    """What the model is now. Takes 0.2 to 2 ms, by the number of its modules; no weight is read as a whole."""
    modules, inactive = modules_in_use(model)
    weights: list[torch.Tensor | None] = []
    tables: list[torch.Tensor] = []
    settings: list[float] = []
    for module in modules:
        _, parameters, buffers, unsaved = parts_of(module)
        settings += settings_of(module).values()
        if (parameters or buffers) and not swaps_weights(module):
            weights += parameters.values()
            weights += (buffers[name] for name in buffers if name not in unsaved)
            tables += tables_of(module).values()
    if inactive:
        weights = [tensor for tensor in weights if id(tensor) not in inactive]
    plain = list(chain.from_iterable(map(plain_parts, weights)))
    addresses = [(tensor.data_ptr(), None if tensor.is_inference() else write_count(tensor)) for tensor in plain]
    version = ModelVersion(
        _adapters_in(modules),
        hash((tuple(addresses), _content(map(_spread, plain)))),
        hash(_content(first_elements(element) for table in tables for element in plain_parts(table))),
        tuple(settings),
        hash(tuple(map(attrgetter("__class__"), modules))),
        _layers_of(model),
    )
    latest = _latest.get(model)
    if latest == version:  # one object for all caches
        return latest
    _latest[model] = version
    return version


def modules_in_use(model: nn.Module) -> tuple[list[nn.Module], set[int]]:
    """Its modules without those of adapters that are not active; and the ids of such adapters' modules and tensors."""
    in_use, reached, inactive = [model], {id(model)}, set[int]()
    has_adapters = "peft" in sys.modules
    for module in in_use:
        if has_adapters:
            inactive.update(map(id, _inactive_parts(module)))
        for child in parts_of(module)[0].values():
            if child is not None and id(child) not in reached and id(child) not in inactive:
                reached.add(id(child))
                in_use.append(child)
    return in_use, inactive


def tables_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module itself that are not saved, by name, without those that change while it computes."""
    _, _, buffers, unsaved = parts_of(module)
    if not unsaved:
        return {}
    counts = _counted(module)
    return {name: buffers[name] for name in buffers if name in unsaved and buffers[name] is not None and counts(name)}


def settings_of(module: nn.Module) -> dict[str, float]:
    """The numbers among the public attributes of a module itself, by name, without those that change as it computes."""
    attributes = vars(module)
    begin = len(_MODULE) if next(iter(attributes)) == _MODULE[0] else 0  # some are set before `nn.Module.__init__`
    is_training = module.training
    settings = {
        name: value if is_training or not ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))) else 0.0
        for name, value in islice(attributes.items(), begin, None)
        if type(value) in _SETTING_TYPES and name not in _NO_SETTINGS and name[0] != "_"
    }
    scales = attributes.get("scaling")
    if type(scales) is dict and not getattr(module, "disable_adapters", False):  # of PEFT: one for each adapter
        settings |= {
            f"{name}.scaling": scale for name, scale in scales.items() if name in cast(Any, module).active_adapters
        }
    if settings and "rope_type" in attributes:
        counts = _counted(module)
        return {name: value for name, value in settings.items() if counts(name)}
    return settings


def _layers_of(model: nn.Module) -> tuple[LayerSpec, ...] | None:
    try:
        return read_specs(cast(Any, model).config)
    except UnsupportedLayerError:  # no cache of ours can be built
        return None


def _counted(module: nn.Module) -> Callable[[str], bool]:
    """Whether a value of this name stays as it is while the module computes."""
    rope_type = str(vars(module).get("rope_type", ""))
    follows_length = any(word in rope_type for word in _BY_LENGTH)
    return lambda name: not follows_length or "original" in name


def plain_parts(tensor: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """A tensor as those of which its values can be read: what a quantized or distributed one consists of, in this
    process. None of them where it has no values: on the meta device, or where its memory was given back."""
    if not isinstance(tensor, torch.Tensor):
        return ()
    if type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return (tensor,) if tensor.layout is torch.strided and tensor.data_ptr() else ()
    return [plain for name in tensor.__tensor_flatten__()[0] for plain in plain_parts(getattr(tensor, name))]


def _content(views: Iterable[torch.Tensor]) -> tuple[bytes, ...]:
    """The bytes of all views [elements], in a fixed order."""
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    with torch.no_grad(), DisableTorchFunctionSubclass():
        for view in views:
            groups[view.dtype, view.device].append(view)
        return tuple(torch.cat(group).view(torch.uint8).cpu().numpy().tobytes() for group in groups.values())


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its elements, as a view. An odd step, so that rows of usual widths give elements at different places."""
    size = tensor.numel()
    if tensor.is_contiguous() or _is_dense(tensor):
        step = max(1, size // _SAMPLE) | 1
        return tensor.as_strided((-(-size // step),), (step,))
    size, step = max(zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((size,), (step,))[:: max(1, size // _SAMPLE)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory without gaps, in any order."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) == tensor.numel()


def first_elements(table: torch.Tensor) -> torch.Tensor:
    """Those by which a buffer that is not saved is known."""
    return table.detach().reshape(-1)[:_TABLE]


# Adapters of PEFT.


def active_adapters(model: nn.Module) -> str:
    """The adapters that are active and those that are merged into weights, as PEFT's layers say, with their scales."""
    return _adapters_in(model.modules())


def _adapters_in(modules: Iterable[nn.Module]) -> str:
    if "peft" not in sys.modules:
        return "none"
    layers = [module for module in modules if hasattr(type(module), "active_adapters")]
    return ", ".join(sorted({text for layer in layers for text in _adapters_of(layer)})) or "none"


def _adapters_of(layer: Any) -> Iterator[str]:
    active = getattr(layer, "active_adapters", ())
    if not isinstance(active, (list, tuple)):  # a model has a method of that name
        return
    scales = getattr(layer, "scaling", None)
    scales = scales if isinstance(scales, dict) else {}  # a wrapper shows that of the attention in it
    for name in () if getattr(layer, "disable_adapters", False) else active:
        yield f"{name} (scale {scales[name]:g})" if name in scales else str(name)
    for name in getattr(layer, "merged_adapters", ()):  # PEFT writes them into weights in a way that is not counted
        yield f"{name} (merged)"


def _inactive_parts(layer: Any) -> Iterator[Any]:
    """The modules and tensors of a layer that belong to adapters which are not active."""
    names = getattr(type(layer), "adapter_layer_names", ())
    if not names:
        return
    active = () if getattr(layer, "disable_adapters", False) else layer.active_adapters
    for name in (*names, *getattr(type(layer), "other_param_names", ())):
        by_adapter = getattr(layer, name, None)
        if isinstance(by_adapter, nn.Module):  # a dict of modules, parameters or buffers
            yield from (entry for adapter, entry in cast(Any, by_adapter).items() if adapter not in active)
