"""The log probabilities that a model gives to texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine.errors import InputError, OptionError
from engine.prompt import read_prompt, without_padding
from engine.request.inputs.checks import check_vocabulary
from engine.result import Generation, finite
from engine.tables import counted
from strategies import Emit, Flow, Forward, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from engine.model.facts import ModelFacts

PIECE = 64  # tokens whose logits exist at once
# Nothing ends a text that is known, not even the model's own settings.
_ENDLESS: dict[str, object] = {"eos_token_id": [], "stop_strings": [], "num_return_sequences": 1}


@dataclass(frozen=True)
class TextScore:
    """How likely the model finds a text.

    Attributes
    ----------
    tokens : tuple of int
        The token ids of the text, with those that the tokenizer puts around it.
    logprobs : tuple of float
        The natural logarithms of the probabilities of all tokens but the first, which has nothing before it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Of the text: the sum of `logprobs`."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """e to the negative mean of `logprobs`, as of transformers' loss; infinity beyond the largest float."""
        return perplexity([self])

    def to_dict(self) -> dict[str, object]:
        """The fields and both properties, as values of JSON: None for what is infinite."""
        fields = {"tokens": self.tokens, "logprobs": tuple(map(finite, self.logprobs))}
        return fields | {"logprob": finite(self.logprob), "perplexity": finite(self.perplexity)}


def perplexity(scores: Sequence[TextScore]) -> float:
    """Of all tokens of one or more texts: see `TextScore.perplexity`."""
    try:
        return math.exp(-math.fsum(score.logprob for score in scores) / sum(len(score.logprobs) for score in scores))
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class ScoredText:
    """A strategy whose text is known: row i goes on with `tokens[i]`, all of one length. samples: it draws nothing.

    piece_tokens: of each forward.
    """

    tokens: tuple[tuple[int, ...], ...]
    piece_tokens: int = PIECE
    name: ClassVar[str] = "scored_text"
    samples: ClassVar[bool] = False

    def flow(self, task: Task) -> Flow:
        tokens = torch.tensor(self.tokens, device=task.ids.device)
        yield Forward(task.ids)
        yield Emit(tokens[:, :1])
        for begin in range(0, tokens.shape[1] - 1, self.piece_tokens):
            fed = tokens[:, begin : begin + self.piece_tokens][:, : tokens.shape[1] - 1 - begin]
            yield Forward(fed, all_logits=True)
            yield Emit(tokens[:, begin + 1 : begin + 1 + fed.shape[1]])


def scoring(ids: Sequence[Sequence[int]], piece_tokens: int = PIECE) -> dict[str, object]:
    """The parameters of a run after the first token of each row, whose `logprobs` are those of the others.

    ids: of rows of one length, 2 tokens or more.
    """
    strategy = ScoredText(tuple(tuple(row[1:]) for row in ids), piece_tokens)
    return {"strategy": strategy, "max_new_tokens": len(ids[0]) - 1, "top_logprobs": 0} | _ENDLESS


def score(
    generate: Callable[..., Generation],
    model: PreTrainedModel,
    facts: ModelFacts,
    ids: list[list[int]],
    rows: int,
    piece_tokens: int,
) -> list[TextScore]:
    """See `Generator.score`. generate: as of that, with the cache. facts: of the model. ids: of the texts."""
    _check_model(model, facts)
    for name, value in (("rows", rows), ("piece_tokens", piece_tokens)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r}: give a whole number of 1 or more")
    for row in ids:
        check_vocabulary(model, torch.tensor(row, device="cpu"))
    scores: dict[int, TextScore] = {}
    # Texts of a run have about one length. The longest come first: one that does not fit is refused before any work.
    order = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    while order:
        longest = len(ids[order[0]])
        # Of long texts the keys may depend on the longest one of a run.
        together = rows if facts.plain_tokens is None or longest <= facts.plain_tokens else 1
        indices, order = order[:together], order[together:]
        padded = [ids[number] + [0] * (longest - len(ids[number])) for number in indices]  # no token sees later ones
        firsts = torch.tensor([row[:1] for row in padded], device="cpu")
        out = generate(without_padding(firsts), **scoring(padded, piece_tokens))
        assert out.logprobs is not None
        for number, scored in zip(indices, out.logprobs, strict=True):
            row = ids[number]
            scores[number] = TextScore(tuple(row), tuple(token.logprob for token in scored[: len(row) - 1]))
    return [scores[number] for number in range(len(ids))]


def _check_model(model: PreTrainedModel, facts: ModelFacts) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise InputError(
            f"{name} has an encoder, so a text alone has no score: give one source and its answer to the model's own "
            "forward, as labels"
        )
    reason = facts.why_not_scored
    if reason is not None:
        raise InputError(
            f"a text is read piece by piece here, and in {name} {reason}: take the loss of the model's own forward"
        )


def read_texts(texts: object, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of a text, of the ids of a text, or of a list of either. Raises `InputError`."""
    texts = _listed(texts)
    if isinstance(texts, str) or (isinstance(texts, list) and texts and all(map(_is_id, texts))):
        texts = [texts]
    if not isinstance(texts, list):
        raise InputError(
            f"texts={texts!r:.80}: give a text, its token ids, or a list of texts or of lists of token ids"
        )
    rows = []
    for number, text in enumerate(map(_listed, texts)):
        if not isinstance(text, (str, list)):
            raise InputError(f"texts[{number}]={text!r:.80}: give a text or a list of token ids")
        ids: list[int] = []
        if text:
            prompt = read_prompt(text if isinstance(text, str) else [text], {}, tokenizer, bos_id=None)
            ids = prompt.ids[0].tolist()
        if len(ids) < 2:
            raise InputError(
                f"texts[{number}] has {counted(len(ids), 'token')}, and a score begins with the second one, which "
                "follows the first: leave this text out"
            )
        rows.append(ids)
    return rows


def _listed(value: Any) -> object:
    """Tensors, arrays and sequences as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) or getattr(value, "ndim", None) == 0
