"""Memory runs out in any layer and at any step: the text is that of a run that nothing disturbed."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from covering import pairwise
from encoder_decoders import ENCODER_DECODERS
from helpers import needed
from injection import ERRORS, failing
from references import draft_of, tiny
from resuming import again, check_goes_on
from strategy_cases import MODELS, OPTIONS
from streamers import check as check_pieces

import caches
import engine
import strategies

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 8
FIELDS = ("scores", "logits", "sequences_scores", "beam_indices")
FALLBACKS = ("release", "chunk", "offload", "split")
AT = "prompt", "first", "middle", "last"


@dataclass(frozen=True)
class Cell:
    """A strategy on a backend for a kind of model, and how many prompts it reads; the first one is padded."""

    strategy: str
    kind: str
    cache: str
    rows: int = 2

    def read(self) -> tuple[Any, dict[str, torch.Tensor]]:
        name = MODELS[self.kind]
        pads = 4 if name not in ENCODER_DECODERS or self.rows == 2 else 0
        return tiny(name, pads, self.rows)

    @property
    def draft(self) -> Any:
        return draft_of(MODELS[self.kind]) if self.strategy == "assisted" else None

    @property
    def options(self) -> dict[str, Any]:
        chosen = strategies.build(self.strategy, **OPTIONS.get(self.strategy, {}))
        cache = {"cache": self.cache, "cache_config": needed(self.cache)}
        records = {"output_scores": True, "output_logits": True}
        return {"strategy": chosen, "assistant_model": self.draft, "max_new_tokens": NEW} | cache | records


@dataclass(frozen=True)
class DecodingLoop:
    """What came of it; the random state after it; forwards of the model, and of the draft."""

    out: engine.Generation
    random: torch.Tensor
    forwards: tuple[int, ...]
    pieces: tuple[engine.StreamChunk, ...] = ()


def run(
    cell: Cell, at=((), ()), error: str = "device", late: bool = False, streams: bool = False, **more: Any
) -> DecodingLoop:
    """at: where the model fails, and where its draft does."""
    model, inputs = cell.read()
    models = [one for one in (model, cell.draft) if one is not None]
    torch.manual_seed(4)
    with ExitStack() as stack:
        found = [
            stack.enter_context(failing(one, planned, error, late)) for one, planned in zip(models, at, strict=False)
        ]
        if streams:
            shown = engine.stream(model, inputs, **cell.options | more)
            pieces, out = tuple(shown), shown.result()
        else:
            pieces, out = (), engine.generate(model, inputs, **cell.options | more)
    return DecodingLoop(out, torch.get_rng_state(), tuple(one.forwards for one in found), pieces)


@functools.cache
def undisturbed(cell: Cell) -> DecodingLoop:
    if "sink" in cell.cache:
        run(cell)  # how the model turns keys is tried once, in forwards that are none of a run
    return run(cell)


def points(cell: Cell, moment: str, layer: int, times: int, draft: bool) -> tuple[tuple, tuple]:
    """So many failures one after the other: what is tried again is another forward."""
    forwards = undisturbed(cell).forwards
    in_draft = draft and len(forwards) > 1
    last = forwards[in_draft] - 1
    first = {"prompt": 0, "first": min(1, last), "middle": (last + 1) // 2, "last": last}[moment]
    planned = tuple((first + time, layer) for time in range(times))
    return ((), planned) if in_draft else (planned, ())


def same(found: DecodingLoop, whole: DecodingLoop) -> list[str]:
    """The fallbacks that were taken. To try again changes nothing at all; the others compute in another order."""
    fallbacks = [taken.name for taken in found.out.stats.fallbacks]
    assert found.out.tokens == whole.out.tokens
    assert torch.equal(found.out.sequences, whole.out.sequences)
    assert found.out.finish_reasons == whole.out.finish_reasons
    assert found.out.stats.new_tokens == whole.out.stats.new_tokens
    assert found.out.stats.accepted_tokens == whole.out.stats.accepted_tokens
    assert torch.equal(found.random, whole.random)
    close = {"atol": 1e-3, "rtol": 1e-3} if set(fallbacks) - {"release"} else {"atol": 0, "rtol": 0}
    for name in FIELDS:
        torch.testing.assert_close(getattr(found.out, name), getattr(whole.out, name), **close)
    return fallbacks


def check(names: tuple[str, str, str], rows: int, times: int, **failure: Any) -> None:
    """The failures change nothing, or what there is can be continued where there are more of them than ways out."""
    cell = Cell(*names, rows)
    how = {name: failure.pop(name) for name in ("error", "late")}
    at = points(cell, times=times, **failure)
    try:
        fallbacks = same(run(cell, at, **how), undisturbed(cell))
    except engine.OutOfMemoryError as stopped:
        fallbacks = [taken.name for taken in stopped.partial.stats.fallbacks]
        check_goes_on(*cell.read(), stopped.partial, new_tokens=3)
        assert 0 < len(fallbacks) < times
    else:
        assert len(fallbacks) == times
    assert fallbacks[0] == "release"
    assert set(fallbacks) <= set(FALLBACKS)


def cells() -> list[tuple[str, str, str]]:
    """Strategies, kinds of models and backends that go together."""
    return [cell for cell in product(strategies.names(), MODELS, caches.names()) if suits(*cell[1:])]


@functools.cache
def suits(kind: str, cache: str) -> bool:
    try:
        caches.build(cache, tiny(MODELS[kind])[0].config, **needed(cache))
    except caches.UnsupportedLayerError:
        return False
    return True


# Every two values meet. A cell is tried with one of the cases, the next cell with the next one.
CASES = pairwise(
    moment=AT,
    layer=[0, 1, -1],
    times=[1, 3],
    late=[False, True],
    error=list(ERRORS),
    draft=[False, True],
    rows=[2, 3],
)


def planned() -> list:
    found = []
    for number, names in enumerate(cells()):
        case = CASES[number % len(CASES)]
        found.append(pytest.param(names, case, id="-".join([*names, *(str(value) for value in case.values())])))
    return found


@pytest.mark.parametrize(("names", "case"), planned())
def test_a_failure_changes_nothing(names, case):
    check(names, **case)


BACKENDS = ("dynamic", "static", "offloaded", "quantized", "none")


def in_turn(*sides: Any) -> list:
    """Every strategy, each with the next backend and the next of every side."""
    return [
        pytest.param(name, *(side[number % len(side)] for side in (BACKENDS, *sides)), id=name)
        for number, name in enumerate(strategies.names())
    ]


@pytest.mark.parametrize("moment", AT)
@pytest.mark.parametrize(("strategy", "cache", "kind"), in_turn(("full", "attention and states", "encoder-decoder")))
def test_what_was_shown_is_not_shown_again(strategy, cache, kind, moment):
    cell = Cell(strategy, kind, cache if suits(kind, cache) else "dynamic", rows=3)
    found = run(cell, points(cell, moment, layer=-1, times=2, draft=False), late=True, streams=True)
    same(found, undisturbed(cell))
    check_pieces(found.pieces, undisturbed(cell).out)


@pytest.mark.parametrize("moment", AT)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_without_a_way_out_what_there_is_goes_on_to_the_same_text(strategy, kind, moment):
    cell = Cell(strategy, kind, "dynamic")
    whole, at = undisturbed(cell).out, points(cell, moment, layer=1, times=1, draft=False)
    with pytest.raises(engine.OutOfMemoryError, match="on_oom") as stopped:
        run(cell, at, late=True, on_oom=())
    part = stopped.value.partial
    made = len(part.tokens[0])
    assert part.stats.fallbacks == ()
    assert [len(tokens) for tokens in part.tokens] == [made] * len(part.tokens)
    if strategy == "sampling" and made == 0:  # the rows are those of the prompts still
        return
    assert torch.equal(part.sequences, whole.sequences[:, : part.sequences.shape[1]])
    options = {"do_sample": strategy == "sampling", "max_new_tokens": NEW - made}
    assert torch.equal(again(*cell.read(), part, cache=part.cache, **options).sequences, whole.sequences)
