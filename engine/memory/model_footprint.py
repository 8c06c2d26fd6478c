"""What a model writes into its cache and how much memory its forwards need, measured without weights on the meta
device, where tensors have shapes but no values."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import caches
from caches import LayerSpec, read_specs
from caches.platform.out_of_memory import first_line, in_words, is_out_of_memory
from caches.platform.transformers_api import attn_implementation, model_from_config
from configs.cache import DEFAULT_CACHE
from engine.errors import EngineError, InputError
from engine.loading.load import auto_class
from engine.memory.peak_memory import FusedAttention, PeakMemory
from engine.memory.working_memory import MaskedSteps, PerToken, WorkingMemory
from engine.model.cache_argument import cache_argument
from engine.model.forward_parameters import forward_parameters
from engine.model.model_sizes import most_positions

# The methods by which models write into a cache: which dimension of their tensors counts tokens.
_TOKEN_DIMENSIONS: dict[str, dict[str, int]] = {
    "update": {"key_states": -2, "value_states": -2},
    "update_indexer": {"indexer_key_states": 1},
    "update_conv_state": {"conv_states": -1},
    "update_recurrent_state": {},
}
# Tokens of the longest measured step. State-space models compute in chunks of up to 256 tokens, so a quarter of it is
# a whole chunk. A measured step is cheap, except for models that loop over tokens in Python.
_LONG_STEP = 1024
_FEW = 16  # tokens of a step whose memory grows with the columns before it rather than with its own tokens
_VERY_LONG_STEP = 2**17  # where masks need more than all else; measured of models with windows
_LONGEST_PERIOD = 8  # layers that a dry run takes in their own order

MeasuredCache: TypeAlias = "caches.Cache | caches.EncoderDecoder"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a layer writes. shape: for one row. token_dimension: the one that counts tokens, None for none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    token_dimension: int | None

    def new_tensor(self, rows: int, tokens: int) -> torch.Tensor:
        shape = [self.shape[0] * rows, *self.shape[1:]]
        if self.token_dimension is not None:
            shape[self.token_dimension] = tokens
        return torch.empty(shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class CacheWrite:
    """One call of the cache's method `name` in a forward. part: 0, or 1 for the cross attention of a decoder."""

    part: int
    layer: int
    name: str
    arguments: tuple[tuple[str, object], ...]

    def repeat(self, cache: MeasuredCache, rows: int, tokens: int) -> object:
        """The same call with so many rows and tokens. Returns what the cache returns to the model."""
        arguments = {
            name: value.new_tensor(rows, tokens) if isinstance(value, TensorSpec) else value
            for name, value in self.arguments
        }
        return getattr(cache.parts[self.part], self.name)(**arguments, layer_idx=self.layer)


@dataclass(frozen=True)
class ModelFootprint:
    """What is measured of a model without its weights.

    model: on the meta device. takes_cache: whether the model takes a cache of keys and values. specs: some layers, of
    each kind (more share the same scratch memory). counts: how many layers of the model each of them stands for.
    first, later: what these layers write in a first step and in a step of one token. shares: per part of the cache,
    whether attention reads it in segments, so that rows can share a prefix without a copy for each. own_layer_bytes: of
    layers that only transformers' own classes can hold, per row, and per row and token.
    """

    model: PreTrainedModel
    takes_cache: bool
    working: WorkingMemory
    specs: tuple[LayerSpec, ...]
    counts: tuple[float, ...]
    first: tuple[CacheWrite, ...] = ()
    later: tuple[CacheWrite, ...] = ()
    shares: tuple[bool, ...] = ()
    own_layer_bytes: tuple[float, float] = (0, 0)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.config.is_encoder_decoder

    @property
    def vocabulary(self) -> int:
        return self.model.config.get_text_config(decoder=True).vocab_size

    @property
    def positions(self) -> int | None:
        """How many positions the model can tell apart; None: any number."""
        return most_positions(self.model)


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, model_class: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """The model of this configuration without weights. model_class: its class; default: the auto class that fits.

    Raises `InputError` when the configuration describes no model that generates text.
    """
    config = copy.deepcopy(config)  # transformers writes into it
    simple = {"experts_implementation": "batched_mm"}  # the only one that runs on the meta device
    if attn_implementation(config) not in (None, "eager", "sdpa"):
        simple["attn_implementation"] = "sdpa"  # which needs as much memory
    make = auto_class(config).from_config if model_class is None else partial(model_from_config, model_class)
    try:
        with torch.device("meta"):
            return make(config, dtype=dtype or config.dtype or torch.float32, **simple).eval()
    except ValueError as error:
        raise InputError(
            f"a {type(config).__name__} describes no model that generates text: {first_line(error)}"
        ) from error


_inspected: dict[tuple[object, ...], ModelFootprint] = {}
_MOST_INSPECTED = 32


def inspect_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, model_class: type[PreTrainedModel] | None = None
) -> ModelFootprint:
    """The footprint of the model that a configuration describes, kept for later calls; arguments as of `meta_model`.

    Raises `InputError` when a forward on the meta device fails.
    """
    key = (model_class, attn_implementation(config), dtype, config.to_json_string(use_diff=False))
    footprint = _inspected.get(key)
    if footprint is None:
        if len(_inspected) >= _MOST_INSPECTED:
            _inspected.clear()
        model = meta_model(config, dtype, model_class)
        try:
            footprint = _inspected[key] = _Inspection(model).footprint()
        except Exception as error:  # of the model's own code: of any class
            if isinstance(error, EngineError) or is_out_of_memory(error):
                raise
            raise InputError(
                f"the memory of {type(model).__name__} cannot be planned without its weights: a forward on torch's "
                f"meta device ends with {in_words(error)}"
            ) from error
    return footprint


class _Inspection:
    """Forwards of a meta model that record what it writes into its cache, and its peak of memory."""

    def __init__(self, model: PreTrainedModel):
        if model.main_input_name != "input_ids":
            raise InputError(
                f"{type(model).__name__} reads {model.main_input_name}: how many tokens these become is not known here"
            )
        self.model, self.config = model, model.config
        text_config = self.config.get_text_config(decoder=True)
        names = ("max_position_embeddings", "max_seq_len")
        positions = next((size for name in names if (size := getattr(text_config, name, None))), _VERY_LONG_STEP)
        self._cache_argument = cache_argument(model)
        self._specs = read_specs(self.config) if self._cache_argument.can_be_ours else ()
        self._windows = [spec.attention_span.size for spec in self._specs if spec.keeps_kv]
        window = max(filter(None, self._windows), default=positions)
        # Recurrent states may be computed token by token, in Python: the long steps of masks would take hours.
        recurrent = any(spec.layer_type == "linear_attention" for spec in self._specs)
        self._window = window if window < positions and not recurrent else None
        # Both measured steps have a mask of the largest window, or none has. Rotary positions have no end.
        self._long = max(2, min(_LONG_STEP, positions - _FEW - 2), 4 * (self._window or 0))
        self._short = max(1, self._long // 4, 2 * (self._window or 0))
        self._takes_logits_to_keep = "logits_to_keep" in forward_parameters(model)
        self._memory = PeakMemory(model)

    def footprint(self) -> ModelFootprint:
        specs, short, long = self._specs, self._new_cache(self._short), self._new_cache(self._long)
        if short is None or long is None:
            working = self._fitted([self._peak(None, self._short)], [self._peak(None, self._long)])
            return ModelFootprint(self.model, False, working, specs, (1.0,) * len(specs))
        writes = _record(short)
        short_peaks = [self._peak(short, self._short)]
        first_writes, short_bytes = _of_known_layers(writes, specs), _own_bytes(short)
        short_peaks.append(self._peak(short, _FEW))
        writes.clear()
        short_peaks.append(self._peak(short, 1))
        later_writes = _of_known_layers(writes, specs)
        long_peaks = [self._peak(long, tokens) for tokens in (self._long, _FEW, 1)]
        if self.config.is_encoder_decoder:
            short_peaks, long_peaks = [self._peak(None, self._short)], [self._peak(None, self._long)]
        elif all(write.name != "update" for write in first_writes):  # a state has no columns
            del short_peaks[1:], long_peaks[1:]
        chosen, counts = _representatives(specs, first_writes, later_writes)
        return ModelFootprint(
            self.model,
            True,
            self._fitted(short_peaks, long_peaks),
            tuple(specs[layer] for layer in chosen),
            counts,
            _renumbered(first_writes, chosen),
            _renumbered(later_writes, chosen),
            self._shares(short),
            _line(short_bytes, _own_bytes(long)),
        )

    def _new_cache(self, tokens: int) -> MeasuredCache | None:
        """A dynamic cache with room for a step of `tokens` tokens and two short ones.

        None where the model takes no cache, or keeps what no cache here can hold.
        """
        if not self._cache_argument.can_be_ours:
            return None
        try:
            cache = caches.build(DEFAULT_CACHE, self.config)
        except caches.CacheError:
            return None
        cache.reserve(tokens + _FEW + 1)
        return cast(MeasuredCache, cache)

    def _peak(self, cache: MeasuredCache | None, tokens: int) -> int:
        """Bytes per row that a step allocates at its peak, the cache left out."""
        allocated, cache_bytes = self._memory.restart(), 0 if cache is None else cache.bytes
        rows = 2 if cache is None else 1  # the rows of an encoder share the biases of its positions
        with self._memory:
            self._forward(cache, rows, tokens)
        grown = 0 if cache is None else cache.bytes - cache_bytes
        return (self._memory.most - allocated - grown) // rows

    def _forward(self, cache: MeasuredCache | None, rows: int, tokens: int) -> None:
        """One step. Of an encoder-decoder model the encoder reads `tokens` tokens and then, given a cache, the decoder
        reads one."""
        ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
        inputs: dict[str, object] = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        with torch.no_grad(), FusedAttention():
            if cache is None and self.config.is_encoder_decoder:
                self.model.get_encoder()(ids)
            elif cache is None:
                self.model(ids, **inputs)
            else:
                if self.config.is_encoder_decoder:
                    inputs["decoder_input_ids"] = ids[:, :1]
                cache.begin(1 if self.config.is_encoder_decoder else tokens)
                self.model(ids, **inputs, **self._cache_argument.inputs(cache.handle))
                cache.commit()

    def _fitted(self, short_peaks: list[int], long_peaks: list[int]) -> WorkingMemory:
        """From the peaks of a short first step and of a long one, each followed by a step of few tokens and by one of a
        single token, as far as these read columns of the cache."""
        few, many = self._short, self._long
        per_token = PerToken.through((few, short_peaks[0]), (many, long_peaks[0]))
        later = zip((_FEW, 1), short_peaks[1:], long_peaks[1:], strict=False)
        rises = [max(0.0, (longer - peak) / (many - few) - per_token.pair * tokens) for tokens, peak, longer in later]
        column, column_of_one = (*rises, 0.0, 0.0)[:2]
        if self._window is None:
            return WorkingMemory(per_token, column, column_of_one)
        below = min(self._window - 1, _LONG_STEP)
        # So few need little in any case.
        plain = per_token if below < 4 * _FEW else self._first_steps(below // 4, below)
        return WorkingMemory(plain, column, column_of_one, self._masked(self._window, per_token))

    def _masked(self, window: int, long: PerToken) -> MaskedSteps:
        very_long = max(_VERY_LONG_STEP, self._long)
        steps = MaskedSteps(window, all(self._windows), long, self._first_steps(very_long, 2 * very_long))
        cache, _ = self._first_step(2 * window)
        if cache is None or not steps.only_windows:  # other layers read more than the copies are
            return steps
        tokens = max(1, window // 4)  # more than layers have room for, so that they make copies
        copies = self._peak(cache, tokens) - steps.of_step(tokens, 2 * window + tokens)
        return replace(steps, copies=max(0, copies))

    def _first_steps(self, few: int, many: int) -> PerToken:
        return PerToken.through((few, self._first_step(few)[1]), (many, self._first_step(many)[1]))

    def _first_step(self, tokens: int) -> tuple[MeasuredCache | None, int]:
        """A step into an empty cache: the cache and the peak. Of an encoder-decoder model the encoder's step."""
        cache = None if self.config.is_encoder_decoder else self._new_cache(tokens)
        return cache, self._peak(cache, tokens)

    def _shares(self, cache: MeasuredCache) -> tuple[bool, ...]:
        """Per part: whether rows share a prefix, also after attention has read it."""
        cache.fork(2)
        self._forward(cache, 2, 1)
        return tuple(subcache.shares for subcache in cache.parts)


def _own_bytes(cache: MeasuredCache) -> tuple[int, int]:
    """Tokens of the cache, and bytes of its layers that only transformers' own classes can hold."""
    layers = [layer for layer in cache.layers if layer.spec.attention_span.kind == "own"]
    return cache.total_tokens, sum(tensor.nbytes for layer in layers for tensor in layer.tensors())


def _line(point: tuple[int, int], other_point: tuple[int, int]) -> tuple[float, float]:
    """Where a line through two points begins, and how much it rises per unit."""
    rise = (other_point[1] - point[1]) / max(1, other_point[0] - point[0])
    return point[1] - rise * point[0], rise


def _record(cache: MeasuredCache) -> list[CacheWrite]:
    """The list to which everything that is written into the cache from here on is added."""
    writes: list[CacheWrite] = []
    for number, subcache in enumerate(cache.parts):
        for name in _TOKEN_DIMENSIONS:
            setattr(subcache, name, partial(_recorded, writes, number, name, getattr(subcache, name)))
    return writes


def _recorded(
    writes: list[CacheWrite], number: int, name: str, method: Callable[..., object], *args: object, **kwargs: object
) -> object:
    bound = inspect.signature(method).bind(*args, **kwargs).arguments
    # Without the kernel's size, the argument is a whole convolution state.
    complete_state = name == "update_conv_state" and bound.get("conv_kernel_size") is None
    dimensions = {} if complete_state else _TOKEN_DIMENSIONS[name]
    arguments = tuple(
        (key, TensorSpec(tuple(value.shape), value.dtype, dimensions.get(key)))
        if isinstance(value, torch.Tensor)
        else (key, value)
        for key, value in bound.items()
        if key not in ("args", "kwargs", "layer_idx")
    )
    writes.append(CacheWrite(number, bound["layer_idx"], name, arguments))
    return method(*args, **kwargs)


def _of_known_layers(writes: list[CacheWrite], specs: Sequence[LayerSpec]) -> list[CacheWrite]:
    return [write for write in writes if specs[write.layer].attention_span.kind != "own"]


def _representatives(
    specs: Sequence[LayerSpec], first_writes: list[CacheWrite], later_writes: list[CacheWrite]
) -> tuple[list[int], tuple[float, ...]]:
    """Layers that stand for all, and how many layers of the model each of them stands for.

    Offloaded layers take turns with two tensors, so which of them grow follows from the order of the layers. Where the
    order repeats, one period has it: two where a period is odd, as each layer then uses both tensors. Otherwise two
    layers of each kind are enough, but may need more than the model.
    """
    steps = (first_writes, later_writes)
    profiles = [
        (spec, *(tuple((w.part, w.name, w.arguments) for w in writes if w.layer == layer) for writes in steps))
        for layer, spec in enumerate(specs)
    ]
    number = len(profiles)
    period = next(n for n in range(1, number + 1) if profiles[n:] == profiles[: number - n])
    if period <= _LONGEST_PERIOD:
        chosen = list(range(min(number, 2 * period if period % 2 else period + number % 2)))
    else:
        chosen = [layer for layer, profile in enumerate(profiles) if profiles[:layer].count(profile) < 2]
    of_profile, of_chosen = Counter(profiles), Counter(profiles[layer] for layer in chosen)
    return chosen, tuple(of_profile[profiles[layer]] / of_chosen[profiles[layer]] for layer in chosen)


def _renumbered(writes: list[CacheWrite], chosen: list[int]) -> tuple[CacheWrite, ...]:
    return tuple(replace(write, layer=chosen.index(write.layer)) for write in writes if write.layer in chosen)
