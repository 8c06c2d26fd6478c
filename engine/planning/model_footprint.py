"""What a model gives its cache and what it computes with, found out without weights: by forwards on the meta device,
whose tensors have shapes and no numbers."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import caches
from caches import EngineCache, LayerSpec, read_specs
from caches.transformers_api import attn_implementation, model_from_config
from engine.errors import InputError
from engine.model.cache_argument import cache_argument
from engine.model.loading import auto_class
from engine.out_of_memory import first_line, in_words
from engine.planning.peak_memory import Fused, PeakMemory
from engine.request.checks import most_positions

# Of the calls by which models write: which dimension of their tensors counts tokens.
_WRITES: dict[str, dict[str, int]] = {
    "update": {"key_states": -2, "value_states": -2},
    "update_indexer": {"indexer_key_states": 1},
    "update_conv_state": {"conv_states": -1},
    "update_recurrent_state": {},
}
_MORE, _LAST, _BEHIND = 512, 16, 4096  # tokens of the forwards that are tried, as far as there are positions


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a layer is given: its shape for one row, and which dimension counts tokens, if one does."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: int | None

    def made(self, rows: int, tokens: int) -> torch.Tensor:
        shape = [self.shape[0] * rows, *self.shape[1:]]
        if self.tokens is not None:
            shape[self.tokens] = tokens
        return torch.empty(shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class CacheWrite:
    """What a forward writes: the method `name` of the cache's part 0, or 1 for what an encoder has read."""

    part: int
    layer: int
    name: str
    arguments: tuple[tuple[str, Any], ...]

    def repeat(self, cache: Any, rows: int, tokens: int) -> Any:
        """The same of so many rows and tokens. Returns what the model would read."""
        given = {name: one.made(rows, tokens) if isinstance(one, TensorSpec) else one for name, one in self.arguments}
        return getattr(cache.parts[self.part], self.name)(**given, layer_idx=self.layer)


@dataclass(frozen=True)
class Working:
    """Bytes that a forward takes for one row, the cache and the last logits aside, at its widest moment.

    token: for each token that is read. pair: for each of them and each column it looks at, where attention makes a
    matrix of all scores. column: for each column that was in the cache before; column_of_one: where only one token is
    read.
    """

    token: float
    pair: float
    column: float = 0
    column_of_one: float = 0

    def bytes(self, rows: int, tokens: int, columns: int) -> int:
        """Of a step of `tokens` that looks at `columns`, its own among them."""
        one_row = self.token * tokens + self.pair * tokens * columns + self.column * (columns - tokens)
        return int(rows * one_row)

    def of_one(self, rows: int, read_apart: int, columns: int) -> int:
        """Of a step of one token. read_apart: for how many rows the columns are read, where others share them."""
        return int(rows * (self.token + self.pair * columns) + read_apart * self.column_of_one * columns)


@dataclass(frozen=True)
class ModelFootprint:
    """What is known of a model without its weights.

    model: itself. vocabulary: its words. specs: two layers of each kind it has, which stand for `counts` layers each.
    first, later: what a first step writes in these layers, and a step of one token. shares: per part of the cache,
    whether attention reads columns that rows share without putting them together. wrapped: bytes that layers which only
    transformers knows take per row, and per row and token. takes_cache: whether it can be given one at all. positions:
    how many it can tell apart, None for any.
    """

    model: PreTrainedModel
    vocabulary: int
    specs: tuple[LayerSpec, ...]
    counts: tuple[float, ...]
    first: tuple[CacheWrite, ...]
    later: tuple[CacheWrite, ...]
    shares: tuple[bool, ...]
    wrapped: tuple[float, float]
    working: Working
    takes_cache: bool
    positions: int | None

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.config.is_encoder_decoder


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """The model of this configuration without any weights. Raises `InputError` when transformers knows none.

    kind: its class, where that is known.
    """
    config = copy.deepcopy(config)  # transformers writes into it
    simple = {"experts_implementation": "batched_mm"}  # kernels of which torch knows the shapes alone
    if attn_implementation(config) not in (None, "eager", "sdpa"):
        simple["attn_implementation"] = "sdpa"  # which takes as much
    make = auto_class(config).from_config if kind is None else partial(model_from_config, kind)
    try:
        with torch.device("meta"):
            return make(config, dtype=dtype or config.dtype or torch.float32, **simple).eval()
    except ValueError as error:
        raise InputError(
            f"a {type(config).__name__} describes no model that generates text: {first_line(error)}"
        ) from error


_studied: dict[tuple[Any, ...], ModelFootprint] = {}


def inspect_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, kind: type[PreTrainedModel] | None = None
) -> ModelFootprint:
    """The footprint of the model that a configuration describes. It is looked at once; see `meta_model` for the
    arguments.

    Raises `InputError` where a forward without numbers cannot be.
    """
    key = (kind, attn_implementation(config), dtype, config.to_json_string(use_diff=False))
    found = _studied.get(key)
    if found is None:
        if len(_studied) >= 32:
            _studied.clear()
        model = meta_model(config, dtype, kind)
        try:
            found = _studied[key] = _Inspection(model).footprint()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError) as error:
            raise InputError(
                f"what {type(model).__name__} takes cannot be found out without its weights: a forward on torch's meta "
                f"device ends with {in_words(error)}"
            ) from error
    return found


class _Inspection:
    """The forwards of a model without weights that tell what it gives its cache and what it works with."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.config, self.is_encoder_decoder = model, model.config, model.config.is_encoder_decoder
        text_config = self.config.get_text_config(decoder=True)
        names = ("max_position_embeddings", "max_seq_len")
        positions = next((most for name in names if (most := getattr(text_config, name, None))), _LAST + _BEHIND)
        self._more, self._behind = min(_MORE, positions), min(_BEHIND, positions - _LAST)
        self._few = self._more // 4
        self._takes = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        if model.main_input_name != "input_ids":
            raise InputError(
                f"{type(model).__name__} reads {model.main_input_name}: what it keeps of them is not known here"
            )

    def footprint(self) -> ModelFootprint:
        model, config = self.model, self.config
        takes_cache = self._cache_argument.can_be_ours
        bare = ModelFootprint(
            model=model,
            vocabulary=config.get_text_config(decoder=True).vocab_size,
            specs=(),
            counts=(),
            first=(),
            later=(),
            shares=(),
            wrapped=(0, 0),
            working=Working(0, 0),
            takes_cache=takes_cache,
            positions=most_positions(model),
        )
        specs = read_specs(config) if takes_cache else ()
        try:
            cache = caches.build("dynamic" if takes_cache else "none", config)
        except caches.CacheError:  # nothing is known of what it keeps
            takes_cache = False
        if not takes_cache:
            return replace(bare, specs=specs, counts=(1.0,) * len(specs), working=self._working(None))
        first, later = self._writes(cache)
        chosen, counts = _of_each_kind(specs, first, later)
        return replace(
            bare,
            specs=tuple(specs[layer] for layer in chosen),
            counts=counts,
            first=_renumbered(first, chosen),
            later=_renumbered(later, chosen),
            shares=self._shares(cache),
            wrapped=self._wrapped(),
            working=self._working(first),
        )

    def forward(self, cache: EngineCache | None, rows: int, tokens: int) -> None:
        """A step of so many tokens; with an encoder its source has as many and the decoder reads one."""
        inputs: dict[str, Any] = {} if cache is None else self._cache_argument.inputs(cache.handle)
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
        if self.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :1]
        if cache is not None:
            cache.begin(1 if self.is_encoder_decoder else tokens)
        with torch.no_grad(), Fused():
            self.model(ids, **inputs)
        if cache is not None:
            cache.commit()

    def _writes(self, cache: Any) -> tuple[list[CacheWrite], list[CacheWrite]]:
        """What a first step writes into an empty cache, and the step of one token after it."""
        calls: list[list[CacheWrite]] = []
        for tokens in (self._few, 1):
            calls.append([])
            _watch(cache, nullcontext, calls[-1].append)
            self.forward(cache, 1, tokens)
        _watch(cache, nullcontext, lambda call: None)
        wrapped = {layer for layer, spec in enumerate(read_specs(self.config)) if spec.attention_span.kind == "own"}
        first, later = ([call for call in found if call.layer not in wrapped] for found in calls)
        return first, later

    def _shares(self, cache: Any) -> tuple[bool, ...]:
        """Whether the columns that rows share are still shared after they were read."""
        cache.fork(2)
        are = [part.shares for part in cache.parts]
        self.forward(cache, 2, 1)
        return tuple(part.shares or not shared for part, shared in zip(cache.parts, are, strict=True))

    def _wrapped(self) -> tuple[float, float]:
        if not any(spec.attention_span.kind == "own" for spec in read_specs(self.config)):
            return 0, 0
        taken = []
        for tokens in (self._few, self._more):
            cache: Any = caches.build("dynamic", self.config)
            self.forward(cache, 1, tokens)
            layers = [layer for layer in cache.layers if layer.spec.attention_span.kind == "own"]
            taken.append(sum(tensor.nbytes for layer in layers for tensor in layer.tensors()))
        per_token = (taken[1] - taken[0]) / (self._more - self._few)
        return taken[0] - per_token * self._few, per_token

    def _working(self, first: list[CacheWrite] | None) -> Working:
        """first: what fills a cache, None where there is none."""
        few, more = self._few, self._more
        at_few, at_more = (self._most(tokens, first) for tokens in (few, more))
        pair = max(0.0, (at_more * few / more - at_few) / (few * (more - few)))
        token = at_few / few - pair * few
        if first is None or self.is_encoder_decoder or not any(call.name == "update" for call in first):
            return Working(token, pair)
        columns = []
        for last in (_LAST, 1):
            known = last * (token + pair * (last + self._behind))
            columns.append(max(0.0, self._most(last, first, self._behind) - known) / self._behind)
        return Working(token, pair, *columns)

    def _most(self, tokens: int, first: list[CacheWrite] | None, behind: int = 0) -> int:
        """Bytes that a forward of so many tokens works with, `behind` others."""
        cache = None if first is None else caches.build("dynamic", self.config)
        if cache is not None:
            cache.reserve(behind + tokens)
        if behind and cache is not None and first is not None:
            cache.begin(behind)
            for call in first:
                call.repeat(cache, 1, behind)
            cache.commit()
        with PeakMemory(self.model) as live:
            if cache is not None:
                _watch(cache, live.aside, lambda call: None)
            self.forward(cache, 1, tokens)
        return live.most


def weight_bytes(model: PreTrainedModel) -> int:
    """Of parameters and buffers, those that are tied once."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensor.nbytes for tensor in tensors.values())


_Around: TypeAlias = Callable[[], AbstractContextManager[None]]
_Note: TypeAlias = Callable[[CacheWrite], None]


def _watch(cache: Any, around: _Around, note: _Note) -> None:
    """From here on note what is written into the cache, and do it within `around()`."""
    for number, part in enumerate(cache.parts):
        for name in _WRITES:
            method = getattr(type(part), name).__get__(part)
            setattr(part, name, partial(_noted, number, name, method, around, note))


def _noted(
    part: int,
    name: str,
    method: Any,
    around: Callable[[], Any],
    note: Callable[[CacheWrite], None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = inspect.signature(method).bind(*args, **kwargs).arguments
    # Without a kernel's size it is a whole state.
    axes = {} if name == "update_conv_state" and given.get("conv_kernel_size") is None else _WRITES[name]
    arguments = tuple(
        (key, TensorSpec(tuple(one.shape), one.dtype, axes.get(key)) if isinstance(one, torch.Tensor) else one)
        for key, one in given.items()
        if key not in ("args", "kwargs", "layer_idx")
    )
    note(CacheWrite(part, given["layer_idx"], name, arguments))
    with around():
        return method(*args, **kwargs)


def _of_each_kind(
    specs: Sequence[LayerSpec], first: list[CacheWrite], later: list[CacheWrite]
) -> tuple[list[int], tuple[float, ...]]:
    """Two layers of each kind, layers take turns in some memory, and how many of the model each stands for."""
    kinds = [
        (spec, *(tuple((c.part, c.name, c.arguments) for c in calls if c.layer == layer) for calls in (first, later)))
        for layer, spec in enumerate(specs)
    ]
    there = Counter(kinds)
    chosen = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < 2]
    return chosen, tuple(there[kinds[layer]] / min(2, there[kinds[layer]]) for layer in chosen)


def _renumbered(calls: list[CacheWrite], chosen: list[int]) -> tuple[CacheWrite, ...]:
    return tuple(replace(call, layer=chosen.index(call.layer)) for call in calls if call.layer in chosen)
