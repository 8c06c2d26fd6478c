"""`engine score`: how likely a model finds texts, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.cli import options, output, values
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.tables import Column, aligned, terminal_width

if TYPE_CHECKING:
    from engine.scoring import TextScore

_LABEL = 32  # characters of a text in the table


@options.takes(options.SCORE)
def score(texts: list[str] | None, file: list[Any] | None, as_json: bool, **arguments: Any) -> None:
    """Say how likely the model finds each TEXT: the sum of the log probabilities of its tokens, and its perplexity."""
    known = values.known_texts(texts or [], file or [])
    settings = values.engine_config(arguments["config"], arguments)
    parameters = {name: arguments[name] for name in ("rows", "piece_tokens") if arguments[name] is not None}
    cache_config = values.assignments(arguments["cache_option"], "--cache-option") or None
    with Work() as work:
        start_libraries(work, arguments["model"])
        generator = load_generator(work, arguments["model"], settings, arguments["adapter"])
        work.doing("reading the texts")
        plain = [text for _, _, text in known]
        scores = generator.score(plain, cache=arguments["cache"], cache_config=cache_config, **parameters)
    output.say_json(_as_dict(known, scores)) if as_json else output.say(_as_table(known, scores))


def _as_dict(known: Sequence[values.KnownText], scores: Sequence[TextScore]) -> dict[str, object]:
    from engine.result import finite
    from engine.scoring import perplexity

    rows = [labels | score.to_dict() for (_, labels, _), score in zip(known, scores, strict=True)]
    total = sum(score.logprob for score in scores)
    return {"rows": rows, "logprob": finite(total), "perplexity": finite(perplexity(scores))}


def _as_table(known: Sequence[values.KnownText], scores: Sequence[TextScore]) -> str:
    from engine.scoring import perplexity

    titles = [" ".join(title.split()) for title, _, _ in known]
    groups = [(title, [score]) for title, score in zip(titles, scores, strict=True)]
    if len(scores) > 1:
        groups.append(("all", list(scores)))
    rows = [
        [
            title if len(title) <= _LABEL else f"{title[: _LABEL - 3]}...",
            f"{sum(len(score.tokens) for score in group):,}",
            f"{sum(score.logprob for score in group):,.2f}",
            f"{perplexity(group):,.2f}",
        ]
        for title, group in groups
    ]
    columns = [Column("text"), Column("tokens"), Column("log probability"), Column("perplexity")]
    return aligned(columns, rows, terminal_width(80))
