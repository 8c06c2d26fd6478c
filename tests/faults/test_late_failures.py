"""What fails between two steps, or as a run ends: its tokens are kept, and no cache holds other rows than they are."""

import logging

import pytest
import torch
from references import tiny
from resuming import NEW, check_goes_on
from streamers import Columns
from transformers import LogitsProcessor

import caches
import engine
from engine.decoding.feeder import Feeder
from engine.decoding.model_session import ModelSession
from engine.decoding.stopping import Cancellation
from engine.kernels.linear_backend import has_onednn
from engine.memory.fallbacks import Recovery
from strategies import Greedy

BEAMS = {"num_beams": 3, "do_sample": False, "max_new_tokens": NEW}


class Pressed(KeyboardInterrupt):
    """Of a handler that raises wherever it comes."""


@pytest.mark.parametrize("number", [1, 2, 4])
def test_interrupted_as_the_cache_has_chosen_rows(number, monkeypatch):
    model, inputs = tiny("llama")
    select_in_cache, calls = Feeder.select_in_cache, []

    def interrupted(feeder, select):
        select_in_cache(feeder, select)
        calls.append(1)
        if len(calls) == number:
            raise Pressed

    with monkeypatch.context() as patch:
        patch.setattr(Feeder, "select_in_cache", interrupted)
        with pytest.raises(Pressed) as stopped:
            engine.generate(model, inputs, **BEAMS)
    part = stopped.value.partial
    assert part.cache.total_tokens == 0
    check_goes_on(model, inputs, part)


def ends_with(monkeypatch, error, model, inputs, **options):
    """A guided run whose cache cannot give up the rows of the other texts."""
    rows = caches.Cache.select_rows

    def fails(cache, index):
        if len(index) == 2:
            raise error
        rows(cache, index)

    with monkeypatch.context() as patch:
        patch.setattr(caches.Cache, "select_rows", fails)
        return engine.generate(model, inputs, guidance_scale=1.7, max_new_tokens=NEW, **options)


@pytest.mark.parametrize("lead", [0, 9])
def test_a_guided_text_is_not_lost_with_its_cache(lead, monkeypatch):
    model, inputs = tiny("llama")
    columns = inputs["input_ids"].shape[1] + lead if lead else 4
    options = {"negative_prompt_ids": torch.arange(20, 20 + columns)[None]}
    whole = engine.generate(model, inputs, guidance_scale=1.7, max_new_tokens=NEW, **options)
    out = ends_with(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), model, inputs, **options)
    assert out.tokens == whole.tokens
    assert out.cache.total_tokens == 0


def test_a_guided_run_ends_the_keeping_of_the_past(monkeypatch):
    model, inputs = tiny("llama")
    ended, end = [], ModelSession.end
    monkeypatch.setattr(ModelSession, "end", lambda lane: ended.append(1) or end(lane))
    options = {"guidance_scale": 1.7, "max_new_tokens": 2}
    for columns in (4, 30):
        engine.generate(model, inputs, negative_prompt_ids=torch.arange(20, 20 + columns)[None], **options)
    assert len(ended) == 2


@pytest.fixture
def pressed_twice(monkeypatch):
    """Ctrl-C as beams change places, and another one while their rows become those of a result."""
    rows, calls = ModelSession.select_rows, []

    def press(lane, index):
        calls.append(1)
        if len(calls) > 2:
            raise Pressed
        rows(lane, index)

    monkeypatch.setattr(ModelSession, "select_rows", press)


@pytest.mark.usefixtures("pressed_twice")
def test_a_run_that_was_given_up_has_no_result():
    model, inputs = tiny("llama")
    stream = engine.stream(model, inputs, **BEAMS)
    with pytest.raises(Pressed):
        list(stream)
    assert stream.given_up
    with pytest.raises(engine.EngineError, match="the run has no result"):
        stream.result()


@pytest.mark.usefixtures("pressed_twice")
def test_the_command_prints_nothing_of_it(cli):
    done = cli(["generate", "def", "--num-beams", "3", "--max-new-tokens", "4"])
    assert (done.exit_code, done.stdout) == (130, "")


class FailsAtItsEnd:
    """Greedy search whose flow cannot be closed."""

    name, samples = "fails at its end", False

    def flow(self, task):
        try:
            yield from Greedy().flow(task)
        finally:
            raise ZeroDivisionError


def test_a_flow_that_cannot_be_closed_leaves_no_open_step(monkeypatch):
    model, inputs = tiny("llama")
    passed_on = []
    monkeypatch.setattr(Cancellation, "pass_on", lambda cancellation: passed_on.append(cancellation))
    cache, streamer = caches.build("dynamic", model.config), Columns()
    stream = engine.stream(model, inputs, strategy=FailsAtItsEnd(), cache=cache, streamer=streamer, max_new_tokens=NEW)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.close()
    assert (streamer.ends, len(passed_on)) == (1, 1)
    check_goes_on(model, inputs, stream.result())


# Drawn once more.


class Draws:
    """A processor that draws, and fails once, in its call for the second new token."""

    def __init__(self, fails):
        self.fails, self.drawn = fails, []

    def __call__(self, ids, scores):
        self.drawn.append(torch.rand(()).item())
        if self.fails and len(self.drawn) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_draws_the_same_again(do_sample):
    model, inputs = tiny("llama")
    found = []
    for fails in (False, True):
        torch.manual_seed(3)
        processor = Draws(fails)
        out = engine.generate(model, inputs, logits_processor=[processor], do_sample=do_sample, max_new_tokens=NEW)
        found.append((out.tokens, processor.drawn))
    (whole, drawn), (tokens, again_drawn) = found
    assert tokens == whole
    assert again_drawn == [*drawn[:2], *drawn[1:]]


def test_what_others_have_drawn_meanwhile_is_not_drawn_again(monkeypatch):
    model, inputs = tiny("llama")
    apply_next, others = Recovery.apply_next, []

    def draws(recovery, lane, error):
        others.append(torch.rand(()).item())  # as another thread may
        apply_next(recovery, lane, error)

    monkeypatch.setattr(Recovery, "apply_next", draws)
    torch.manual_seed(3)
    processor = Draws(True)
    engine.generate(model, inputs, logits_processor=[processor], max_new_tokens=NEW)
    assert len(others) == 1
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(NEW + 2)]
    assert [*processor.drawn[:2], *others, *processor.drawn[2:]] == expected


# Linear layers.


class OneDNNFails:
    """Fails in the first forward of a model, with an error that does not say why."""

    def __init__(self, model):
        self.left = 1
        self.hook = model.register_forward_pre_hook(self.fail)

    def fail(self, module, inputs):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("could not create a primitive")

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.hook.remove()


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
def test_the_end_of_routes_is_told(caplog):
    model, inputs = tiny("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    whole = generator.generate(inputs, max_new_tokens=NEW)
    assert whole.stats.linears != "torch"
    with OneDNNFails(model), caplog.at_level(logging.WARNING, "engine"):
        out = generator.generate(inputs, max_new_tokens=NEW)
    assert out.tokens == whole.tokens
    assert (out.stats.linears, out.stats.fallbacks) == ("torch", ())
    assert "goes on with torch's own linear layers" in caplog.text
    assert generator.generate(inputs, max_new_tokens=NEW).stats.linears == whole.stats.linears


def test_without_routes_the_error_is_told_as_it_is():
    model, inputs = tiny("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(linears="default"))
    with OneDNNFails(model), pytest.raises(engine.GenerationInterrupted, match="could not create a primitive"):
        generator.generate(inputs, max_new_tokens=NEW)


class Exhausting(LogitsProcessor):
    """Has no memory for the scores of a step, once."""

    def __init__(self, step):
        self.left = step

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory for scores")
        return scores


@pytest.mark.parametrize("step", [1, 2, 5])
def test_what_a_joined_step_has_read_is_not_parked_before_it_counts(step):
    """The first request asks for room while the others do not have the outputs of the same step yet."""
    gen = engine.Generator(tiny("llama")[0])
    prompts = [torch.arange(5 + index, 14 + index)[None] for index in range(3)]
    expected = [gen.generate(prompt, max_new_tokens=NEW).tokens for prompt in prompts]
    with gen.batch(reads_first=True) as batch:
        first = batch.submit(prompts[0], max_new_tokens=NEW, logits_processor=[Exhausting(step)])
        others = [batch.submit(prompt, max_new_tokens=NEW) for prompt in prompts[1:]]
        assert [one.result().tokens for one in (first, *others)] == expected
