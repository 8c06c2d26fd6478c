"""Every strategy on every backend and kind of model: found out by doing it.

`UPDATE_DOCS=1 pytest -m slow` writes the table anew.
"""

import functools
import re
from itertools import product

import pytest
import torch
from helpers import needed
from pages import check_generated
from references import draft_of, tiny
from resuming import check_goes_on
from strategy_cases import LOSSY, MODELS, OPTIONS, REFUSALS

import caches
import engine
import strategies
from strategies import Beam, Contrastive, DiverseBeam, Sampling
from strategies.operations import needs_of

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 8
REMEDY = r"[Uu]se |leave|[Gg]ive|choose|[Gg]enerate with|cache='"


def run(
    strategy: str, kind: str, cache: str, config: engine.EngineConfig | None = None, **options
) -> engine.Generation:
    model, inputs = tiny(MODELS[kind])
    torch.manual_seed(4)
    chosen = strategies.build(strategy, **OPTIONS.get(strategy, {}))
    draft = draft_of(MODELS[kind]) if needs_of(chosen).draft else None
    return engine.Generator(model, config=config).generate(
        inputs, cache=cache, cache_config=options, strategy=chosen, assistant_model=draft, max_new_tokens=NEW
    )


@functools.cache
def expected(strategy: str, kind: str) -> torch.Tensor:
    return run(strategy, kind, "none").sequences


@functools.cache
def outcome(strategy: str, kind: str, cache: str) -> engine.Generation | str:
    """What has the text of no cache; else the refusal."""
    try:
        out = run(strategy, kind, cache, **needed(cache))
    except REFUSALS as refusal:
        return str(refusal)
    assert torch.equal(out.sequences, expected(strategy, kind))
    return out


def cells(names) -> list:
    return [pytest.param(*cell, id="-".join(cell)) for cell in product(strategies.names(), MODELS, names)]


@pytest.mark.parametrize(("strategy", "kind", "cache"), cells(caches.names()))
def test_the_text_is_that_of_no_cache_and_goes_on_or_is_refused_with_a_remedy(strategy, kind, cache):
    """Whatever rows and tokens were tried and taken back; windows and columns read little again."""
    out = outcome(strategy, kind, cache)
    if isinstance(out, str):
        assert re.search(REMEDY, out)
        others = [outcome(other, kind, cache) for other in strategies.names()]
        assert all(isinstance(other, str) for other in others)  # no matter of the strategy
    elif out.cache is not None:
        rest = check_goes_on(*tiny(MODELS[kind]), out)
        if kind in ("full", "window", "full and windows"):
            assert rest.stats.prompt_tokens <= len(out.sequences) * NEW


@pytest.mark.covering("values")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("strategy", strategies.names())
def test_a_prompt_in_pieces(strategy, kind):
    config = engine.EngineConfig(prefill_chunk_tokens=2)
    assert torch.equal(run(strategy, kind, "dynamic", config).sequences, expected(strategy, kind))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategies.names())
def test_compiled_steps(strategy):
    torch._dynamo.reset()
    config = engine.EngineConfig(compile="aot_eager")
    for _ in range(2):
        assert torch.equal(run(strategy, "full", "static", config).sequences, expected(strategy, "full"))


@pytest.mark.parametrize(("strategy", "kind", "cache"), cells(LOSSY))
def test_what_changes_the_text_has_its_shape_all_the_same(strategy, kind, cache):
    try:
        out = run(strategy, kind, cache, **LOSSY[cache])
    except REFUSALS as error:
        refusal = str(error)
        out = None
    if out is None:
        assert re.search(REMEDY, refusal)
        return
    assert out.sequences.shape == expected(strategy, kind).shape
    assert torch.equal(out.sequences[:, :-NEW], expected(strategy, kind)[:, :-NEW])
    assert out.finish_reasons == ["length"] * len(out.sequences)
    assert out.cache.total_tokens <= out.sequences.shape[1] - 1


@pytest.mark.parametrize("strategy", strategies.names())
def test_a_lossy_cache_does_change_a_text(strategy):
    """Else the test above would not test what it says."""
    outs = [run(strategy, "full", cache, **options).sequences for cache, options in LOSSY.items()]
    assert any(not torch.equal(out, expected(strategy, "full")) for out in outs)


def table() -> str:
    """Which strategies give the text of no cache, by backend and kind of model."""
    lines = ["| cache | " + " | ".join(MODELS) + " |", "|---|" + ":-:|" * len(MODELS)]
    for cache in caches.names():
        row = []
        for kind in MODELS:
            worked = [name for name in strategies.names() if not isinstance(outcome(name, kind, cache), str)]
            row.append("all" if len(worked) == len(strategies.names()) else ", ".join(worked) or "-")
        lines.append(f"| `{cache}` | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_documentation_states_which_strategies_work():
    found = table()
    assert "| `dynamic` |" + " all |" * len(MODELS) in found
    check_generated("strategies", found)


def test_wrong_objects_cannot_be_made():
    for strategy, options in (
        (Beam, {"num_return_sequences": 5}),
        (Beam, {"num_beams": 1}),
        (Beam, {"early_stopping": "soon"}),
        (DiverseBeam, {"diversity_penalty": 1.0, "num_beam_groups": 3}),
        (DiverseBeam, {"diversity_penalty": -1.0}),
        (Contrastive, {"penalty_alpha": 0.0}),
        (Sampling, {"num_return_sequences": 0}),
    ):
        with pytest.raises(engine.ConfigError, match=f"{strategy.name}: .*{next(reversed(options))}"):
            strategy(**options)


def test_what_is_said_counts_even_where_it_is_the_default_of_transformers():
    model, inputs = tiny("llama")
    out = engine.generate(model, inputs, penalty_alpha=0.6, top_k=50, max_new_tokens=NEW)
    other = engine.generate(model, inputs, strategy=Contrastive(top_k=50), max_new_tokens=NEW)
    fewer = engine.generate(model, inputs, strategy="contrastive", max_new_tokens=NEW)
    assert torch.equal(out.sequences, other.sequences)
    assert not torch.equal(out.sequences, fewer.sequences)
    many = engine.generate(model, inputs, strategy=Contrastive(top_k=500), max_new_tokens=NEW)  # all there are
    every = engine.generate(model, inputs, strategy=Contrastive(top_k=101), max_new_tokens=NEW)
    assert torch.equal(many.sequences, every.sequences)


def test_several_texts_of_a_strategy_chosen_by_name():
    model, inputs = tiny("llama")
    for name in ("beam", "sampling"):
        out = engine.generate(model, inputs, strategy=name, num_return_sequences=3, max_new_tokens=NEW)
        assert len(out.sequences) == 6
