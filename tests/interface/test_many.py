"""Many prompts at once: every text is that of its request alone, whatever runs beside it."""

import asyncio
import copy
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    MORE_ARCHITECTURES,
    RARE_ARCHITECTURES,
    STATE_ARCHITECTURES,
    ids_of,
    randomised,
    tiny_model,
)
from arrivals import BACKENDS, STRATEGIES, run
from covering import graded
from injection import failing_at_random

import caches
import engine
from caches.platform.out_of_memory import Exhausted
from engine.decoding.model_session import ModelSession
from engine.model import joined_step
from engine.serving.batch_request import BatchRequest
from engine.serving.many import generate_many
from engine.serving.scheduler import Scheduler

NEW = 6
KINDS = (
    "llama",
    "mistral",
    "gemma2",
    "llama4_text",
    "gpt2",
    "bloom",
    "deepseek_v3",
    "lfm2",
    "jamba",
    "mamba",
    "qwen3_next",
)
TOKENS = (3, 21, 9, 14, 1)
ALL = ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES
FEW = [*ARCHITECTURES, *STATE_ARCHITECTURES, "bloom", "deepseek_v32"]


def chosen(backend):
    sized = {"max_cache_len": 64} if backend in ("static", "offloaded_static") else {}
    return {"cache": backend, "cache_config": BACKENDS[backend] | sized}


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("slots", [2, 5, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_are_those_of_each_prompt_alone(backend, strategy, kind, slots):
    """Every second prompt is continued greedily with the default cache, beside those of this backend and strategy."""
    if (backend, kind) == ("quantized", "deepseek_v3"):
        pytest.skip("rounding, which differs with the number of rows, turns a code into the next one")
    gen = engine.Generator(tiny_model(kind))
    asked = [
        {"prompt": ids_of(tokens, seed), "max_new_tokens": NEW + seed, "seed": seed}
        | (chosen(backend) | STRATEGIES[strategy] if seed % 2 else {})
        for seed, tokens in enumerate(TOKENS)
    ]
    expected = []
    for one in asked:
        arguments = dict(one)
        try:
            expected.append(gen.generate(arguments.pop("prompt"), **arguments).tokens)
        except (caches.CacheError, engine.EngineError) as refused:
            expected.append(type(refused))
    found = {request.index: request for request in gen.generate_many(asked, slots=slots)}
    assert sorted(found) == list(range(len(asked)))
    for index, texts in enumerate(expected):
        if isinstance(texts, type):
            assert type(found[index].error) is texts
        else:
            assert found[index].result().tokens == texts


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("first", ["sliding_window", "dynamic"])
def test_rows_of_one_length_may_keep_different_slots(kind, first):
    """No row has padding, and yet the one with a window has fewer slots. Each begins a step after the one before."""
    gen, orders = engine.Generator(tiny_model(kind)), {"sliding_window": ("sliding_window", "dynamic", "sink")}
    backends = orders.get(first, ("dynamic", "sink", "sliding_window"))
    draws = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "seed": 1}  # the largest score tells less
    requests = [{"prompt": ids_of(16 + seed, seed)} | draws | chosen(name) for seed, name in enumerate(backends)]
    if kind == "gpt2":  # learned positions cannot be moved
        requests = [one for one in requests if one["cache"] != "sink"]
    found = {one.index: one.result().tokens for one in gen.generate_many(requests)}
    for index, one in enumerate(requests):
        own = dict(one)
        assert found[index] == gen.generate(own.pop("prompt"), **own).tokens


class BrokenEvent:
    """Its process ends after some answers, and may come back."""

    def __init__(self, answers=0, comes_back=False):
        self.answers, self.comes_back = answers, comes_back

    def is_set(self):
        self.answers -= 1
        if self.answers == -1 or (self.answers < 0 and not self.comes_back):
            raise OSError("the process that held it has ended")
        return False


def test_an_event_that_fails_ends_its_own_request_alone():
    gen, parameters = engine.Generator(tiny_model("llama")), {"max_new_tokens": NEW}
    events = [None, threading.Event, BrokenEvent(), 5]
    with gen.batch(slots=2) as batch:
        found = [batch.submit(ids_of(5), cancellation=event, **parameters) for event in events]
        good = [one.result().tokens for one in (found[0], batch.submit(ids_of(5), **parameters))]
    assert good == [gen.generate(ids_of(5), **parameters).tokens] * 2
    for one, error, why in zip(
        found[1:],
        (engine.OptionError, engine.GenerationInterrupted, engine.OptionError),
        (
            "cancellation is the class Event",
            "the process that held it has ended",
            "cancellation is a int without is_set",
        ),
        strict=True,
    ):
        with pytest.raises(error, match=why):
            one.result()


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_event_that_fails_while_steps_are_joined(comes_back):
    gen, event = engine.Generator(tiny_model("llama")), BrokenEvent(20, comes_back)
    with gen.batch() as batch:
        broken = batch.submit(ids_of(5), max_new_tokens=100, cancellation=event)
        good = batch.submit(ids_of(9), max_new_tokens=40)
        with pytest.raises(engine.GenerationInterrupted, match="the process that held it has ended") as raised:
            broken.result()
        assert 1 < len(raised.value.partial.tokens[0]) < 30
        assert good.result().tokens == gen.generate(ids_of(9), max_new_tokens=40).tokens


def test_all_slots_are_taken_at_once():
    """Also by short texts, which end before slots that are taken one by one would be full."""
    gen = engine.Generator(tiny_model("llama"))
    scheduler = gen._scheduler(4, None, reads_first=True)
    ended = list(generate_many(scheduler, [ids_of(5, seed) for seed in range(12)], {"max_new_tokens": 4}, False))
    assert len(ended) == 12
    assert (scheduler.counts.row_steps, scheduler.counts.steps) == (12 * 3, 3 * 3)


def test_steps_are_joined():
    """All requests that decode take one step together: as many steps as the longest text has, not as all have."""
    gen = engine.Generator(tiny_model("llama"))
    with gen.batch(reads_first=True) as batch:
        requests = [batch.submit(ids_of(tokens, seed), max_new_tokens=20) for seed, tokens in enumerate((3, 30, 11, 7))]
    assert all(len(request.result().tokens[0]) == 20 for request in requests)
    assert batch.counts.steps < 30
    assert batch.counts.row_steps == 4 * 19
    assert not batch.counts.alone_steps


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in sorted(ALL) if name != "prophetnet"],
)
def test_every_architecture(name):
    """Its steps are joined, or it says why not; the texts are the same."""
    gen, asked = engine.Generator(tiny_model(name)), [ids_of(tokens, seed) for seed, tokens in enumerate((3, 12))]
    expected = [gen.generate(one, max_new_tokens=4).tokens for one in asked]
    with gen.batch(reads_first=True) as batch:
        requests = [batch.submit(one, max_new_tokens=4) for one in asked]
    assert [request.result().tokens for request in requests] == expected
    assert batch.counts.row_steps == (0 if batch.counts.why_alone else 2 * 3)


def test_a_joined_step_that_cannot_be_prepared_leaves_the_others_as_they_are(monkeypatch):
    gen, prepare, calls = engine.Generator(tiny_model("llama")), ModelSession.prepare, []
    asked = [ids_of(tokens) for tokens in (3, 5, 9)]
    expected = [gen.generate(one, max_new_tokens=8).tokens for one in asked]

    def fails_once(session, tokens):
        calls.append(session)
        if len(calls) == 8:  # the second of three requests: one is prepared, one is not
            raise Exhausted("this cache is larger than it may be")
        return prepare(session, tokens)

    monkeypatch.setattr(ModelSession, "prepare", fails_once)
    found = {one.index: one.result().tokens for one in gen.generate_many(asked, slots=3, max_new_tokens=8)}
    assert [found[index] for index in range(3)] == expected
    assert len(calls) > 8


def test_a_trial_of_a_joined_step_without_memory_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    gen, tried, trials = engine.Generator(randomised(*ARCHITECTURES["llama"])), joined_step._tried, []

    def fails_once(*arguments):
        trials.append(arguments)
        if len(trials) <= 2:
            raise MemoryError
        return tried(*arguments)

    monkeypatch.setattr(joined_step, "_tried", fails_once)
    whys = [gen.facts.why_not_joined for _ in range(102)]
    assert len(set(whys[:100])) == 1
    assert "the trial failed (MemoryError" in whys[0]
    assert whys[100:] == [None, None]
    assert len(trials) == 3


@pytest.mark.parametrize("seeds", graded([range(8)], [range(8, 26)], [range(26, 80)]), ids=len)
def test_random_histories(seeds):
    """Prompts arrive, are cancelled and fail, and memory is out in any layer: every request ends with its own text."""
    happened = run(seeds)
    assert happened["ended"] > 2 * len(seeds)
    assert happened["out of memory"] > len(seeds) / 3
    assert happened["failed as planned"] > len(seeds) / 6
    assert happened["joined steps"] > 2 * len(seeds)


UNFINISHED = {
    "generate_many": "requests = gen.generate_many(['a', {'prompt': 'b', 'max_new_tokens': 2}]); next(requests)",
    "batch": "batch = gen.batch(); request = batch.submit('a', max_new_tokens=2000); next(request.stream())",
    "an idle batch": "batch = gen.batch()",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", UNFINISHED.values(), ids=UNFINISHED)
def test_a_process_may_end_before_its_prompts(code):
    """The interpreter could not end what runs: that would abort the process."""
    begin = "import engine; gen = engine.Generator(engine.SHIPPED_MODEL)\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


class TestRequests:
    def test_results_come_as_they_end(self):
        gen = engine.Generator(tiny_model("llama"))
        asked = [{"prompt": ids_of(5), "max_new_tokens": new} for new in (12, 3, 7)]
        assert [request.index for request in gen.generate_many(asked)] == [1, 2, 0]

    def test_a_bad_prompt_has_its_error_in_its_place(self):
        gen = engine.Generator(tiny_model("llama"))
        asked = [ids_of(5), {"prompt": ids_of(5), "num_beams": 0}, "a text without a tokenizer", ids_of(4)]
        found = {request.index: request for request in gen.generate_many(asked, max_new_tokens=3)}
        assert isinstance(found[1].error, engine.OptionError)
        assert isinstance(found[2].error, engine.InputError)
        assert found[0].error is None
        assert found[3].new_tokens == 3
        with pytest.raises(engine.InputError):
            found[2].result()

    def test_prompts_are_read_as_there_is_room(self):
        gen, read = engine.Generator(tiny_model("llama")), []

        def endless():
            while True:
                read.append(len(read))
                yield ids_of(4, len(read))

        requests = gen.generate_many(endless(), slots=3, max_new_tokens=4)
        for _ in range(5):
            next(requests)
        requests.close()
        assert len(read) <= 12

    @pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
    def test_padded_prompts_of_states_are_read_at_once(self, name):
        gen = engine.Generator(tiny_model(name))
        ragged = [ids_of(40)[0].tolist(), ids_of(9)[0].tolist()]
        with gen.batch(piece_tokens=3) as batch:
            found = batch.submit(ragged, max_new_tokens=5)
        assert found.result().tokens == gen.generate(ragged, max_new_tokens=5).tokens

    def test_texts_that_are_ready_do_not_wait_for_a_slow_iterable(self):
        gen, at = engine.Generator(tiny_model("llama")), []

        def slow():
            for seed in range(4):
                time.sleep(0.3)
                at.append(seed)
                yield ids_of(4, seed)

        assert next(iter(gen.generate_many(slow(), max_new_tokens=2))).index == 0
        assert len(at) < 4

    def test_a_run_that_is_parked_takes_no_step(self, monkeypatch):
        """A joined step fails for another reason, then the first run is out of memory as it steps by itself."""
        gen, faults, held = engine.Generator(copy.deepcopy(tiny_model("llama"))), [], []
        steps, advance = gen._runner.step_together, Scheduler._advance

        def fails_once(*arguments):
            faults.append("joined")
            if len(faults) == 3:
                raise ValueError("an error of the joined step")
            return steps(*arguments)

        def out_of_memory_once(module, arguments):
            if len(faults) == 3:
                faults.append("memory")
                raise torch.OutOfMemoryError("out of memory")

        def watched(self, run, computed):
            advance(self, run, computed)
            held.extend(one.cache.device_bytes for one in self._runs if one.is_parked)

        monkeypatch.setattr(gen._runner, "step_together", fails_once)
        monkeypatch.setattr(Scheduler, "_advance", watched)
        gen.model.register_forward_pre_hook(out_of_memory_once)
        asked = [ids_of(9, seed) for seed in range(3)]
        found = {one.index: one.result().tokens for one in gen.generate_many(asked, max_new_tokens=8)}
        assert held
        assert not any(held)
        plain = engine.Generator(tiny_model("llama"))
        assert found == {index: plain.generate(one, max_new_tokens=8).tokens for index, one in enumerate(asked)}

    def test_time_begins_with_the_text(self):
        gen = engine.Generator(tiny_model("llama"))
        with gen.batch(slots=2) as batch:
            batch.submit(ids_of(4), max_new_tokens=80)
            for asked in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True, "seed": 1}):
                waiting = batch.submit(ids_of(5), max_new_tokens=4, max_time=0.15, eos_token_id=[], **asked)
                assert waiting.result().finish_reasons == ["length"] * waiting.result().sequences.shape[0]
                batch.submit(ids_of(4), max_new_tokens=80)

    def test_an_iterable_that_raises_loses_no_prompt_before(self):
        gen = engine.Generator(tiny_model("llama"))

        def broken():
            yield from (ids_of(4), ids_of(6))
            raise OSError("the file has ended")

        found = []
        with pytest.raises(OSError, match="the file has ended"):
            found.extend(gen.generate_many(broken(), slots=8, max_new_tokens=5))
        assert [request.new_tokens for request in found] == [5, 5]

    @pytest.mark.parametrize("one", ["import os", {"prompt": "import os"}, 7])
    def test_one_prompt_is_refused(self, one):
        with pytest.raises(engine.InputError, match="put it into a list"):
            engine.Generator(tiny_model("llama")).generate_many(one)

    def test_messages_are_those_that_were_submitted(self):
        gen = engine.Generator(engine.SHIPPED_MODEL)
        messages = [{"role": "user", "content": "import os"}]
        with gen.batch() as batch:
            batch.submit("def main():", max_new_tokens=40)
            request = batch.submit(messages, max_new_tokens=3)
            messages[0]["content"] = "another one"
        assert (
            request.result().tokens == gen.generate([{"role": "user", "content": "import os"}], max_new_tokens=3).tokens
        )

    def test_ctrl_c_says_where_the_texts_are(self):
        gen, found, calls = engine.Generator(tiny_model("llama")), [], []

        def press(ids, scores):
            calls.append(len(calls))
            if len(calls) == 4:
                signal.raise_signal(signal.SIGINT)
            return scores

        long = {"prompt": ids_of(9, 1), "max_new_tokens": 20, "logits_processor": [press]}
        with pytest.raises(KeyboardInterrupt, match="prompts that had ended were yielded") as stopped:
            found.extend(gen.generate_many([{"prompt": ids_of(3), "max_new_tokens": 2}, long]))
        assert not isinstance(stopped.value, engine.UserInterrupt)  # of one run, with its `partial`
        assert [len(request.result().tokens[0]) for request in found] == [2]
        assert len(calls) == 4

    def test_a_panic_of_a_library_is_the_error_of_its_request(self):
        """Such as Rust's, which are no `Exception`: a caller that catches those would wait for ever."""

        class Panic(BaseException):
            pass

        def panics(ids, scores):
            raise Panic("unwrap on None")

        gen = engine.Generator(tiny_model("llama"))
        with gen.batch() as batch:
            good = batch.submit(ids_of(5), max_new_tokens=8)
            bad = batch.submit(ids_of(9), max_new_tokens=8, logits_processor=[panics])
        assert len(good.result().tokens[0]) == 8
        with pytest.raises(engine.EngineError, match="Panic: unwrap on None") as raised:
            bad.result()
        assert isinstance(raised.value.__cause__, Panic)

    def test_cancelled_within_a_step(self):
        gen = engine.Generator(tiny_model("llama"))
        with gen.batch() as batch:
            request = batch.submit(ids_of(5), max_new_tokens=200)
            for number, _ in enumerate(request.stream(), 1):
                if number == 3:
                    request.cancel()
                    break
            with pytest.raises(engine.GenerationCancelled) as error:
                request.result(timeout=20)
        assert 3 <= len(error.value.partial.tokens[0]) < 100
        whole = gen.generate(ids_of(5), max_new_tokens=200).tokens[0]
        assert error.value.partial.tokens[0] == whole[: len(error.value.partial.tokens[0])]

    def test_a_batch_that_is_left_by_an_error_cancels(self):
        gen = engine.Generator(tiny_model("llama"))
        with gen.batch(slots=1) as batch:
            requests = [batch.submit(ids_of(5), max_new_tokens=150) for _ in range(3)]
            batch.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert all(isinstance(request.error, engine.EngineError) for request in requests)
        with pytest.raises(engine.EngineError, match="closed"):
            batch.submit(ids_of(5))

    def test_from_many_threads(self):
        gen, found = engine.Generator(tiny_model("llama")), {}
        with gen.batch(slots=4) as batch:

            def work(seed):
                time.sleep(seed / 200)
                found[seed] = batch.submit(ids_of(4 + seed, seed), max_new_tokens=5, do_sample=True, seed=seed).result()

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for seed, result in found.items():
            alone = gen.generate(ids_of(4 + seed, seed), max_new_tokens=5, do_sample=True, seed=seed)
            assert result.tokens == alone.tokens

    def test_a_task_that_is_cancelled_leaves_the_others(self):
        gen = engine.Generator(tiny_model("llama"))

        async def main():
            async with gen.batch() as batch:
                requests = [batch.submit(ids_of(5, seed), max_new_tokens=40) for seed in (0, 1)]
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(requests[0], 0.001)
                return await requests[1], await requests[0]

        assert all(len(result.tokens[0]) == 40 for result in asyncio.run(main()))

    def test_closed_in_the_middle_of_everything(self):
        """Prompts that are read, that decode and that wait: each of them ends."""
        gen = engine.Generator(tiny_model("llama"))
        scheduler = gen._scheduler(2, None, piece_tokens=3)
        requests = [BatchRequest(index, ids_of(20), {"max_new_tokens": 50}) for index in range(4)]
        for request in requests:
            scheduler.add(request)
        for _ in range(9):
            scheduler.turn()
        scheduler.close()
        assert [type(request.error) for request in requests] == [engine.GenerationCancelled] * 2 + [
            engine.EngineError
        ] * 2

    @pytest.mark.parametrize("cache", ["dynamic", "offloaded"])
    def test_a_prompt_that_is_parked_while_it_is_read_is_read_again(self, cache):
        gen = engine.Generator(tiny_model("llama"))
        request = BatchRequest(0, ids_of(23), {"max_new_tokens": 8} | chosen(cache))
        expected = gen.generate(request.inputs, **request.parameters).tokens
        scheduler = gen._scheduler(2, None, piece_tokens=3)
        scheduler.add(request)
        for turn in range(40):
            scheduler.turn()
            if turn in (2, 4):
                assert scheduler._runs[0].is_reading
                with torch.no_grad():
                    scheduler._runs[0].loop.session.park()
        assert request.result().tokens == expected

    @pytest.mark.parametrize("cache", ["dynamic", "quantized"])  # that is read again, and that moves
    def test_a_run_is_not_parked_again_before_it_has_gone_on(self, cache):
        """Requests that come later could keep it from ever ending."""
        gen = engine.Generator(tiny_model("llama"))
        scheduler = gen._scheduler(4, None, reads_first=True)
        request = BatchRequest(0, ids_of(9), {"max_new_tokens": 6, "cache": cache})
        scheduler.add(request)
        scheduler.turn()
        parked = 0
        while not request.done:
            assert scheduler._park(None)
            scheduler._resume()
            assert not scheduler._park(None)
            scheduler.turn()
            parked += 1
        assert parked == 4
        assert request.result().tokens == gen.generate(ids_of(9), max_new_tokens=6, cache=cache).tokens

    def test_memory_that_stays_out_ends_the_requests(self):
        """Every joined step and every step alone fails, and no cache can be parked: no turn goes on for ever."""
        gen = engine.Generator(tiny_model("llama"))
        scheduler = gen._scheduler(4, None, reads_first=True)
        asked = {"max_new_tokens": 20, "cache": "offloaded", "cache_config": {"residency": "disk"}}
        requests = [BatchRequest(index, ids_of(9, index), asked) for index in range(3)]
        for request in requests:
            scheduler.add(request)
        for _ in range(3):
            scheduler.turn()
        with failing_at_random(gen.model, 1.0, random.Random(0)):
            for _ in range(60):
                scheduler.turn()
        for request in requests:
            assert isinstance(request.error, engine.OutOfMemoryError)
            assert len(request.error.partial.tokens[0]) >= 3

    def test_samples_do_not_depend_on_their_neighbours(self):
        """Without a seed each request draws one, so two of them differ, and the global numbers decide both."""
        gen, found = engine.Generator(tiny_model("llama")), []
        for beside in (0, 3):
            torch.manual_seed(5)
            asked = [{"prompt": ids_of(5), "do_sample": True}] * 2 + [ids_of(9)] * beside
            results = {one.index: one.result() for one in gen.generate_many(asked, max_new_tokens=12)}
            found.append([results[0].tokens, results[1].tokens])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]

    def test_what_belongs_to_one_text_is_refused(self):
        gen = engine.Generator(tiny_model("llama"))
        with pytest.raises(engine.OptionError, match="streamer"):
            gen.generate_many([ids_of(4)], streamer=object())
        with gen.batch() as batch:
            refused = batch.submit(ids_of(4), return_legacy_cache=True)
        assert "results have no cache" in str(refused.error)
        with pytest.raises(engine.OptionError, match="slots"):
            gen.batch(slots=0)

    def test_a_budget_lets_prompts_wait(self):
        """Two caches do not fit: the second prompt begins when the first has ended, and its text is the same."""
        gen = engine.Generator(tiny_model("llama"))
        most = gen.generate(ids_of(30), max_new_tokens=8).cache.bytes
        with gen.batch(max_cache_bytes=int(most * 1.5)) as batch:
            requests = [batch.submit(ids_of(30, seed), max_new_tokens=8) for seed in range(3)]
        assert batch.counts.row_steps == batch.counts.steps
        for seed, request in enumerate(requests):
            assert request.result().tokens == gen.generate(ids_of(30, seed), max_new_tokens=8).tokens

    def test_stored_prefixes_join(self):
        """A prompt that begins like an earlier one reads the rest alone, beside others that decode."""
        model = tiny_model("llama")
        gen = engine.Generator(model, config=engine.EngineConfig(prefix_store_bytes=10_000_000))
        common = ids_of(60)
        gen.generate(common, max_new_tokens=2)
        asked = [torch.cat([common, ids_of(5, seed)], dim=1) for seed in range(1, 5)]
        found = {one.index: one.result() for one in gen.generate_many(asked, max_new_tokens=6)}
        plain = engine.Generator(model)
        for index, whole in enumerate(asked):
            assert found[index].tokens == plain.generate(whole, max_new_tokens=6).tokens
            assert found[index].stats.cached_tokens >= 60

    @pytest.mark.parametrize("waits", ["for a slot", "for memory"])
    def test_what_is_cancelled_while_it_waits_ends_at_once(self, waits):
        gen = engine.Generator(tiny_model("llama"))
        first, second = (BatchRequest(index, ids_of(9, index), {"max_new_tokens": 30}) for index in range(2))
        size = gen.generate(first.inputs, **first.parameters).cache.bytes
        scheduler = gen._scheduler(*((1, None) if waits == "for a slot" else (4, size)))
        for request in (first, second):
            scheduler.add(request)
        for _ in range(4):
            scheduler.turn()
        assert scheduler.state().running == scheduler.state().waiting == 1
        second.cancel()
        assert scheduler.turn() == [second]
        assert isinstance(second.error, engine.GenerationCancelled)
        assert second.error.partial.tokens == [[]]
        assert scheduler.state().waiting == 0
        while not first.done:
            scheduler.turn()
        assert len(first.result().tokens[0]) == 30

    def test_what_was_parked_is_read_again_by_itself(self, caplog):
        """A step of one token over an empty cache is no step that can be joined."""
        gen = engine.Generator(tiny_model("llama"))
        requests = [BatchRequest(index, ids_of(9, index), {"max_new_tokens": 12}) for index in range(3)]
        expected = [gen.generate(request.inputs, **request.parameters).tokens for request in requests]
        scheduler = gen._scheduler(3, None)
        for request in requests:
            scheduler.add(request)
        for _ in range(6):
            scheduler.turn()
        with torch.no_grad():
            scheduler._runs[1].loop.session.park()
        while not all(request.done for request in requests):
            scheduler.turn()
        assert [request.result().tokens for request in requests] == expected
        assert not caplog.records
        assert scheduler.counts.why_alone == {"its cache was emptied, so all tokens are read again"}

    def test_what_is_cancelled_while_it_is_parked_or_read(self):
        gen = engine.Generator(tiny_model("llama"))
        requests = [BatchRequest(index, ids_of(40, index), {"max_new_tokens": 30}) for index in range(3)]
        scheduler = gen._scheduler(3, None, piece_tokens=4)
        scheduler.add(requests[0])
        for _ in range(15):
            scheduler.turn()
        with torch.no_grad():
            scheduler._runs[0].loop.session.park()
        scheduler._runs[0].is_parked, scheduler._runs[0].ended_before = True, 10
        for request in requests[1:]:
            scheduler.add(request)
        scheduler._resume = lambda: None
        scheduler.turn()
        assert scheduler.state().parked == 1
        requests[0].cancel()
        assert requests[0] in scheduler.turn()
        assert len(requests[0].error.partial.tokens[0]) >= 1
        scheduler.turn()
        assert scheduler._runs[0].is_reading
        requests[1].cancel()
        assert scheduler.turn() == [requests[1]]

    def test_more_readers_than_a_process_has_threads(self):
        """Reading chunks in asyncio takes no thread of the pool, so any number of requests are read at once."""
        gen = engine.Generator(tiny_model("llama"))

        async def main():
            async with gen.batch(slots=50) as batch:
                requests = [batch.submit(ids_of(5, seed), max_new_tokens=4) for seed in range(50)]
                before = threading.active_count()

                async def read(request):
                    return [token async for chunk in request for token in chunk.tokens]

                found = await asyncio.gather(*map(read, requests))
                assert threading.active_count() == before
                return found

        found = asyncio.run(main())
        assert found == [gen.generate(ids_of(5, seed), max_new_tokens=4).tokens[0] for seed in range(50)]

    @pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
    def test_a_stored_prefix_that_is_parked_before_the_first_step(self, cache):
        """The rest of the prompt, or all of it, is read when there is room again."""
        gen = engine.Generator(tiny_model("llama"), config=engine.EngineConfig(prefix_store_bytes=10_000_000))
        common, options = ids_of(60), {"max_new_tokens": 8} | chosen(cache)
        options["cache_config"] = options["cache_config"] | ({"max_cache_len": 128} if cache == "static" else {})
        gen.generate(common, **options)
        asked = torch.cat([common, ids_of(9, 1)], dim=1)
        expected = engine.Generator(gen.model).generate(asked, **options).tokens
        request, scheduler = BatchRequest(0, asked, options), gen._scheduler(2, None, piece_tokens=4)
        scheduler.add(request)
        scheduler._admit()
        [run] = scheduler._runs
        assert run.cache.device_bytes > 0
        with torch.no_grad():
            run.loop.session.park()
        while not request.done:
            scheduler.turn()
        assert request.result().tokens == expected
