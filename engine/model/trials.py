"""Trials of a model: a few forwards of a few tokens, which show what changes its logits and what does not.

A difference of logits is compared with the one that another history makes: rounding is far below that, and a token that
was not read, or read in another place, is not. Where history itself hardly shows, a trial has no answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from caches import EngineCache, HFCacheAdapter, NoCache, UnsupportedLayerError, build, read_specs
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.torch_api import hooks_of
from caches.platform.transformers_api import accelerate_hook
from caches.platform.undo import on_failure
from caches.protocol import attention_view
from configs.cache import DEFAULT_CACHE
from engine.model.columns import Columns
from engine.model.forward_arguments import Step
from engine.model.model_inputs import ModelInputs
from engine.parallel.ranks import OneProcess

_CUT, _TOKENS, _PADDING = 4, 6, 4  # of the text: where it is cut, how long it is, and padding in it or before it
_CHANGE, _LEAST_POWER = 0.002, 10.0  # of what another history changes; and how far it has to be above rounding

_WINDOW = re.compile(r"(.*_)?window(_size|_length)?")


class BrokenModel(Exception):
    """Logits are NaN whatever is read: a run reports that."""


class Runs(Protocol):
    """A `ModelRunner`."""

    model: PreTrainedModel
    takes_cache: bool

    ranks: OneProcess

    def forward_once(self, step: Step, inputs: ModelInputs) -> ModelOutput: ...

    def can_be_joined(self) -> bool | str | None: ...


@dataclass(frozen=True)
class Scale:
    """What differences are measured with. history: the norm of the difference that other tokens make. rounding: that of
    equal computations."""

    history: float
    rounding: float

    def is_same(self, logits: torch.Tensor, expected: torch.Tensor) -> bool | None:
        """Whether two logits are equal but for rounding; None where that is unknown."""
        limit = max(_CHANGE * self.history, 2 * self.rounding)
        if not limit * _LEAST_POWER <= self.history:  # NaN too
            return None
        return distance(logits, expected) <= limit


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).norm())


def rounding_of(logits: torch.Tensor) -> float:
    """The norm of a difference that rounding alone may make."""
    return torch.finfo(logits.dtype).eps / 2 * float(logits.float().norm())


class Text:
    """One text that a model reads in several ways. The logits are those behind its last token, [vocabulary].

    tokens_before: how many tokens come before the text, so that windows of that many tokens are full.
    """

    def __init__(self, runner: Runs, tokens_before: int = 0):
        self._runner, model = runner, runner.model
        size = model.config.get_text_config(decoder=True).vocab_size
        self._cut, self._tokens = tokens_before + _CUT, tokens_before + _TOKENS
        self._single = (self._cut, *range(self._cut + 1, self._tokens + 1))
        self._ids = (torch.arange(self._tokens, device=prompt_device(model)) + 3)[None] % size
        history = torch.arange(self._tokens, device=self._ids.device) < self._cut
        self._other = torch.where(history, (self._ids + max(1, size // 2)) % size, self._ids)

    @cached_property
    def at_once(self) -> torch.Tensor:
        return self._read_at_once[-1]

    @cached_property
    def in_pieces(self) -> torch.Tensor:
        """In two forwards of several tokens."""
        return self._read(self._ids, (self._cut, self._tokens))[-1]

    @cached_property
    def one_by_one(self) -> torch.Tensor:
        """The tokens behind the cut in forwards of their own."""
        return self._read(self._ids, self._single)[-1]

    @property
    def is_causal(self) -> bool | None:
        """Whether logits are the same with and without what comes later."""
        cut_logits = self._read(self._ids[:, : self._cut], (self._cut,))[-1]
        return self.scale.is_same(cut_logits, self._read_at_once[self._cut - 1])

    @cached_property
    def scale(self) -> Scale:
        """That of `at_once`; of a model with states also that of what their loss changes, where it is less."""
        text, other_text = self._read(torch.cat([self._ids, self._other]), (self._tokens,))
        if bool(self.at_once.isnan().any()):
            raise BrokenModel
        rounding = max(rounding_of(self.at_once), distance(text, self.at_once))
        history = distance(text, other_text)
        cache = self._new_cache()
        self._read(self._ids, (self._cut,), cache)
        states = list(_states_of(cache))
        if states:
            for state in states:
                state.zero_()
            without = self._read(self._ids, self._single[1:], cache)[-1]
            history = min(history, distance(without, self.one_by_one))
        return Scale(history, rounding)

    def padded(self) -> torch.Tensor:
        """Behind padding."""
        ids = torch.cat([self._padding(), self._ids], dim=1)
        return self._read(ids, (_PADDING + self._tokens,), mask=_mask(ids, 0))[-1]

    def with_padding_between(self, several: bool) -> torch.Tensor:
        """With pad tokens at the cut, of which the first is not masked when it is read. several: in one forward."""
        ids = torch.cat([self._ids[:, : self._cut], self._padding(), self._ids[:, self._cut :]], dim=1)
        ends = (ids.shape[1],) if several else range(self._cut + 2, ids.shape[1] + 1)
        cache = self._new_cache()
        self._read(ids, (self._cut, self._cut + 1), cache)
        return self._read(ids, ends, cache, _mask(ids, self._cut))[-1]

    def exchanged(self) -> torch.Tensor:
        """As `one_by_one`, in another row than the first tokens were read in."""
        cache = self._new_cache()
        self._read(torch.cat([self._other, self._ids]), self._single[:1], cache)
        cache.select_rows(torch.tensor([1, 0], device=self._ids.device))
        return self._read(torch.cat([self._ids, self._other]), self._single[1:], cache)[0]

    @property
    def has_all_logits(self) -> bool:
        return len(self._read_at_once) == self._tokens

    @property
    def has_states(self) -> bool:
        """Whether a forward returns hidden states [rows, tokens, width]."""
        inputs = replace(_other_inputs(self._runner.model, 1), flags={"output_hidden_states": True})
        columns = Columns(torch.ones_like(self._ids), self._tokens)
        outputs = self._forward(self._ids, columns, self._new_cache(), self._tokens, inputs)
        states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
        return bool(states) and states[-1].shape[:-1] == self._ids.shape

    def interrupted(self) -> torch.Tensor:
        """As `one_by_one`, while another text is read behind the cut."""
        cache = self._new_cache()
        self._read(self._ids, self._single[:1], cache)
        self._read(self._other, self._single)
        return self._read(self._ids, self._single[1:], cache)[-1]

    @cached_property
    def _read_at_once(self) -> torch.Tensor:
        return self._read(self._ids, (self._tokens,))

    def _read(
        self,
        ids: torch.Tensor,
        ends: Iterable[int],
        cache: EngineCache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of the last of these forwards, [rows, tokens, vocabulary]; of one row [tokens, vocabulary].

        ends: the columns that forwards end before. mask: of the ids; default: no padding.
        """
        cache = self._new_cache() if cache is None else cache
        inputs = _other_inputs(self._runner.model, len(ids))
        logits = None
        for end in ends:
            real = torch.ones_like(ids[:, :end]) if mask is None else mask[:, :end]
            begin = cache.total_tokens
            logits = self._forward(ids, Columns(real, ids.shape[1]), cache, end, inputs).logits[:, begin - end :]
        assert logits is not None
        return logits[0] if len(ids) == 1 else logits[:, -1]

    def _forward(
        self, ids: torch.Tensor, columns: Columns, cache: EngineCache, end: int, inputs: ModelInputs
    ) -> ModelOutput:
        """A step that goes on from `cache` up to column `end` of `ids`."""
        begin = cache.total_tokens
        if begin == 0:
            attention_view(cache).set_padding(columns.left_padding)
        step = Step(ids, columns, cache, 0, begin, end, begin == 0)
        cache.begin(end - begin)
        with on_failure(cache.abort):
            outputs = self._runner.forward_once(step, inputs)
        cache.commit()
        return outputs

    def _new_cache(self) -> EngineCache:
        model = self._runner.model
        if self._runner.takes_cache and not model.config.is_encoder_decoder and own_code(model):
            return HFCacheAdapter(DynamicCache(config=model.config))  # which hooks may shorten
        if self._runner.takes_cache:
            with suppress(UnsupportedLayerError):
                return build(DEFAULT_CACHE, model.config)
        return NoCache()

    def _padding(self) -> torch.Tensor:
        return torch.zeros_like(self._ids[:, :1]).expand(-1, _PADDING)


def _mask(ids: torch.Tensor, begin: int) -> torch.Tensor:
    """The mask of ids with padding from column `begin` on."""
    mask = torch.ones_like(ids)
    mask[:, begin : begin + _PADDING] = 0
    return mask


def _states_of(cache: object) -> Iterator[torch.Tensor]:
    for layer in getattr(cache, "layers", ()):
        yield from getattr(layer, "conv_states", {}).values()
        yield from getattr(layer, "recurrent_states", {}).values()


class _Encoded(BaseModelOutput):
    """Outputs of an encoder; what a decoder looks for besides the states is not there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return


def _other_inputs(model: PreTrainedModel, rows: int) -> ModelInputs:
    """What a decoder reads besides its tokens: some states, in place of those that an encoder has computed."""
    if not model.config.is_encoder_decoder:
        return ModelInputs()
    width = getattr(model.get_encoder(), "config", model.config).get_text_config().hidden_size
    values = torch.linspace(-1, 1, _CUT * width, device=prompt_device(model), dtype=model.dtype)
    states = values.view(1, _CUT, width).expand(rows, -1, -1).contiguous()
    return ModelInputs(model_kwargs={"encoder_outputs": _Encoded(last_hidden_state=states)})


def windows_of(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes of windows that a configuration names, by the names of its fields."""
    fields = config.get_text_config(decoder=True).to_dict().items()
    return {name: value for name, value in fields if type(value) is int and value > 0 and _WINDOW.fullmatch(name)}


def announced_windows(config: PreTrainedConfig) -> set[int | None]:
    """The sizes of the windows that caches of a configuration have; None where a layer has none."""
    try:
        return {spec.attention_span.size for spec in read_specs(config)}
    except UnsupportedLayerError:  # no cache can be built
        return {None}


@contextmanager
def small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Makes the windows that caches have so small that the text of a trial is longer, of the model and new caches."""
    announced, copies = announced_windows(model.config), dict[int, Any]()
    windows = {name: size for name, size in windows_of(model.config).items() if size in announced}
    small = copy.deepcopy(model.config, copies).get_text_config(decoder=True)  # other models may have the same one
    for name in windows.keys() & vars(small).keys():
        setattr(small, name, _CUT)
    changed = []
    for module in model.modules() if windows else ():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                changed.append((module, name, value, copies[id(value)]))
            elif name in windows and value == windows[name]:
                changed.append((module, name, value, _CUT))
    for module, name, _, replacement in changed:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, value, _ in changed:
            setattr(module, name, value)


def own_code(model: nn.Module) -> set[int]:
    """What modules compute besides what their classes say: hooks, except those of transformers and accelerate, which
    record outputs and move tensors, and forwards that objects have of their own. As numbers that tell one from another.
    """
    hooks = {
        number: hook
        for module in model.modules()
        for module_hooks in hooks_of(module)
        for number, hook in module_hooks.items()
    }
    theirs = ("transformers.", "accelerate.")
    hook_ids = {number for number, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(theirs)}
    forwards = (vars(module).get("forward") for module in model.modules() if accelerate_hook(module) is None)
    return hook_ids | {id(forward) for forward in forwards if forward is not None}


def keeps_tensors(model: nn.Module) -> bool:
    """Whether modules have tensors that are neither parameters nor buffers, as those have that keep states."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    attributes = (value for module in model.modules() for value in vars(module).values())
    return any(id(tensor) not in registered for value in attributes for tensor in _tensors_in(value))


def _tensors_in(value: object, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)) and value:
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(element, depth - 1)
