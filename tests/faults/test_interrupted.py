"""Whatever ends a run: the error says what and after which token, has what there is, and its cache goes on."""

import re
import signal
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

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

NAN, INF = float("nan"), float("inf")


class Handled(KeyboardInterrupt):
    """Of a handler that raises wherever it finds a run."""


class At:
    """Does something in its call with this number, from 1 on, and in those after it; else it says what `says` does."""

    def __init__(self, number, acts, says=lambda *arguments: None):
        self.left, self.acts, self.says = number, acts, says

    def __call__(self, *arguments, **named):
        self.left -= 1
        return self.acts(self.left, *arguments) if self.left <= 0 else self.says(*arguments)

    def is_set(self):
        return bool(self())


def raises(error, always=False):
    """Once, unless it is to be always."""

    def act(left, *arguments):
        if always or left == 0:
            raise error("no more of this")

    return act


def returns(value):
    """From then on, in place of the tensor that was given or computed."""
    return lambda left, *arguments: torch.full_like(arguments[-1], value)


def spoils(left, module, inputs, output):
    first = output[0] if isinstance(output, tuple) else output
    first[:] = NAN


class FailingStreamer(Columns):
    def __init__(self, at):
        super().__init__()
        self.put = At(at, raises(RuntimeError))


def processor(acts):
    return lambda at: {"logits_processor": [At(at, acts, lambda ids, scores: scores)]}


def press(left, ids, scores):
    if left == 0:
        signal.raise_signal(signal.SIGINT)
    return scores


FAILED = r"generation stopped after (\d+) new tokens? per row \(RuntimeError: no more of this\); what was generated"
UNSOUND = r"after (\d+) new tokens? per row: "


@dataclass(frozen=True)
class Cause:
    """What ends a run, in the step with a number of a strategy that asks once in each.

    arguments: of the call. layer: what a layer does, in the middle of a forward, when some have written and others
    have not. error, says: what the call raises.
    """

    arguments: Callable[[int], dict[str, Any]] = lambda at: {}
    layer: Callable | None = None
    error: type[BaseException] = engine.GenerationInterrupted
    says: str = FAILED


CAUSES = {
    "a processor": Cause(processor(raises(RuntimeError))),
    "an error of ours": Cause(
        processor(raises(engine.InputError, always=True)), says=r"after (\d+) new .*InputError: no more"
    ),
    "a criterion": Cause(
        lambda at: {"stopping_criteria": [At(at, raises(RuntimeError), lambda ids, _: torch.zeros(len(ids)).bool())]}
    ),
    "a constraint": Cause(
        lambda at: {"prefix_allowed_tokens_fn": At(2 * at - 1, raises(RuntimeError), lambda row, ids: range(101))}
    ),
    "a streamer": Cause(lambda at: {"streamer": FailingStreamer(at + 1)}),
    "a layer": Cause(layer=raises(RuntimeError)),
    "no memory": Cause(
        lambda at: {"on_oom": []}, raises(torch.OutOfMemoryError), engine.OutOfMemoryError, r"after (\d+) .*on_oom"
    ),
    "cancellation": Cause(
        lambda at: {"cancellation": At(at, lambda left: True)}, None, engine.GenerationCancelled, r"after (\d+) new tok"
    ),
    "Ctrl-C": Cause(processor(press), None, engine.UserInterrupt, "stopped with Ctrl-C"),
    "a handler": Cause(layer=raises(Handled), error=Handled, says="no more of this"),
    "NaN in a layer": Cause(
        layer=spoils, error=engine.InvalidLogitsError, says=UNSOUND + r"the model returned \d+ NaN among \d+ scores"
    ),
    "NaN by a processor": Cause(processor(returns(NAN)), None, engine.InvalidLogitsError, UNSOUND),
    "nothing is left": Cause(processor(returns(-INF)), None, engine.InvalidLogitsError, UNSOUND),
}


@contextmanager
def broken(model, acts, at):
    hook = hidden_layer(model).register_forward_hook(At(at, acts))
    try:
        yield
    finally:
        hook.remove()


def interrupted(model, inputs, cause, at, **options):
    """The partial result."""
    try_facts(model)
    cause = CAUSES[cause]
    options = {"max_new_tokens": NEW} | options | cause.arguments(at)
    with broken(model, cause.layer, at) if cause.layer else nullcontext(), pytest.raises(cause.error) as error:
        engine.generate(model, inputs, **options)
    part = error.value.partial
    said = re.search(cause.says, str(error.value))
    assert said, str(error.value)
    assert not said.groups() or int(said[1]) == max(map(len, part.tokens))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if cause.says is FAILED:
        assert str(error.value.__cause__) == "no more of this"
    return part


CELLS = [("llama", "static"), ("mistral", "dynamic"), ("jamba", "dynamic"), ("mamba2", "static"), ("lfm2", "dynamic")]
CELLS += [("falcon_h1", "static"), ("bart", "static"), ("t5", "dynamic")]


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(("name", "cache"), CELLS)
def test_the_text_goes_on_as_if_nothing_had_happened(name, cache, cause, late, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: late)
    model, inputs = tiny(name)
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    for at in (1, 4, NEW):
        part = interrupted(model, inputs, cause, at, cache=cache)
        made = len(part.tokens[0])
        assert at - 1 <= made <= at + late  # read late, one more is on its way
        if made < NEW:
            assert part.finish_reasons == [None, None]
        assert part.tokens == [tokens[:made] for tokens in whole.tokens]
        kept = {"cache": part.cache} if part.cache.total_tokens else {}
        rest = again(model, inputs, part, **kept, max_new_tokens=max(1, NEW - made))
        assert torch.equal(rest.sequences[:, : whole.sequences.shape[1]], whole.sequences)


KINDS = ["llama", "mistral", "gemma2", "jamba", "mamba", "t5"]
LOSSLESS = ["dynamic", "static", "offloaded", "offloaded_static", "none"]
CASES = pairwise(strategy=NAMES, cause=list(CAUSES), name=KINDS, cache=LOSSLESS, late=[False, True])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_strategy_gives_rows_of_a_result(case, monkeypatch):
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: case["late"])
    model, inputs = tiny(case["name"])
    options = asked(case["strategy"], model) | exact(case["cache"], model)
    if case["strategy"] == "assisted":
        options["assistant_model"] = draft_of(case["name"])
    if case["cache"] == "none" or case["name"] in ("t5", "mamba"):
        options.pop("cache_config")
    try:
        part = interrupted(model, inputs, case["cause"], 3, **options | {"max_new_tokens": NEW})
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
