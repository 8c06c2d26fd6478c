"""A run that is stopped from outside, at any step: what it gives back goes on to the text of one that was not."""

import signal
import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import looks_ahead
from references import tiny
from resuming import NEW, again, check_goes_on
from strategy_cases import LOSSY
from streamers import Columns

import caches
import engine

pytestmark = pytest.mark.covering("values", "pairs")


class AtStep:
    """Set when it is asked for the step with this number, from 0 on."""

    def __init__(self, step):
        self.left = step

    def is_set(self):
        self.left -= 1
        return self.left < 0


def cancelled(model, inputs, step, **options):
    with pytest.raises(
        engine.GenerationCancelled, match=r"generation was cancelled after \d+ new tokens? per row"
    ) as stopped:
        engine.generate(model, inputs, cancellation=AtStep(step), **{"max_new_tokens": NEW} | options)
    return stopped.value.partial


CELLS = [
    *[(name, "dynamic") for name in ("llama", "mistral", "gemma2", "mamba", "jamba", "bamba", "t5", "bart")],
    *[("llama", cache) for cache in ("static", "offloaded", "none", *LOSSY)],
    *[(name, "static") for name in ("gemma2", "jamba", "bart")],
]


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("name", "cache"), CELLS)
def test_it_goes_on_as_if_nothing_had_happened(name, cache, sample):
    """Lossy caches too: nothing is taken back and nothing is read again."""
    model, inputs = tiny(name)
    options = {"cache": cache, "cache_config": LOSSY.get(cache, {}), "do_sample": sample}
    if caches.recipe(cache).has_a_size:
        options["cache_config"] = {"max_cache_len": 64} | options["cache_config"]
    torch.manual_seed(5)
    whole = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    step, made = 0, 0
    while made < NEW - 1:
        torch.manual_seed(5)
        part = cancelled(model, inputs, step, **options)
        assert [len(tokens) for tokens in part.tokens] in ([made, made], [made + 1, made + 1])
        assert part.finish_reasons == [None, None]
        step, made = step + 1, len(part.tokens[0])
        kept = {"cache": part.cache} if part.cache is not None and part.cache.total_tokens else options
        rest = again(model, inputs, part, **kept | {"do_sample": sample}, max_new_tokens=NEW - made)
        assert torch.equal(rest.sequences, whole.sequences)
    assert step >= NEW  # one more where the prompt is read in several


def test_read_late_as_on_an_accelerator(monkeypatch):
    model, inputs = tiny("llama")
    torch.manual_seed(5)
    whole = engine.generate(model, inputs, max_new_tokens=NEW, do_sample=True)
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: True)
    for step in range(1, NEW):
        torch.manual_seed(5)
        part = cancelled(model, inputs, step, do_sample=True)
        rest = again(model, inputs, part, cache=part.cache, do_sample=True, max_new_tokens=NEW - step)
        assert torch.equal(rest.sequences, whole.sequences)


def test_several_samples_of_a_prompt():
    model, inputs = tiny("llama")
    options = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    whole = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    for step in range(NEW):
        torch.manual_seed(5)
        part = cancelled(model, inputs, step, **options)
        assert len(part.sequences) == (6 if step else 2)  # before their first tokens there are only the prompts
        more = {"do_sample": True, "cache": part.cache} if step else options
        rest = again(model, inputs, part, **more, max_new_tokens=NEW - step)
        assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_that_have_ended(cache):
    model, inputs = tiny("llama")
    free = engine.generate(model, inputs, max_new_tokens=NEW)
    options = {"eos_token_id": free.tokens[0][2], "cache": cache}
    whole = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    assert whole.finish_reasons == ["eos", "length"]
    for step in range(3, NEW):
        part = cancelled(model, inputs, step, **options)
        assert part.finish_reasons == ["eos", None]
        assert part.tokens == [whole.tokens[0], whole.tokens[1][:step]]
        alone = caches.select_rows(part.cache, torch.tensor([1]))
        rest = engine.generate(model, part.sequences[1:], cache=alone, max_new_tokens=NEW - step)
        assert torch.equal(rest.sequences, whole.sequences[1:])


SEARCHES = {
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "num_return_sequences": 3},
}


@pytest.mark.parametrize(("name", "cache"), [("llama", "dynamic"), ("llama", "static"), ("gemma2", "offloaded"),
                                             ("jamba", "dynamic"), ("t5", "dynamic")])  # fmt: skip
@pytest.mark.parametrize("search", SEARCHES)
def test_the_best_beams_so_far(search, name, cache):
    """They are what the search returns that may not go any further."""
    model, inputs = tiny(name)
    options = SEARCHES[search] | {"cache": cache}
    for step in range(1, NEW):
        part = cancelled(model, inputs, step, **options)
        shorter = engine.generate(model, inputs, max_new_tokens=step, **options)
        assert torch.equal(part.sequences, shorter.sequences)
        assert part.finish_reasons == [None] * len(part.sequences)
        check_goes_on(model, inputs, part)


def test_beams_of_a_prompt_that_is_done():
    model, inputs = tiny("llama")
    free = engine.generate(model, inputs, num_beams=3, num_return_sequences=3, max_new_tokens=NEW)
    eos = [tokens[number] for tokens, number in zip(free.tokens[:3], (1, 2, 3), strict=True)]
    options = {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "eos_token_id": eos}
    whole = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    ended = 0
    for step in range(2, NEW):
        pieces = []
        stream = engine.stream(model, inputs, max_new_tokens=NEW, cancellation=AtStep(step), **options)
        try:
            pieces.extend(stream)
        except engine.GenerationCancelled as stopped:
            part = stopped.partial
        else:
            break
        for row, reason in enumerate(part.finish_reasons):
            assert [token for piece in pieces if piece.row == row for token in piece.tokens] == part.tokens[row]
            assert [piece.finish_reason for piece in pieces if piece.row == row][-1] == reason
            if reason is not None:
                ended += 1
                assert part.tokens[row] == whole.tokens[row]
    assert ended


def test_contrastive_search_keeps_the_candidates_it_chose():
    model, inputs = tiny("gpt2")
    options = {"penalty_alpha": 0.6, "top_k": 4}
    whole = engine.generate(model, inputs, max_new_tokens=NEW, **options)
    for step in range(1, NEW):
        part = cancelled(model, inputs, step, **options)
        assert part.tokens == [tokens[: step - 1] for tokens in whole.tokens]
        check_goes_on(model, inputs, part)
        rest = again(model, inputs, part, max_new_tokens=NEW - step + 1, **options)
        assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("name", ["llama", "mistral", "bamba"])
def test_a_prompt_in_pieces_is_stopped_between_them(name):
    model, inputs = tiny(name)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=3))
    whole = generator.generate(inputs, max_new_tokens=NEW)
    with pytest.raises(engine.GenerationCancelled) as stopped:
        generator.generate(inputs, max_new_tokens=NEW, cancellation=AtStep(2))
    part = stopped.value.partial
    assert part.tokens == [[], []]
    assert 0 < part.cache.total_tokens < 13
    with pytest.raises(engine.InputError, match="that do not begin this prompt"):
        engine.generate(model, part.sequences + 1, cache=part.cache)
    rest = engine.generate(model, part.sequences, cache=part.cache, max_new_tokens=NEW)
    assert torch.equal(rest.sequences, whole.sequences)
    assert rest.stats.prompt_tokens < whole.stats.prompt_tokens


@pytest.mark.parametrize("name", ["jamba", "mamba2", "mistral"])
def test_stopped_while_tokens_taken_back_are_read_again(name):
    model, inputs = tiny(name)
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    stopped, step = True, 0
    while stopped:
        try:
            engine.generate(
                model, inputs, strategy=looks_ahead(whole.sequences, 3), max_new_tokens=NEW, cancellation=AtStep(step)
            )
            stopped = False
        except engine.GenerationCancelled as error:
            part = error.partial
            rest = again(model, inputs, part, cache=part.cache, max_new_tokens=NEW - len(part.tokens[0]))
            assert torch.equal(rest.sequences, whole.sequences)
        step += 1
    assert step > 4


def test_from_another_thread(shipped):
    event, begun = threading.Event(), threading.Event()

    class Watch(Columns):
        def put(self, value):
            super().put(value)
            if len(self.given) > 5:
                begun.set()

    thread = threading.Thread(target=lambda: begun.wait(60) and event.set())
    thread.start()
    with pytest.raises(engine.GenerationCancelled) as stopped:
        shipped.generate("import os\n", max_new_tokens=1500, cancellation=event, streamer=Watch())
    thread.join()
    part = stopped.value.partial
    assert 5 <= part.stats.new_tokens < 1500
    assert part.text == [shipped.tokenizer.decode(part.tokens[0], skip_special_tokens=True)]
    assert isinstance(stopped.value, engine.GenerationInterrupted)


def test_a_stream_cancelled_by_its_consumer(shipped):
    event, streamer = threading.Event(), Columns()
    stream = shipped.stream("import os\n", max_new_tokens=40, cancellation=event, streamer=streamer)
    for _ in range(4):
        next(stream)
    event.set()
    with pytest.raises(engine.GenerationCancelled, match="after 4 new tokens"):
        next(stream)
    assert stream.result().stats.new_tokens == 4
    assert streamer.ends == 1
    with pytest.raises(StopIteration):
        next(stream)


def test_set_before_the_call_and_never_set(shipped):
    event = threading.Event()
    whole = shipped.generate("import os\n", max_new_tokens=5, cancellation=event)
    event.set()
    with pytest.raises(engine.GenerationCancelled, match="after 0 new tokens") as stopped:
        shipped.generate("import os\n", max_new_tokens=5, cancellation=event)
    assert stopped.value.partial.text == [""]
    rest = shipped.generate(stopped.value.partial.sequences, max_new_tokens=5)
    assert torch.equal(rest.sequences, whole.sequences)


def test_what_cannot_be_set_is_refused_before_any_work(shipped):
    with pytest.raises(engine.OptionError, match=r"cancellation is a bool without is_set\(\): give a threading.Event"):
        shipped.generate("import os\n", cancellation=True)


# Ctrl-C


def press_at(step, times=1):
    """A logits processor in whose call with this number, from 0 on, Ctrl-C is pressed."""
    calls = []

    def press(ids, scores):
        calls.append(0)
        for _ in range(times if len(calls) == step + 1 else 0):
            signal.raise_signal(signal.SIGINT)
        return scores

    return press


def handler():
    return signal.getsignal(signal.SIGINT)


def test_the_second_ctrl_c_interrupts_at_once():
    model, inputs = tiny("llama")
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    press, handlers = press_at(3, times=2), []

    def look(ids, scores):
        try:
            return press(ids, scores)
        except KeyboardInterrupt:
            handlers.append(handler())
            raise

    with pytest.raises(KeyboardInterrupt) as stopped:
        engine.generate(model, inputs, max_new_tokens=NEW, logits_processor=[look])
    assert [*handlers, handler()] == [signal.default_int_handler] * 2  # whatever it interrupts
    assert not isinstance(stopped.value, engine.UserInterrupt)
    part = stopped.value.partial
    assert part.tokens == [tokens[:3] for tokens in whole.tokens]
    rest = again(model, inputs, part, cache=part.cache, max_new_tokens=NEW - 3)
    assert torch.equal(rest.sequences, whole.sequences)


def test_ctrl_c_in_the_last_step_is_not_lost():
    model, inputs = tiny("llama")
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    with pytest.raises(engine.UserInterrupt) as stopped:
        engine.generate(model, inputs, max_new_tokens=NEW, logits_processor=[press_at(NEW - 1)])
    assert stopped.value.partial.tokens == whole.tokens
    assert stopped.value.partial.finish_reasons == ["length", "length"]


def test_while_a_stream_is_suspended_ctrl_c_is_its_consumers():
    model, inputs = tiny("llama")
    whole = engine.generate(model, inputs, max_new_tokens=NEW)
    handlers = []

    def look(ids, scores):
        handlers.append(handler())
        return scores

    stream = engine.stream(model, inputs, max_new_tokens=NEW, logits_processor=[look])
    assert handler() is signal.default_int_handler
    next(stream)
    assert handlers[0] is not signal.default_int_handler
    assert handler() is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    pieces = list(stream)  # it has nothing to do with the stream, which goes on
    assert len(pieces) == 2 * NEW - 1
    assert stream.result().tokens == whole.tokens


def test_a_stream_noted_ctrl_c_and_was_left():
    model, inputs = tiny("llama")
    stream = engine.stream(model, inputs, max_new_tokens=NEW, logits_processor=[press_at(1)])
    for _ in range(3):  # the last one was computed while it was pressed
        next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.result()
    assert handler() is signal.default_int_handler
    assert stream.result().stats.new_tokens == 4
    stream = engine.stream(model, inputs, max_new_tokens=NEW, logits_processor=[press_at(1)])
    pieces = []
    with pytest.raises(engine.UserInterrupt) as stopped:
        pieces.extend(stream)
    assert len(pieces) == stopped.value.partial.stats.new_tokens == 4


@contextmanager
def handled_by(function):
    signal.signal(signal.SIGINT, function)
    try:
        yield
    finally:
        assert handler() is function
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_somebody_elses_handler_stays_in_charge():
    model, inputs = tiny("llama")
    pressed = []
    with handled_by(lambda number, frame: pressed.append(number)):
        out = engine.generate(model, inputs, max_new_tokens=NEW, logits_processor=[press_at(2)])
    assert pressed == [signal.SIGINT]
    assert out.finish_reasons == ["length", "length"]


def test_a_handler_set_on_the_way_stays():
    model, inputs = tiny("llama")

    def own(number, frame):
        pass

    def set_own(ids, scores):
        signal.signal(signal.SIGINT, own)
        return scores

    engine.generate(model, inputs, max_new_tokens=2, logits_processor=[set_own])
    assert handler() is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_in_other_threads_no_handler_is_touched():
    model, inputs = tiny("llama")
    handlers = []

    def look(ids, scores):
        handlers.append(handler())
        return scores

    thread = threading.Thread(target=lambda: engine.generate(model, inputs, max_new_tokens=2, logits_processor=[look]))
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler] * 2


def test_a_cache_that_cannot_follow_is_read_again(monkeypatch):
    """Rows of a search become rows of a result: where that fails too, tokens are still not lost."""
    model, inputs = tiny("llama")

    def fails(self, index):
        raise MemoryError("no memory for that either")

    def press(ids, scores):
        if ids.shape[1] == 16:
            monkeypatch.setattr(caches.Cache, "select_rows", fails)
            raise RuntimeError("no memory")
        return scores

    whole = engine.generate(model, inputs, num_beams=3, max_new_tokens=3)
    with pytest.raises(engine.GenerationInterrupted, match="no memory") as stopped:
        engine.generate(model, inputs, num_beams=3, max_new_tokens=NEW, logits_processor=[press])
    monkeypatch.undo()
    part = stopped.value.partial
    assert part.tokens == whole.tokens
    assert part.cache.total_tokens == 0
    check_goes_on(model, inputs, part)


def test_the_command_line_shows_what_there_is(cli, monkeypatch):
    stream = engine.Generator.stream

    def interrupted(*inputs, **options):
        return stream(*inputs, logits_processor=[press_at(4)], **options)

    monkeypatch.setattr(engine.Generator, "stream", interrupted)
    for more in ([], ["--num-beams", "3"]):
        done = cli(["generate", "import os\n", "--max-new-tokens", "60", *more])
        assert done.exit_code == 130
        assert 0 < len(done.stdout) < 60
