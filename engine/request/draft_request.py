"""`DraftRequest`: what a draft reads to propose tokens, and the checks that draft and model fit each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from caches import EngineCache
from caches.platform.accelerate_hooks import prompt_device
from engine.errors import OptionError
from engine.model.model_sizes import most_positions
from engine.prompt import PER_TOKEN, move
from engine.request.call import Call
from engine.request.inputs.encoder import Recover, Source, encode, source_again
from engine.request.inputs.model_kwargs import complete_model_kwargs
from engine.request.request import Request
from engine.request.vocabulary import Translator
from engine.tables import lengths
from strategies import Translation

_LONGEST = 2**31  # tokens, where nothing limits them


@dataclass(frozen=True)
class DraftRequest:
    """What the draft reads. mask: [rows, prompt columns].

    prefix_ids: [rows, n], the first columns, which the model has in its cache and the flow does not feed, or None.
    total: columns when the run ends, at most. model_kwargs: further inputs. translation: between the vocabularies of
    model and draft, None for the same. source: what the draft's encoder reads, None without one.
    """

    mask: torch.Tensor
    prefix_ids: torch.Tensor | None
    total: int
    model_kwargs: dict[str, Any]
    translation: Translation | None
    source: Source | None = None

    def encoded(self, draft: PreTrainedModel, recover: Recover) -> DraftRequest:
        """The same with the outputs of the draft's encoder: see `encode`."""
        if self.source is None:
            return self
        model_kwargs, source = encode(draft, self.model_kwargs, self.source, recover)
        return replace(self, model_kwargs=model_kwargs, source=source)


def read_draft_request(
    draft: PreTrainedModel, model: PreTrainedModel, request: Request, cache: EngineCache | None, call: Call
) -> DraftRequest:
    """Check that `draft` can propose tokens to `model`. cache: the live one that was given. Raises `OptionError`."""
    _check_fits(draft, model, request)
    tokenizer, draft_tokenizer = call.tokenizer, call.assistant_tokenizer
    prefix_ids, device = _prefix_ids(request, cache), prompt_device(draft)
    if _translates(draft, model, tokenizer, draft_tokenizer):
        if len(request.prompt.ids) > 1 or request.source is not None:
            raise OptionError(
                "a draft with a vocabulary of its own reads one text at a time, and no source of an encoder, but there "
                f"are {len(request.prompt.ids)} rows: generate them one by one, or give a draft with the model's "
                "vocabulary"
            )
        total = min(most_positions(draft) or _LONGEST, 4 * request.lengths.total + 64)  # its words may be shorter
        translator = Translator(tokenizer, draft_tokenizer, request.mask, prefix_ids, total)
        mask = torch.ones(1, 1, dtype=torch.long, device=device)
        return DraftRequest(mask, None, total, {}, translator.translation)
    model_kwargs: dict[str, Any] = {}
    source = request.source
    if _media(request):
        prompt = replace(request.prompt, model_kwargs=move(request.inputs, device))
        model_kwargs = complete_model_kwargs(draft, prompt, request.mask, None, request.config)[0].model_kwargs
    if source is not None:
        model_kwargs, source = source_again(draft, request.prompt, source, request.config)
    return DraftRequest(request.mask.to(device), prefix_ids, request.lengths.total, model_kwargs, None, source)


def _check_fits(draft: PreTrainedModel, model: PreTrainedModel, request: Request) -> None:
    if draft.config.is_encoder_decoder != model.config.is_encoder_decoder:
        has, lacks = ("draft", "model") if draft.config.is_encoder_decoder else ("model", "draft")
        raise OptionError(
            f"the {has} has an encoder and the {lacks} has none, so they do not read the same: give a draft of the "
            "model's kind"
        )
    media = _media(request)
    if request.prompt.embeds is not None or (media and (type(draft) is not type(model) or request.lengths.cached > 0)):
        raise OptionError(
            f"this draft sees token ids only, and the prompt has {', '.join(media) or 'inputs_embeds'}: give a draft "
            "of the model's class, which reads images and sounds of a whole conversation too, or leave assistant_model "
            "out (prompt_lookup_num_tokens needs no draft)"
        )
    max_positions, needed = most_positions(draft), request.lengths.total - 1
    if max_positions is not None and needed > max_positions:
        raise OptionError(
            f"the draft has {max_positions:,} positions, but {lengths(request.mask.shape[1], request.lengths.new)} "
            f"need {needed:,}: ask for fewer, or give another draft"
        )


def _media(request: Request) -> list[str]:
    """The inputs of a decoder that are neither tokens nor of each token: images, sounds, ..."""
    return [name for name in request.inputs if name not in PER_TOKEN and not name.endswith("_mask")]


def _prefix_ids(request: Request, cache: EngineCache | None) -> torch.Tensor | None:
    """The ids of the columns that the prompt does not repeat: the draft has to read them too."""
    if request.lengths.cached == 0:
        return None
    log = None if cache is None else cache.log
    if log is None or log.ids.shape[1] < request.lengths.cached:
        raise OptionError(
            f"the draft has to read the {request.lengths.cached} tokens in the cache too, and which ones they are is "
            "not known: give the whole conversation"
        )
    return log.ids[:, : request.lengths.cached]


def _translates(
    draft: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, draft_tokenizer: Any
) -> bool:
    """Whether the two have different vocabularies. Raises `OptionError` where a tokenizer is missing for that."""
    sizes = [lm.config.get_text_config(decoder=True).vocab_size for lm in (draft, model)]
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
