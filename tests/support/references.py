"""Contrastive and diverse beam search in plain Python, without a cache and without batches: what the engine must equal.

One row at a time, whose whole text is read again for every candidate. Slow and obvious on purpose.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import ENCODER_DECODERS, START, source, tiny_encoder_decoder
from helpers import needed
from transformers import LogitsProcessorList, PreTrainedModel

import caches

Text = tuple[int, ...]
# What was read of a model stays for the tests that read the same.
_known: WeakKeyDictionary[PreTrainedModel, dict] = WeakKeyDictionary()


@dataclass
class Reader:
    """Reads texts of one row. pads: how many of its first ids are none. source: its encoder's inputs."""

    model: PreTrainedModel
    pads: int = 0
    source: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = tuple((name, value.numpy().tobytes()) for name, value in self.source.items())
        self.known = _known.setdefault(self.model, {}).setdefault((self.pads, source), {})

    def read(self, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits after `text`, [vocabulary], and what the head was given for every token of it, [tokens, width]."""
        if text not in self.known:
            ids, states = torch.tensor([text[self.pads :]]), []
            given = self.source | {"decoder_input_ids" if self.source else "input_ids": ids}
            hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.append(args[0]))
            with torch.no_grad():
                logits = self.model(**given, use_cache=False).logits[0, -1]
            hook.remove()
            self.known[text] = logits, states[0][0]
        return self.known[text]


def readers(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[tuple[Reader, Text]]:
    """Of every row of `inputs` a reader and the prompt."""
    if not model.config.is_encoder_decoder:
        rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
        return [(Reader(model, mask.count(0)), tuple(ids)) for ids, mask in rows]
    inputs = {name: value for name, value in inputs.items() if name != "decoder_attention_mask"}
    begun = inputs.pop("decoder_input_ids", torch.full((len(next(iter(inputs.values()))), 1), START))
    sources = [{name: value[[row]] for name, value in inputs.items()} for row in range(len(begun))]
    return [(Reader(model, source=one), tuple(ids)) for one, ids in zip(sources, begun.tolist(), strict=True)]


def processed(processors: Sequence[Callable], text: Text, scores: torch.Tensor) -> torch.Tensor:
    return LogitsProcessorList(processors)(torch.tensor([text]), scores[None])[0]


def contrastive(
    reader: Reader,
    prompt: Text,
    *,
    new: int,
    top_k: int,
    penalty_alpha: float,
    processors: Sequence[Callable] = (),
    eos_ids: Sequence[int] = (),
) -> list[int]:
    """The new tokens."""
    text = prompt
    while len(text) < len(prompt) + new and (text == prompt or text[-1] not in eos_ids):
        probabilities = processed(processors, text, reader.read(text)[0]).softmax(dim=-1)
        values = {}
        for token in probabilities.topk(top_k).indices.tolist():
            *context, state = reader.read((*text, token))[1]
            similarity = max(torch.cosine_similarity(state, other, dim=0) for other in context)
            values[token] = float((1 - penalty_alpha) * probabilities[token] - penalty_alpha * similarity)
        text = (*text, max(values, key=values.__getitem__))
    return list(text[len(prompt) :])


@dataclass
class Group:
    """The beams that run, and the texts that have ended; scores first."""

    running: list[tuple[float, Text]]
    ended: list[tuple[float, Text]] = field(default_factory=list)
    done: bool = False

    def keep(self, texts: list[tuple[float, Text]], size: int, divisor: float) -> None:
        """Of the texts that have ended and these, the best."""
        found = [(score / divisor, text) for score, text in texts]
        self.ended = sorted(self.ended + found, reverse=True)[:size]


def diverse(
    reader: Reader,
    prompt: Text,
    *,
    new: int,
    num_beams: int,
    num_beam_groups: int,
    diversity_penalty: float,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    processors: Sequence[Callable] = (),
    eos_ids: Sequence[int] = (),
    pad_id: int = 0,
) -> list[tuple[float, list[int]]]:
    """The best texts' scores and new tokens. With one group it is beam search, by the rules of transformers 5.

    Several groups end by the rules of transformers 4: the worst text is compared with the best candidate of the step,
    and at the length limit all beams that run are added, unless an end token has just made the group done.
    """
    size = num_beams // num_beam_groups
    of_4 = num_beam_groups > 1
    groups = [Group([(0.0, prompt)]) for _ in range(num_beam_groups)]
    for length in range(1, new + 1):  # of the texts that this step makes
        chosen: Counter[int] = Counter()
        for group in groups:
            if group.done:
                chosen[pad_id] += size
                continue
            candidates = []
            for score, text in group.running:
                log_probs = reader.read(text)[0].log_softmax(dim=-1).clone()
                for token, times in chosen.items():
                    log_probs[token] -= diversity_penalty * times
                log_probs = processed(processors, text, log_probs)
                candidates += [(score + value, (*text, token)) for token, value in enumerate(log_probs.tolist())]
            candidates.sort(reverse=True)
            candidates = candidates[: max(2, 1 + len(eos_ids)) * size]

            group.running = [found for found in candidates if found[1][-1] not in eos_ids][:size]
            chosen.update(text[-1] for _, text in group.running)
            at_limit = length == new
            ends = [found for found in candidates[:size] if found[1][-1] in eos_ids or (at_limit and not of_4)]
            group.keep(ends, size, length**length_penalty)
            if len(group.ended) == size:
                at_best = new if early_stopping == "never" and length_penalty > 0 else length
                best = candidates if of_4 else group.running
                hoped = best[0][0] / at_best**length_penalty
                group.done = early_stopping is True or hoped <= group.ended[-1][0]
            if at_limit and of_4 and not group.done:
                group.keep(group.running, size, length**length_penalty)
    pooled = sorted((found for group in groups for found in group.ended), reverse=True)
    return [(score, list(text[len(prompt) :])) for score, text in pooled[:num_return_sequences]]


# What is compared with them, or with transformers.


def tiny(name: str, pads: int = 4, rows: int = 2) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model and its inputs. With `pads` the first row begins with some, or decoders get a prompt of their own."""
    if name not in ENCODER_DECODERS:
        return tiny_model(name), prompt(rows=rows, pads=pads)
    inputs = source(name, rows=rows)
    if pads and name in ("t5", "bart"):
        begun = torch.tensor([[START, 40, 41], [START, 51, 52]])
        inputs |= {"decoder_input_ids": begun, "decoder_attention_mask": torch.ones_like(begun)}
    return tiny_encoder_decoder(name), inputs


@cache
def draft_of(name: str, noise: float = 0.03) -> PreTrainedModel:
    """A model that often says what the one of this name says: the same with noise in its weights."""
    draft = copy.deepcopy(tiny(name)[0])
    draft.__dict__.pop("forward", None)  # of a test that watches over the model: this one outlives it
    seeded = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim >= 2:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=seeded)
    return draft


def exact(cache: str, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments for this cache with options under which it changes no short text; skips where it is refused."""
    options = needed(cache)
    try:
        caches.build(cache, model.config, **options)
    except caches.UnsupportedLayerError as refusal:
        pytest.skip(str(refusal))
    return {"cache": cache, "cache_config": options}


def never_run(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the model's forward fails the test."""

    @wraps(model.forward)
    def forward(*arguments: Any, **options: Any) -> None:
        pytest.fail("the model was run")

    monkeypatch.setattr(model, "forward", forward)


CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def named(cases):
    return [pytest.param(case, id="-".join(str(value) for value in case.values())) for case in cases]


class NoStutter:
    """A logits processor of the caller's own: no token twice in a row."""

    def __call__(self, ids, scores):
        return scores.scatter(1, ids[:, -1:], float("-inf"))


def conversation(out, inputs):
    """The whole of it, with a new turn of three tokens; the mask knows the pads of the prompt."""
    turn = torch.arange(50, 50 + 3 * len(out.sequences)).view(-1, 3)
    ids = torch.cat([out.sequences, turn], dim=1)
    mask = torch.ones_like(ids)
    known = inputs["attention_mask"].repeat_interleave(len(ids) // len(inputs["attention_mask"]), dim=0)
    mask[:, : known.shape[1]] = known
    return {"input_ids": ids, "attention_mask": mask}
