"""The draft of a run: a second model that proposes tokens. What it has to fit, and the session that it runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import caches
from caches import EngineCache
from engine.decoding.model_session import ModelSession
from engine.errors import InputError, OptionError
from engine.model.accelerate_hooks import prompt_device
from engine.model.forward import ModelRunner
from engine.model.loading import unwrapped
from engine.model.masks import Columns
from engine.request.checks import check_model, most_positions
from engine.request.encoder import Recover, Source, encode, source_again
from engine.request.model_kwargs import PER_TOKEN
from engine.request.request import Request
from engine.request.vocabulary import Translator
from strategies import SpeculationStats, Strategy, Translation

_LONGEST = 2**31  # tokens, where nothing limits them


@dataclass(frozen=True)
class DraftRequest:
    """What the draft reads. mask [rows, prompt columns]. beginning: the ids of its first columns, which are not fed.

    total: columns when the run ends. model_kwargs: further inputs. source: what its own encoder reads. translation:
    where its vocabulary is another one.
    """

    mask: torch.Tensor
    beginning: torch.Tensor | None
    total: int
    model_kwargs: dict[str, Any]
    chunk_tokens: int | None
    translation: Translation | None
    source: Source | None = None

    def encoded(self, draft: Draft, recover: Recover) -> DraftRequest:
        """The same with what the draft's encoder makes of its source: see `encode`."""
        if self.source is None:
            return self
        model_kwargs, source = encode(draft.model, self.model_kwargs, self.source, recover)
        return replace(self, model_kwargs=model_kwargs, source=source)


class Draft:
    """A model that proposes tokens to another. A `Generator` keeps it from call to call.

    given: the model as it was given, maybe in a wrapper.
    """

    def __init__(self, model: PreTrainedModel, linears: str):
        if isinstance(model, (str, Path)):
            raise OptionError(
                f"assistant_model is a PreTrainedModel, not a {type(model).__name__}: load it first, with "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        self.given = model
        try:
            model = unwrapped(model)
            check_model(model)
        except InputError as error:
            raise OptionError(f"assistant_model: {error}") from error
        self.model, self._runner = model, ModelRunner(model, linears=linears)
        self._learned: tuple[Strategy, SpeculationStats] | None = None

    def drafts(self, strategy: Strategy) -> SpeculationStats:
        """Where the flow of this run counts; it begins with what was learned from the last one, if it may."""
        found = SpeculationStats()
        if getattr(strategy, "num_assistant_tokens_schedule", None) == "heuristic":
            learned = self._learned
            if learned is not None and learned[0] == strategy:
                found.length = learned[1].length
            self._learned = strategy, found
        return found

    def session(
        self,
        request: DraftRequest,
        check: Callable[[], None],
        recover: Callable[[ModelSession, BaseException], None] | None = None,
    ) -> ModelSession:
        """A session of its own for one run, with an empty cache. check: see `ModelRunner.feed`; recover: see
        `ModelSession`.
        """
        beginning = request.beginning
        return ModelSession(
            self._runner,
            self._new_cache(),
            Columns(request.mask, request.total),
            rows=len(request.mask),
            before=0,
            embeds=None,
            columns_without_ids=0 if beginning is None else beginning.shape[1],
            beginning=beginning,
            model_kwargs=request.model_kwargs,
            flags={},
            chunk_tokens=request.chunk_tokens,
            shares=False,
            check=check,
            recover=recover,
        )

    def _new_cache(self) -> EngineCache:
        if not self._runner.takes_cache:
            return caches.build("none", self.model.config)
        try:
            return caches.build("dynamic", self.model.config)
        except caches.UnsupportedLayerError:
            return caches.build("none", self.model.config)


def read_draft_request(
    draft: Draft | None,
    model: PreTrainedModel,
    request: Request,
    cache: EngineCache | None,
    tokenizer: Any,
    draft_tokenizer: Any,
) -> DraftRequest | None:
    """Check that `draft` can propose tokens to `model`. cache: the live one that was given. Raises `OptionError`."""
    if draft is None:
        return None
    _check_fits(draft.model, model, request)
    beginning, device = _beginning(request, cache), prompt_device(draft.model)
    if _translates(draft.model, model, tokenizer, draft_tokenizer):
        if len(request.prompt.ids) > 1 or request.source is not None:
            raise OptionError(
                "a draft with a vocabulary of its own reads one text at a time, and no source of an encoder, but there "
                f"are {len(request.prompt.ids)} rows: generate them one by one, or give a draft with the model's "
                "vocabulary"
            )
        total = min(most_positions(draft.model) or _LONGEST, 4 * request.total + 64)  # its words may be shorter
        translator = Translator(tokenizer, draft_tokenizer, request.mask, beginning, total)
        mask = torch.ones(1, 1, dtype=torch.long, device=device)
        return DraftRequest(mask, None, total, {}, request.chunk_tokens, translator.translation)
    model_kwargs: dict[str, Any] = {}
    source = None
    if request.source is not None:
        model_kwargs, source = source_again(draft.model, request.prompt, request.source, request.config)
    mask = request.mask.to(device)
    return DraftRequest(mask, beginning, request.total, model_kwargs, request.chunk_tokens, None, source)


def _check_fits(draft: PreTrainedModel, model: PreTrainedModel, request: Request) -> None:
    if draft.config.is_encoder_decoder != model.config.is_encoder_decoder:
        has, lacks = ("draft", "model") if draft.config.is_encoder_decoder else ("model", "draft")
        raise OptionError(
            f"the {has} has an encoder and the {lacks} has none, so they do not read the same: give a draft of the "
            "model's kind"
        )
    media = [name for name in request.prompt.model_kwargs if name not in PER_TOKEN and not name.endswith("_mask")]
    if request.prompt.embeds is not None or (media and request.source is None):
        raise OptionError(
            f"a draft sees token ids only, and the prompt has {', '.join(media) or 'inputs_embeds'}: leave "
            "assistant_model out (prompt_lookup_num_tokens needs no draft)"
        )
    most, needed = most_positions(draft), request.total - 1
    if most is not None and needed > most:
        raise OptionError(
            f"the draft has {most} positions, but {request.mask.shape[1]} prompt tokens and {request.new_tokens} new "
            f"ones need {needed}: ask for fewer, or give another draft"
        )


def verifies(strategy: Strategy) -> bool:
    """Whether it lets the model look at tokens that may have to be taken back."""
    return bool(getattr(strategy, "verifies", False))


def check_takes_back(runner: ModelRunner, cache: EngineCache, request: Request) -> None:
    """Raise `OptionError` where `cache` cannot go back to what was accepted."""
    why = caches.protocol.capabilities(cache).rollback_blocker
    if why is not None:
        raise OptionError(
            f"{request.strategy.name} takes back what was not accepted, and {why}: give a name instead, such as "
            "cache='static', or use another strategy"
        )
    if request.before > 0 and not runner.reads_on:
        raise OptionError(
            f"{request.strategy.name} takes back what was not accepted, and {type(runner.model).__name__} then has to "
            f"read all again, but the {request.before} tokens in the cache were not given: give the whole conversation"
        )


def _beginning(request: Request, cache: EngineCache | None) -> torch.Tensor | None:
    """The ids of what only the cache has read, which the draft has to read too."""
    if request.before == 0:
        return None
    log = None if cache is None else cache.log
    if log is None or log.ids.shape[1] < request.before:
        raise OptionError(
            f"the draft has to read the {request.before} tokens in the cache too, and which ones they are is not "
            "known: give the whole conversation"
        )
    return log.ids[:, : request.before]


def _translates(draft: PreTrainedModel, model: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Whether the two have different vocabularies; raises `OptionError` where nothing could tell what ids mean."""
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (draft, model)]
    if draft_tokenizer is None:
        if sizes[0] != sizes[1]:
            raise OptionError(
                f"the draft has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}: give tokenizer= and "
                "assistant_tokenizer=, or a draft with the model's vocabulary"
            )
        return False
    if tokenizer is None:
        raise OptionError("assistant_tokenizer says what the draft's ids mean: give tokenizer= for the model's too")
    if sizes[0] == sizes[1] and tokenizer.get_vocab() == draft_tokenizer.get_vocab():
        raise OptionError("assistant_tokenizer has the vocabulary of tokenizer: leave it out, ids need no translation")
    return True
