"""Memory is out for what is made of the scores, between two forwards: that is computed again, nothing else."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from architectures import randomised, tiny_model
from fallbacks import prompt
from helpers import needed
from references import draft_of, tiny
from strategy_cases import OPTIONS

import engine
import engine.request.request
import strategies
from engine.decoding.model_session import ModelSession
from engine.memory.peak_memory import PeakMemory
from engine.request import strategy

NEW = 6


def generated(name: str, cache: str = "dynamic", kind: str = "llama", **more):
    model, inputs = tiny(kind, 0, 3)
    draft = draft_of(kind) if name == "assisted" else None
    chosen = strategies.build(name, **OPTIONS.get(name, {}))
    torch.manual_seed(3)
    out = engine.generate(
        model,
        inputs,
        strategy=chosen,
        assistant_model=draft,
        cache=cache,
        cache_config=needed(cache),
        max_new_tokens=NEW,
        output_scores=True,
        **more,
    )
    return out, torch.get_rng_state()


@pytest.fixture(autouse=True)
def _quick():
    gc.freeze()  # a recovery collects garbage, and nothing that was there before is any


@pytest.fixture
def failing(monkeypatch):
    """What is attempted fails late, at these numbers."""
    whole = ModelSession.attempt

    def fail_at(*numbers):
        done = iter(range(10**6))

        def attempt(lane, work, *repeats):
            def fails():
                found = work()
                if found is not None and next(done) in numbers:  # None: room for ids
                    raise torch.OutOfMemoryError("no memory for scores")
                return found

            return whole(lane, fails, *repeats)

        monkeypatch.setattr(ModelSession, "attempt", attempt)

    return fail_at


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("number", [0, 2, 7])
@pytest.mark.parametrize("name", strategies.names())
def test_the_text_goes_on_as_if_nothing_had_been(name, number, failing):
    whole, state = generated(name)
    failing(number)
    out, after = generated(name)
    assert [one.name for one in out.stats.fallbacks] == ["release"]
    assert torch.equal(out.sequences, whole.sequences)
    assert all(torch.equal(one, other) for one, other in zip(out.scores, whole.scores, strict=True))
    assert torch.equal(after, state)


@pytest.mark.parametrize(
    ("name", "kind", "cache"),
    [
        ("greedy", "llama", "dynamic"),
        ("prompt_lookup", "llama", "static"),
        ("prompt_lookup", "mamba", "dynamic"),
        ("assisted", "llama", "none"),
        ("beam", "llama", "quantized"),
    ],
)
def test_only_rungs_that_can_help_are_taken(name, kind, cache, failing):
    """Pieces and parts are for forwards: scores are those of all rows."""
    whole, _ = generated(name, cache, kind)
    failing(5, 6)
    if cache == "none":
        with pytest.raises(engine.OutOfMemoryError, match="no memory for scores") as raised:
            generated(name, cache, kind)
        assert [one.name for one in raised.value.partial.stats.fallbacks] == ["release"]
        return
    out, _ = generated(name, cache, kind)
    assert [one.name for one in out.stats.fallbacks] == ["release", "offload"]
    assert torch.equal(out.sequences, whole.sequences)


def test_with_guidance(failing):
    model = tiny_model("llama")
    whole = engine.generate(model, prompt(), guidance_scale=2.0, max_new_tokens=NEW)
    failing(0, 1)
    out = engine.generate(model, prompt(), guidance_scale=2.0, max_new_tokens=NEW)
    assert [one.name for one in out.stats.fallbacks] == ["release", "offload"]
    assert torch.equal(out.sequences, whole.sequences)


def test_a_processor_that_wrote_into_the_scores_is_not_asked_again():
    """What it did would be done twice."""
    asked = []

    def process(ids, scores):
        asked.append(ids.shape[1])
        scores *= 0.5
        if ids.shape[1] == 42:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scores

    with pytest.raises(engine.OutOfMemoryError, match="after 2 new tokens") as raised:
        engine.generate(tiny_model("llama"), prompt(), max_new_tokens=NEW, logits_processor=[process])
    assert asked == [40, 41, 42]
    assert raised.value.partial.stats.fallbacks == ()


# How much is needed: the plan and the run go by the same numbers.

ROWS, VOCABULARY = 4, 30_000


@functools.cache
def wide_model():
    small = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=None)
    return randomised("LlamaConfig", dict(vocab_size=VOCABULARY, max_position_embeddings=64) | small)


def again(batch, ids):
    """5, 6, 7 over and over: all that is proposed is accepted."""
    return [5 + (int(ids[-1]) - 4) % 3]


class Copies(PeakMemory):
    """How many tensors of [rows, vocabulary] float32 numbers are there at most."""

    def most_copies(self, rows: int) -> float:
        return self.most / (rows * VOCABULARY * 4)


@pytest.mark.parametrize(
    ("name", "options", "processed"),
    [
        ("greedy", {}, {}),
        ("greedy", {}, {"repetition_penalty": 1.2}),
        ("sampling", {}, {"top_k": 0}),
        ("sampling", {}, {"top_k": 20, "temperature": 0.7}),
        ("sampling", {}, {"top_k": 0, "top_p": 0.9}),
        ("beam", {"num_beams": 2}, {}),
        ("beam", {"num_beams": 2, "do_sample": True}, {"top_k": 0}),
        ("diverse_beam", {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, {}),
        ("contrastive", {"top_k": 2}, {}),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 3}, {"prefix_allowed_tokens_fn": again}),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 3, "do_sample": True}, {"top_k": 0}),
        (
            "prompt_lookup",
            {"prompt_lookup_num_tokens": 3, "do_sample": True},
            {"top_k": 0, "prefix_allowed_tokens_fn": again},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_no_step_needs_more_than_its_strategy_says(name, options, processed, monkeypatch):
    """The plan counts them."""
    model, chosen = wide_model(), strategies.build(name, **options)
    ids = torch.tensor([[5, 6, 7, 5, 6]] * ROWS)
    rows, counted = ROWS * chosen.needs.rows_per_prompt, []
    real = strategy.score_copies

    def count(*given):
        counted.append(real(*given))
        return counted[-1]

    monkeypatch.setattr(engine.request.request, "score_copies", count)
    with Copies(model) as live:
        config = engine.EngineConfig(linears="default")  # the measurement of the others takes memory
        engine.Generator(model, config=config).generate(ids, strategy=chosen, max_new_tokens=5, **processed)
    found = live.most_copies(rows)
    assert found <= counted[0] + 0.5
    # Not many more are counted than there are. Of those that draws make inside of torch nothing is seen here, and what
    # is drawn freely is never found in the text before.
    is_free = name == "prompt_lookup" and chosen.samples and "prefix_allowed_tokens_fn" not in processed
    least = 2 if is_free else counted[0] - (2 if chosen.samples else 1)
    assert found >= least - 0.5


@pytest.mark.parametrize("records", [False, True])
def test_groups_of_beams_are_put_together_only_where_scores_are_asked_for(records, monkeypatch):
    together, attempted = [], []
    whole, stack = ModelSession.attempt, torch.stack

    def attempt(lane, work, *repeats):
        attempted.append(work)
        try:
            return whole(lane, work, *repeats)
        finally:
            attempted.pop()

    def stacked(tensors, dim=0):
        together.extend([bool(attempted)] if tensors[0].shape[-1] == VOCABULARY else [])
        return stack(tensors, dim)

    monkeypatch.setattr(ModelSession, "attempt", attempt)
    monkeypatch.setattr(torch, "stack", stacked)
    options = {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "output_scores": records}
    engine.generate(wide_model(), torch.tensor([[5, 6, 7]]), max_new_tokens=3, **options)
    assert together == [True] * (3 if records else 0)


def test_beams_keep_no_scores_that_are_not_asked_for():
    model = wide_model()
    ids = torch.tensor([[5, 6, 7]] * ROWS)
    most = []
    for new in (4, 12):
        with Copies(model) as live:
            engine.generate(model, ids, num_beams=2, max_new_tokens=new, do_sample=False)
        most.append(live.most_copies(2 * ROWS))
    assert most[1] <= most[0] + 0.5


def test_the_plan_counts_what_the_run_counts():
    model = wide_model()
    word = ROWS * VOCABULARY * 4
    asked = {"prompt_tokens": 5, "max_new_tokens": 4, "cache": "dynamic", "batch_size": ROWS}
    copies = [
        engine.plan(model, **asked, **more).logits_bytes / word
        for more in ({}, {"do_sample": True}, {"num_beams": 2}, {"num_beams": 2, "do_sample": True})
    ]
    assert copies == [2, 5, 2 * 3, 2 * 7]
