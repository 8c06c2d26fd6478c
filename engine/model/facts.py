"""`ModelFacts`: what is so of a model's forwards, each tried once with a few tokens, when something depends on it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from caches import EngineCache
from caches.layers.model_version import ModelVersion, model_version
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.in_full import in_full
from caches.platform.machine import cache_folder, write_atomically
from caches.platform.native import HALF_PRECISION
from caches.platform.out_of_memory import empty_allocators, in_words, is_out_of_memory, recovering
from caches.platform.transformers_api import attn_implementation
from caches.protocol import attention_view
from engine.model import rope_frequencies, trials
from engine.model.model_lock import turn_of
from engine.version import __version__

_HARDLY = "rounding changes logits as much as earlier tokens do"
_METHOD = 3  # version of the trials: answers of other versions are ignored
_CALLS_UNTIL_NEXT_TRIAL = 100  # a number, not a time: all ranks try at once
Answer: TypeAlias = "bool | str | None"
"""Of a trial: whether something is so, or why it is not; None where that is unknown."""

# What is not so where a trial says no, by the name of the trial.
_WHYS = {
    "several": "several tokens that are read behind others are not read as one by one",
    "cut": "a text that is read in pieces is not read as at once",
    "padded": "pad tokens before a text change what comes behind them",
    "padding between": "pad tokens between others change what comes behind them",
    "in cache": "a part of what was read is kept in the model's modules, not in the cache",
    "rows": "rows that change their places do not go on as they were",
    "all logits": "logits behind the last token are all that a forward returns",
    "states": "hidden states have another form than [rows, tokens, width]",
    "joined": "other rows of a batch change what is computed of a row",
}


@dataclass
class _Answers:
    """About one model. later: answers that may change, and for how many calls they stand. alone: the names of those
    that are about this model alone. version, code: of the model as it was then, and its own code; None before.

    cache, total_tokens: what the model was fed last.
    """

    whys: dict[str, str | None] = field(default_factory=dict)
    later: dict[str, tuple[str, int]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    version: ModelVersion | None = None
    code: set[int] = field(default_factory=set)
    cache: weakref.ref[object] | None = None
    total_tokens: int = 0


_answers: WeakKeyDictionary[PreTrainedModel, _Answers] = WeakKeyDictionary()


class ModelFacts:
    """Each `why_not_` is the reason why something is not so of the model, or None where it is.

    A trial of a few forwards of a few tokens finds it out. Answers are kept with the model, and in a file for all
    models of this class, configuration and data type. Where a trial fails, or logits hardly depend on earlier tokens,
    the reason says so, and later calls try again.

    plain_tokens: see `engine.model.rope_frequencies`.
    """

    def __init__(self, runner: trials.Runs):
        self._runner, self._model, self._ranks = runner, runner.model, runner.ranks
        self._answers = _answers.setdefault(runner.model, _Answers())
        with turn_of(runner.model):
            if self._answers.version is not None:
                self.renew(model_version(runner.model))
        self.dynamic_ropes = rope_frequencies.dynamic_ropes(runner.model)
        self.plain_tokens = rope_frequencies.plain_tokens(runner.model)

    @cached_property
    def starts_again(self) -> bool:
        """See `engine.model.rope_frequencies`."""
        return rope_frequencies.starts_again(self._model)

    @property
    def why_not_several(self) -> str | None:
        """Why a forward of several tokens does not go on from a cache as forwards of single tokens do."""
        return self._why("several", _several)

    @property
    def why_not_cut(self) -> str | None:
        """Why a text that is read in two calls, or two pieces, is another one than read at once."""
        return self._why("cut", _cut)

    @property
    def why_not_scored(self) -> str | None:
        """As `why_not_cut`, but None where earlier tokens hardly change logits: there pieces do not either."""
        reason = self.why_not_cut
        return None if reason is None or reason.endswith(_HARDLY) else reason

    @property
    def why_not_padded(self) -> str | None:
        """Why padding before a text, masked out, change its logits."""
        return self._why("padded", _padded)

    @property
    def why_not_in_cache(self) -> str | None:
        """Why what the model has read of a text is not in its cache alone."""
        return self._why("in cache", partial(_in_cache, self._model))

    @property
    def why_not_reordered(self) -> str | None:
        """Why rows of its cache cannot change places, which beams do, and leave the texts as they are."""
        return self._why("rows", partial(_rows, self._model)) if self._runner.takes_cache else None

    @property
    def why_not_all_logits(self) -> str | None:
        """Why a forward of several tokens does not return the logits behind each of them."""
        return self._why("all logits", lambda text: text.has_all_logits)

    @property
    def why_not_states(self) -> str | None:
        """Why the last hidden states of tokens cannot be compared."""
        return self._why("states", lambda text: text.has_states)

    @property
    def why_not_joined(self) -> str | None:
        """Why its steps cannot be joined with those of other caches."""
        if self.dynamic_ropes:
            return "its position embeddings depend on the longest text of a batch"
        if not self._runner.takes_cache:
            return "it takes no cache of keys and values"
        return self.why_not_in_cache or self._why("joined", lambda text: self._runner.can_be_joined())

    def why_not_padding_between(self, cache: EngineCache) -> str | None:
        """Why padding behind tokens in `cache`, masked out, change the logits of what comes behind it."""
        handle = cache.handle
        imposes = attention_view(handle).imposes_windows
        if imposes or any(getattr(handle, "is_sliding", ())) or _other_windows(self._model.config):
            return "pad tokens take places in windows"
        return self._why("padding between", _padding_between)

    def renew(self, now: ModelVersion) -> None:
        """Forget what may not be so any more of the model as it is now."""
        answers, tried_version = self._answers, self._answers.version
        if tried_version is None or self._ranks.size > 1:  # nothing was tried; other ranks would try nothing
            return
        if (answers.later or answers.alone) and (tried_version != now or answers.code != trials.own_code(self._model)):
            answers.later.clear()
            for name in answers.alone:
                answers.whys.pop(name, None)
            answers.alone.clear()
        if (tried_version.classes, tried_version.layers) != (now.classes, now.layers):
            answers.whys.clear()
        answers.version = now if answers.whys or answers.later else None

    # What was fed last.

    def is_as_left(self, cache: EngineCache, total_tokens: int) -> bool:
        """Whether the model can go on from the first `total_tokens` of a text, which `cache` holds."""
        answers = self._answers
        if "in cache" in answers.whys and answers.whys["in cache"] is None:
            return True
        is_last = answers.cache is not None and answers.cache() is cache and answers.total_tokens == total_tokens
        return is_last or self.why_not_in_cache is None

    def note(self, cache: EngineCache | None, total_tokens: int = 0) -> None:
        """The model has read so many tokens of the text in `cache`. None: nothing that could be gone on from."""
        self._answers.cache = None if cache is None else weakref.ref(cache)
        self._answers.total_tokens = total_tokens

    # Answers.

    @property
    def known(self) -> dict[str, str | None]:
        """The answers so far, by the name of the trial."""
        return dict(self._answers.whys)

    def _why(self, name: str, trial: Callable[[trials.Text], Answer]) -> str | None:
        answers = self._answers
        if name in answers.whys:
            return answers.whys[name]
        with turn_of(self._model):
            reason, calls = answers.later.get(name, ("", 0))
            if calls == 0:
                answers.version, answers.code = model_version(self._model), trials.own_code(self._model)
                file = self._file()
                stored = {} if file is None else _read(file)
                if name in stored:
                    answers.whys[name] = stored[name]
                    return stored[name]
                reason, is_final = self._try(name, trial)
                if is_final:
                    answers.whys[name] = reason or None
                    if file is None:
                        answers.alone.add(name)
                    else:
                        with suppress(OSError):  # then the answer is for this model alone
                            write_atomically(file, json.dumps(stored | {name: reason or None}, indent=1).encode())
                    return reason or None
                calls = _CALLS_UNTIL_NEXT_TRIAL
            answers.later[name] = reason, calls - 1
        return reason or None

    def _try(self, name: str, trial: Callable[[trials.Text], Answer]) -> tuple[str, bool]:
        """The reason, empty where it is so, and whether a trial has shown it; without memory it is made once more."""
        answer, failure = self._tried(trial)
        if failure is not None and self._ranks.most(is_out_of_memory(failure)):
            empty_allocators()
            answer, failure = self._tried(trial)
        if failure is None and answer is not True and self._model.dtype in HALF_PRECISION:
            again, not_tried = self._tried(trial, in_full())
            answer = again if not_tried is None else answer
        if isinstance(failure, trials.BrokenModel):
            return "", False
        not_so = _WHYS[name]
        if failure is not None:
            return f"it may be that {not_so}: the trial failed ({in_words(failure)})", False
        if answer is None:
            return f"it may be that {not_so}: {_HARDLY}", False
        return (answer if isinstance(answer, str) else "" if answer else not_so), True

    def _tried(
        self, trial: Callable[[trials.Text], Answer], mode: AbstractContextManager[object] | None = None
    ) -> tuple[Answer, BaseException | None]:
        device, windows = prompt_device(self._model).type, _other_windows(self._model.config)
        try:
            with (
                recovering(Exception) as outcome,
                torch.no_grad(),
                torch.autocast(device, enabled=False),
                trials.small_windows(self._model),
                self._ranks.together(),
                mode or nullcontext(),
            ):
                return trial(trials.Text(self._runner, max(windows, default=0))), None
        finally:
            self.note(None)
        self._ranks.meet()
        return None, outcome.failure

    def _file(self) -> Path | None:
        """Of the answers about all models like this one; None where they are about this one alone."""
        if self._ranks.size > 1 or trials.own_code(self._model):
            return None
        model, attention = self._model, attn_implementation(self._model.config)
        with suppress(OSError):
            return _file_of(type(model), model.config, attention, model.dtype, prompt_device(model).type)
        return None


def _several(text: trials.Text) -> bool | None:
    """Steps of some models round in another way than both of the others (zamba2)."""
    answers = [text.scale.is_same(text.in_pieces, expected) for expected in (text.one_by_one, text.at_once)]
    return True if True in answers else None if None in answers else False


def _cut(text: trials.Text) -> Answer:
    several = _several(text)
    answer = (
        None if several is None else text.scale.is_same(text.in_pieces if several else text.one_by_one, text.at_once)
    )
    if answer is False and text.is_causal is False:
        return "a token is read with the tokens behind it in mind, so a text that is read in pieces is another one"
    return answer


def _padded(text: trials.Text) -> Answer:
    return text.scale.is_same(text.padded(), text.at_once)


def _padding_between(text: trials.Text) -> Answer:
    several = _several(text)
    expected = text.in_pieces if several else text.one_by_one
    return None if several is None else text.scale.is_same(text.with_padding_between(several), expected)


def _rows(model: PreTrainedModel, text: trials.Text) -> Answer:
    """Where modules keep states, texts are read again. Rounding that hides all differences is no reason against beams,
    and NaN is what a run reports."""
    if _in_cache(model, text) is False:
        return True
    exchanged = text.exchanged()
    return bool(exchanged.isnan().any()) or text.scale.is_same(exchanged, text.one_by_one) is not False


def _in_cache(model: PreTrainedModel, text: trials.Text) -> Answer:
    assert text.at_once is not None  # a forward behind which modules have what they keep
    return not trials.keeps_tensors(model) or text.scale.is_same(text.interrupted(), text.one_by_one)


def _other_windows(config: PreTrainedConfig) -> set[int]:
    """Sizes of the windows that a configuration names and none of its layers announces, as gpt_neo's does."""
    return set(trials.windows_of(config).values()) - trials.announced_windows(config)


def stored_whys(model: PreTrainedModel, config: PreTrainedConfig, device: torch.device) -> list[str]:
    """What trials have shown not to be so of models of this class and configuration on such a device.

    model: may be on the meta device, and have fewer layers.
    """
    with suppress(OSError):
        attention = attn_implementation(model.config)
        return [
            reason
            for reason in _read(_file_of(type(model), config, attention, model.dtype, device.type)).values()
            if reason
        ]
    return []


def _file_of(model: type, config: PreTrainedConfig, attention: str | None, dtype: torch.dtype, device: str) -> Path:
    """Raises `OSError` where the user has no home folder."""
    releases = [_METHOD, *_WHYS.values(), __version__, torch.__version__, transformers.__version__]
    of_model = [f"{model.__module__}.{model.__qualname__}", attention, str(dtype), device, _fields(config.to_dict())]
    described = json.dumps([*releases, *of_model], sort_keys=True, default=str)
    return cache_folder() / "facts" / f"{sha256(described.encode()).hexdigest()[:16]}.json"


def _fields(config: object) -> object:
    """Those that say how a model computes, not where it came from."""
    if not isinstance(config, dict):
        return config
    ignored = ("dtype", "architectures", "transformers_version")
    return {
        name: _fields(value) for name, value in config.items() if not str(name).startswith("_") and name not in ignored
    }


def _read(file: Path) -> dict[str, str | None]:
    """The answers in a file; none where it cannot be read."""
    try:
        stored = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    items = stored.items() if isinstance(stored, dict) else ()
    return {name: reason for name, reason in items if name in _WHYS and isinstance(reason, str | None)}
