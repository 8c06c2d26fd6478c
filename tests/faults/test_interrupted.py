"""Whatever raises in a run: the error names the step, has what there is, and its cache goes on."""

import re
from contextlib import contextmanager

import pytest
import torch
from covering import pairwise
from helpers import try_facts
from leaks import hidden_layer
from references import draft_of, exact, tiny
from resuming import NEW, again, check_goes_on
from strategy_cases import NAMES, asked
from streamers import Columns

import caches
import engine

pytestmark = pytest.mark.covering("values", "pairs")


class Fails:
    """Raises in its call with this number, from 1 on; else it says what `says` does."""

    def __init__(self, at, says=lambda *arguments: None):
        self.left, self.says = at, says

    def __call__(self, *arguments, **named):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no more of this")
        return self.says(*arguments)


class FailingStreamer(Columns):
    def __init__(self, at):
        super().__init__()
        self.fails = Fails(at)

    def put(self, value):
        self.fails()


def never(ids, scores):
    return torch.zeros(len(ids), dtype=torch.bool)


# What fails, as arguments of the call, in the step with this number of a strategy that asks once in each.
ARGUMENTS = {
    "a processor": lambda at: {"logits_processor": [Fails(at, lambda ids, scores: scores)]},
    "a criterion": lambda at: {"stopping_criteria": [Fails(at, never)]},
    "a constraint": lambda at: {"prefix_allowed_tokens_fn": Fails(2 * at - 1, lambda row, ids: range(101))},
    "a streamer": lambda at: {"streamer": FailingStreamer(at + 1)},
    "a layer": lambda at: {},
}


@contextmanager
def failing_layer(model, at):
    """In the middle of its forward, when some layers have written and others have not."""
    hook = hidden_layer(model).register_forward_hook(Fails(at))
    try:
        yield
    finally:
        hook.remove()


def interrupted(model, inputs, what, at, **options):
    try_facts(model)
    told = r"generation stopped after (\d+) new tokens? per row \(RuntimeError: no more of this\); what was generated"
    with (
        failing_layer(model, at if what == "a layer" else 0),
        pytest.raises(engine.GenerationInterrupted, match=told) as error,
    ):
        engine.generate(model, inputs, **{"max_new_tokens": NEW} | options | ARGUMENTS[what](at))
    part = error.value.partial
    assert str(error.value.__cause__) == "no more of this"
    assert int(re.search(told, str(error.value))[1]) == max(map(len, part.tokens))
    return part


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
@pytest.mark.parametrize("what", ARGUMENTS)
@pytest.mark.parametrize(("name", "cache"), [("llama", "static"), ("mistral", "dynamic"), ("jamba", "dynamic")])
def test_the_text_goes_on_as_if_nothing_had_happened(name, cache, what, late, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: late)
    model, inputs = tiny(name)
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    for at in (1, 4):
        part = interrupted(model, inputs, what, at, cache=cache)
        made = len(part.tokens[0])
        assert at - 1 <= made <= at + late  # read late, one more is on its way
        assert part.finish_reasons == [None, None]
        assert part.tokens == [tokens[:made] for tokens in whole.tokens]
        kept = {"cache": part.cache} if part.cache.total_tokens else {}
        assert torch.equal(again(model, inputs, part, **kept, max_new_tokens=NEW - made).sequences, whole.sequences)


KINDS = ["llama", "mistral", "gemma2", "jamba", "mamba", "t5"]
LOSSLESS = ["dynamic", "static", "offloaded", "offloaded_static", "none"]


@pytest.mark.parametrize("case", pairwise(strategy=NAMES, what=list(ARGUMENTS), name=KINDS, cache=LOSSLESS),
                         ids=lambda case: "-".join(case.values()))  # fmt: skip
def test_every_strategy_gives_rows_of_a_result(case):
    model, inputs = tiny(case["name"])
    options = asked(case["strategy"], model) | exact(case["cache"], model)
    if case["strategy"] == "assisted":
        options["assistant_model"] = draft_of(case["name"])
    if case["cache"] == "none" or case["name"] in ("t5", "mamba"):
        options.pop("cache_config")
    try:
        part = interrupted(model, inputs, case["what"], 3, **options | {"max_new_tokens": NEW})
    except caches.CacheError as refusal:
        pytest.skip(str(refusal))
    check_goes_on(model, inputs, part, new_tokens=4)


def test_time_that_is_up_ends_the_rows_with_a_cache_that_goes_on():
    model, inputs = tiny("llama")
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    part = engine.generate(model, inputs, max_new_tokens=NEW, max_time=0.0)
    assert part.finish_reasons == ["time", "time"]
    assert part.tokens == [tokens[:1] for tokens in whole.tokens]
    rest = again(model, inputs, part, cache=part.cache, max_new_tokens=NEW - 1)
    assert torch.equal(rest.sequences, whole.sequences)
