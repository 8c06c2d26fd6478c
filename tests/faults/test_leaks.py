"""What a call used is free again once its result is gone: at once, without the garbage collector, and for good."""

import gc
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest
import torch
from architectures import ARCHITECTURES, prompt, randomised, tiny_model
from leaks import ENDINGS, AtStep, alive, call, fails, out_of_memory
from places import SUPPORT
from references import draft_of
from strategy_cases import NAMES

import caches
import engine

MOST_BYTES = 4 * 2**20
AOT_EAGER = engine.EngineConfig(cache="static", compile="aot_eager")


def left_by(act) -> Counter:
    """What is alive after `act` that was not before, while the collector is off."""
    act()  # for what is made once
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        act()
        return alive()
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    logging.disable(logging.WARNING)  # else pytest keeps what was told of memory that was out
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("cache", caches.names())
def test_every_cache_goes_with_its_result(cache):
    kind = {"encoder_decoder": "encoder-decoder", "mamba": "states", "hybrid": "full and windows"}.get(cache, "full")
    assert not left_by(lambda: [call(ENDINGS[1], strategy, kind, cache) for strategy in ("greedy", "beam")])


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_however_a_run_ends(ending):
    assert not left_by(lambda: [call(ending, strategy, "full and windows", "dynamic") for strategy in NAMES])


def test_requests_of_a_batch_go_when_they_end_not_with_the_batch():
    generator, prompts = engine.Generator(tiny_model("llama")), [[5, 6, 7 + number] for number in range(12)]
    seen = []

    def few_at_once():
        for request in generator.generate_many(prompts, max_new_tokens=3, slots=2):
            seen.append((request.error, alive()["DecodingLoop"]))

    left_by(few_at_once)
    errors, loops = zip(*seen[len(prompts) :], strict=True)
    assert set(errors) == {None}
    assert max(loops) <= 3  # those of two slots, and the one that is about to begin


def test_requests_that_were_cancelled_keep_no_caches():
    generator, prompts = engine.Generator(tiny_model("llama")), [[5, 6, 7 + number] for number in range(6)]
    ended = []

    def cancelled():
        ended[:] = generator.generate_many(
            [{"prompt": ids, "cancellation": AtStep()} for ids in prompts], max_new_tokens=40, slots=6
        )

    left = left_by(cancelled)
    assert {type(request.error) for request in ended} == {engine.GenerationCancelled}
    assert left["DecodingLoop"] == 0
    assert all(request.error.__traceback__ for request in ended)  # lines of code stay


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError, engine.InputError])
def test_an_error_that_is_dropped(interrupt):
    def stop(ids, scores):
        if ids.shape[1] == 15:
            raise interrupt("enough")
        return scores

    def act():
        with suppress(KeyboardInterrupt, engine.GenerationInterrupted):
            engine.generate(tiny_model("llama"), prompt(), logits_processor=[stop])

    assert not left_by(act)


def test_what_a_result_keeps():
    """Not the run: its tokens and its cache."""
    model, kept = tiny_model("llama"), []
    assert set(left_by(lambda: kept.append(engine.generate(model, prompt())))) >= {"Generation", "Cache", "Tensor"}
    found = left_by(lambda: kept.append(engine.generate(model, prompt())))
    assert not {"DecodingLoop", "ModelSession", "Driver", "Request", "StreamBuffer"} & set(found)


def in_another_process(*arguments) -> dict:
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(SUPPORT / "leaks.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_200_calls_leave_nothing():
    found = in_another_process("200")
    assert set(found["made"]) == {
        "done",
        "GenerationCancelled",
        "GenerationInterrupted",
        "InvalidLogitsError",
        "OptionError",
        "OutOfMemoryError",
    }
    assert not found["alive"]
    first, *rest = found["objects"][1:]
    assert rest == [first] * len(rest)
    assert found["resident_bytes"][-1] - found["resident_bytes"][0] < MOST_BYTES


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_leak_would_be_seen():
    found = in_another_process("200", "leaks")
    assert found["alive"]["Cache"] > 200
    assert found["objects"][-1] > found["objects"][1] + 1000
    assert found["resident_bytes"][-1] - found["resident_bytes"][0] > 2 * MOST_BYTES


# What a generator keeps between calls


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_compiled_steps_are_counted_and_released():
    torch._dynamo.reset()
    name, arguments = ARCHITECTURES["llama"]
    model, inputs = randomised(name, arguments | {"num_hidden_layers": 1}), prompt()
    whole = engine.generate(model, inputs).tokens
    generator, other = engine.Generator(model, config=AOT_EAGER), engine.Generator(model, config=AOT_EAGER)
    assert generator.pools == {"graphs": 0, "draft_bytes": 0, "prefix_bytes": 0}
    counts = []
    for _ in range(2):
        assert generator.generate(inputs).tokens == whole
        assert generator.pools["graphs"] == 1
        made = live_tensors()
        generator.release()
        assert generator.pools["graphs"] == 0
        counts.append(live_tensors())
        assert counts[-1] < made
    assert counts[0] == counts[1]
    assert other.generate(inputs).tokens == whole
    generator.release()
    assert other.pools["graphs"] == 1  # each has its own
    stream = other.stream(inputs)
    next(stream)
    other.release()
    list(stream)
    assert stream.result().tokens == whole  # it goes on
    del other, stream
    assert live_tensors() == counts[0]  # what can no longer be used is not kept


def test_a_draft_is_kept_until_it_is_released():
    model, draft, inputs = tiny_model("llama"), draft_of("llama"), prompt()
    generator = engine.Generator(model)
    first = generator.generate(inputs, assistant_model=draft)
    assert generator.pools == {"graphs": 0, "draft_bytes": draft.get_memory_footprint(), "prefix_bytes": 0}
    generator.release()
    assert generator.pools == {"graphs": 0, "draft_bytes": 0, "prefix_bytes": 0}
    assert generator.generate(inputs, assistant_model=draft).tokens == first.tokens


def test_what_failed_is_not_kept_by_the_generator():
    generator = engine.Generator(tiny_model("llama"))

    def act():
        for options in ({"logits_processor": [fails]}, {}):
            with suppress(engine.GenerationInterrupted), out_of_memory(generator.model, 2):
                generator.generate(prompt(), on_oom=[], **options)

    assert not left_by(act)
