"""Streams and streamers of every strategy: what is shown is final, adds up to the result, and ends whatever happens."""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from strategy_cases import NAMES, NEW, NO_EOS, asked
from streamers import Columns, check
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import engine
import strategies

pytestmark = pytest.mark.covering("values", "pairs")

PROMPTS = ["import os\n", "class Path:\n    def __init__(self", "def "]
ENDS = {
    "length": {},
    "eos": {"eos_token_id": [0, 5, 200, 13, 12]},
    "stop strings": {"stop_strings": ["self", "\n\n", "import", "):"]},
}


def run(generator, prompts, name, **options):
    torch.manual_seed(3)
    return generator.generate(prompts, **asked(name, generator.model) | options)


def stream(generator, prompts, name, **options):
    torch.manual_seed(3)
    return generator.stream(prompts, **asked(name, generator.model) | options)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_the_generation(shipped, name, ends):
    out = run(shipped, PROMPTS, name, **ENDS[ends])
    shown = stream(shipped, PROMPTS, name, **ENDS[ends])
    check(list(shown), out)
    assert shown.result().tokens == out.tokens
    assert torch.equal(shown.result().sequences, out.sequences)
    assert shown.result().finish_reasons == out.finish_reasons
    if ends != "length":
        assert len(set(map(len, out.tokens))) > 1  # rows do end at different times
    if ends == "stop strings":
        assert not any(stop in text for stop in ENDS[ends]["stop_strings"] for text in out.text)


class Says:
    """A logits processor that makes one text much more probable than others, after the prompt.

    The earlier the token, the more so: then beams agree on all but their last tokens.
    """

    def __init__(self, generator, prompts, text):
        self.begin = generator.tokenizer(prompts, return_tensors="pt", padding=True)["input_ids"].shape[1]
        self.ids = generator.tokenizer(text)["input_ids"]

    def __call__(self, ids, scores):
        column = ids.shape[1] - self.begin
        token = self.ids[min(column, len(self.ids) - 1)]
        return scores.index_add(1, torch.tensor([token]), torch.full((len(scores), 1), 30.0 * (NEW + 1 - column)))


@pytest.mark.parametrize("name", NAMES)
def test_characters_of_several_tokens_come_whole(shipped, name):
    text = "naïve 漢字 🙂🙃 é"
    says = Says(shipped, PROMPTS, text)
    shown = stream(shipped, PROMPTS, name, logits_processor=[says])
    pieces = list(shown)
    check(pieces, shown.result())
    assert any(text in whole for whole in shown.result().text)
    first = [piece.text for piece in pieces if piece.row == 0][: len(says.ids)]
    assert len(first) > 2
    assert not any("\ufffd" in part for part in first[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_back_comes_with_the_end(shipped, name):
    """Half a character at the end of the longest text, or what might have become a stop string."""
    for text, more in {"x = '🙂": {}, "x = self": {"stop_strings": ["selfish"]}}.items():
        says = Says(shipped, PROMPTS, text)
        more = more | {"max_new_tokens": len(says.ids) - (text[-1] == "🙂"), "logits_processor": [says]}
        shown = stream(shipped, PROMPTS, name, **more)
        pieces = list(shown)
        check(pieces, run(shipped, PROMPTS, name, **more))
        last = [piece for piece in pieces if piece.row == 0][-1]
        assert last.text.endswith("\ufffd" if text[-1] == "🙂" else "self")


@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_it_can_while_it_comes(shipped, name):
    """The text is all but certain, so every strategy has something to show in most steps."""
    steps = []

    def count(ids, scores):
        steps.append(0)
        return says(ids, scores)

    says = Says(shipped, PROMPTS, "for number in range(10):\n    print(number, file=out)\n    total = total + 1")
    seen = [len(steps) for piece in stream(shipped, PROMPTS, name, logits_processor=[count]) if piece.row == 0]
    assert len(set(seen)) > (3 if name == "assisted" else 5)  # several tokens at a time
    assert seen[0] < len(steps) / 2


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_left_early_gives_what_there_is(shipped, name):
    says = {"logits_processor": [Says(shipped, PROMPTS, "for number in range(10):\n    print(number)\n    x")]}
    shown = stream(shipped, PROMPTS, name, **says)
    pieces = [next(shown) for _ in range(7)]
    part = shown.result()
    for row, tokens in enumerate(part.tokens):
        seen = [token for piece in pieces if piece.row == row for token in piece.tokens]
        assert tokens[: len(seen)] == seen
        assert len(tokens) < NEW
    assert part.finish_reasons == [None] * len(part.tokens)
    rest = shipped.generate(part.sequences, cache=part.cache, max_new_tokens=5)
    mask = (part.sequences != shipped.tokenizer.pad_token_id).long()
    assert rest.tokens == shipped.generate(part.sequences, attention_mask=mask, max_new_tokens=5).tokens
    with pytest.raises(StopIteration):
        next(shown)


class Overhasty:
    """Shows what it takes back."""

    name, samples = "overhasty", False

    def flow(self, task):
        yield strategies.Forward(task.ids)
        yield strategies.Report(
            lambda: [strategies.Hypothesis([7, 8], False, 0)], lambda: [strategies.Hypothesis([7], False, 0)]
        )
        yield strategies.Finish(torch.tensor([[7, 9]]), [2])


def test_a_strategy_may_only_show_what_is_final(shipped):
    with pytest.raises(
        engine.GenerationInterrupted, match=r"row 0 was shown with tokens \[7, 8\].*only show what is final"
    ):
        list(shipped.stream(PROMPTS[0], strategy=Overhasty()))


# Streamers of transformers


class Heard:
    """What a text streamer hands on, instead of printing it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts, self.ends = [], 0

    def on_finalized_text(self, text, stream_end=False):
        assert not self.ends
        self.parts.append(text)
        self.ends += stream_end

    @property
    def text(self):
        return "".join(self.parts)


class Hearing(Heard, TextStreamer):
    pass


DECODING = {
    "all": {},
    "no prompt": {"skip_prompt": True},
    "no special tokens": {"skip_special_tokens": True},
    "neither": {"skip_prompt": True, "skip_special_tokens": True},
}


@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("prompt", ["import os\n", "<|endoftext|>def f(x):\n  return", "x = '漢"])
def test_one_row_reads_as_in_transformers(shipped, prompt, decoding):
    ours, theirs = (Hearing(shipped.tokenizer, **DECODING[decoding]) for _ in range(2))
    inputs = shipped.tokenizer(prompt, return_tensors="pt")
    inputs["input_ids"] = inputs["input_ids"][:, : -1 if "漢" in prompt else None]  # half of the character
    inputs["attention_mask"] = inputs["attention_mask"][:, : inputs["input_ids"].shape[1]]
    options = {"max_new_tokens": 20, "eos_token_id": [0, 33]}
    shipped.model.generate(**inputs, **options, do_sample=False, streamer=theirs)
    shipped.generate(dict(inputs), **options, streamer=ours)
    assert ours.text == theirs.text
    assert (ours.ends, theirs.ends) == (1, 1)


def test_a_padded_row_alone_reads_as_in_transformers(shipped):
    ours, theirs = Hearing(shipped.tokenizer), Hearing(shipped.tokenizer)
    inputs = shipped.tokenizer("import os\n", return_tensors="pt", padding="max_length", max_length=9)
    shipped.model.generate(**inputs, max_new_tokens=9, do_sample=False, streamer=theirs)
    shipped.generate(dict(inputs), max_new_tokens=9, streamer=ours)
    assert ours.text == theirs.text


@pytest.mark.parametrize(("ends", "skip_prompt"), [("length", False), ("eos", True), ("stop strings", False)])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_streamer_gets_all_rows_one_after_the_other(shipped, name, skip_prompt, ends):
    streamer = Hearing(shipped.tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
    out = run(shipped, PROMPTS, name, streamer=streamer, **ENDS[ends])
    each = len(out.text) // len(PROMPTS)
    begun = [prompt * (not skip_prompt) for prompt in PROMPTS for _ in range(each)]
    assert streamer.text == "\n".join(begin + text for begin, text in zip(begun, out.text, strict=True))
    assert (streamer.ends, streamer.parts[-1]) == (1, "")
    assert len(streamer.parts) > len(out.text) + 3


def test_special_tokens_show_where_the_streamer_wants_them(shipped):
    streamer = Hearing(shipped.tokenizer, skip_prompt=True)
    says = Says(shipped, PROMPTS[0], "a<|endoftext|>")
    out = shipped.generate(PROMPTS[0], logits_processor=[says], streamer=streamer)
    assert out.text == ["a"]
    assert streamer.text == "a<|endoftext|>"


@pytest.mark.parametrize("name", NAMES)
def test_iterators_of_transformers(shipped, name):
    iterator = TextIteratorStreamer(shipped.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=20)
    found = []
    thread = threading.Thread(target=lambda: found.append(run(shipped, PROMPTS[:2], name, streamer=iterator)))
    thread.start()
    text = "".join(iterator)
    thread.join()
    assert text == "\n".join(found[0].text)


def test_the_asynchronous_iterator(shipped):
    async def read():
        iterator = AsyncTextIteratorStreamer(shipped.tokenizer, skip_prompt=True, timeout=20)
        task = asyncio.to_thread(shipped.generate, PROMPTS[:2], num_beams=3, streamer=iterator)
        running = asyncio.create_task(task)
        text = "".join([part async for part in iterator])
        return text, (await running).text

    shown, text = asyncio.run(read())
    assert shown == "\n".join(text)


def test_the_text_streamer_prints(shipped, capsys):
    out = shipped.generate(PROMPTS[:2], num_beams=2, streamer=TextStreamer(shipped.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == "\n".join(out.text) + "\n"


class OwnPut(Columns, TextStreamer):
    """A text streamer by name only."""


@pytest.mark.parametrize("kind", [Columns, OwnPut])
@pytest.mark.parametrize("name", NAMES)
def test_a_streamer_of_ones_own_gets_columns(shipped, name, kind):
    streamer = kind()
    out = run(shipped, PROMPTS, name, streamer=streamer, **ENDS["eos"])
    prompt, *columns = streamer.given
    begin = prompt.shape[1]
    assert torch.equal(prompt, out.sequences[:, :begin])
    assert torch.equal(torch.stack(columns, dim=1), out.sequences[:, begin:])
    assert streamer.ends == 1


# Streamers that fail


def fails_in(streamer_class, part, **options):
    """A streamer that raises in its fifth part."""

    class Fails(streamer_class):
        calls, ends = 0, 0

        def _count(self):
            self.calls += 1
            if self.calls == 5:
                raise ArithmeticError("the fifth is too much")

        def put(self, value):
            self._count()

        def on_finalized_text(self, text, stream_end=False):
            self.ends += stream_end
            self._count()

        def end(self):
            self.ends += 1

    if issubclass(streamer_class, TextStreamer):
        del Fails.put, Fails.end
    return Fails(**options)


@pytest.mark.parametrize("kind", ["columns", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_a_streamer_that_raises_costs_no_token(shipped, name, kind):
    text = {"tokenizer": shipped.tokenizer}
    streamer = fails_in(Columns, "put") if kind == "columns" else fails_in(TextStreamer, "text", **text)
    says = {"logits_processor": [Says(shipped, PROMPTS, "for number in range(10):\n    print(number)\n    x")]}
    whole = run(shipped, PROMPTS, name, **says)
    shown, pieces = stream(shipped, PROMPTS, name, **says, streamer=streamer), []
    with pytest.raises(engine.GenerationInterrupted, match="ArithmeticError: the fifth is too much") as failure:
        pieces.extend(shown)
    part = failure.value.partial
    check(pieces, part)  # who iterates beside it misses nothing
    assert (streamer.ends, streamer.calls) == (1, 5 if kind == "columns" else 6)  # the end is the sixth
    for found, tokens in list(zip(part.tokens, whole.tokens, strict=True))[:: len(part.tokens) // len(PROMPTS)]:
        assert 0 < len(found) < NEW
        assert found == tokens[: len(found)]
    options = {"max_new_tokens": NEW - len(part.tokens[0]), "eos_token_id": NO_EOS}
    rest = shipped.generate(part.sequences, cache=part.cache, **options, **says)
    alone = shipped.generate(part.sequences, attention_mask=(part.sequences != 1).long(), **options, **says)
    assert rest.tokens == alone.tokens


def test_a_row_that_ends_as_the_streamer_fails_has_ended(shipped):
    """The column that it raises for has been looked at like any other."""
    whole = shipped.generate(PROMPTS, max_new_tokens=8)
    eos = whole.tokens[1][3]
    with pytest.raises(engine.GenerationInterrupted) as failure:
        shipped.generate(PROMPTS, max_new_tokens=8, eos_token_id=eos, streamer=fails_in(Columns, "put"))
    assert failure.value.partial.finish_reasons[1] == "eos"
    assert failure.value.partial.tokens[1] == whole.tokens[1][:4]


@pytest.mark.parametrize("kind", [Columns, Hearing])
def test_a_streamer_ends_once_whatever_happens(shipped, kind):
    def fails(ids, scores):
        return 1 / 0 if ids.shape[1] > 12 else scores

    def new():
        return kind() if kind is Columns else kind(shipped.tokenizer)

    streamer = new()
    with pytest.raises(engine.GenerationInterrupted):
        shipped.generate(PROMPTS, streamer=streamer, logits_processor=[fails])
    assert streamer.ends == 1
    streamer = new()
    shown = shipped.stream(PROMPTS, streamer=streamer)
    next(shown)
    assert streamer.ends == 0
    shown.result()
    assert streamer.ends == 1
    streamer = new()
    never = shipped.stream(PROMPTS, streamer=streamer)
    never.result()
    never.result()
    assert streamer.ends == 1
    streamer = new()
    with shipped.stream(PROMPTS, streamer=streamer) as never:
        assert streamer.ends == 0
    assert streamer.ends == 1
    assert never.result().tokens == [[]] * len(PROMPTS)
    assert streamer.ends == 1
    streamer = new()
    shipped.stream(PROMPTS, streamer=streamer)  # which nothing refers to
    assert streamer.ends == 1


def test_a_streamer_that_cannot_end_is_a_failure_too(shipped):
    class Endless(Columns):
        def end(self):
            super().end()
            raise ArithmeticError("no end")

    streamer = Endless()
    with pytest.raises(engine.GenerationInterrupted, match="no end") as failure:
        shipped.generate(PROMPTS, streamer=streamer, max_new_tokens=4)
    assert failure.value.partial.finish_reasons == ["length"] * 3
    assert streamer.ends == 1


def test_a_call_that_is_refused_ends_its_streamer(shipped):
    streamer = Columns()
    with pytest.raises(engine.OptionError):
        shipped.generate(PROMPTS, streamer=streamer, max_new_tokens=0)
    assert (streamer.given, streamer.ends) == ([], 1)  # a thread may be waiting for it
    with pytest.raises(
        engine.OptionError, match=r"streamer is a list without put\(\) and end\(\): give a TextStreamer"
    ):
        shipped.generate(PROMPTS, streamer=[])


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_comes_after_the_rest_was_shown(shipped, name):
    """Of beams too: what `partial` has is what was shown."""

    def fails(ids, scores):
        return 1 / 0 if ids.shape[1] - says.begin == 6 else says(ids, scores)

    says, pieces = Says(shipped, PROMPTS, "naïve 漢字 🙂🙃"), []
    for kind in (Columns, Hearing):
        streamer, pieces = kind() if kind is Columns else kind(shipped.tokenizer, skip_prompt=True), []
        shown = stream(shipped, PROMPTS, name, logits_processor=[fails], streamer=streamer)
        with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError") as failure:
            pieces.extend(shown)
        partial = failure.value.partial
        steps = 1 if name == "assisted" else 5  # what is only proposed is nothing yet
        assert partial.stats.new_tokens >= steps * len(partial.tokens)
        check(pieces, partial)
        if kind is Hearing:
            assert streamer.text == "\n".join(partial.text)
        else:
            assert torch.equal(torch.stack(streamer.given[1:], dim=1), partial.sequences[:, says.begin :])


@pytest.mark.parametrize("name", ["sampling", "beam", "assisted"])
def test_a_stream_that_is_made_in_inference_mode_is_read_outside(shipped, name):
    expected = run(shipped, PROMPTS, name)
    with torch.inference_mode():
        shown = stream(shipped, PROMPTS, name)
        first = next(shown)
    rest = list(shown)
    check([first, *rest], shown.result())
    assert torch.equal(shown.result().sequences, expected.sequences)


@pytest.mark.slow
def test_a_stream_left_behind_ends_with_the_process():
    """Cleaning up in an interpreter that is half gone would crash it."""
    script = "import engine; left = engine.stream(engine.SHIPPED_MODEL, 'import os'); next(left)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120).returncode == 0


def test_the_time_of_a_streams_consumer_is_not_the_runs(shipped):
    begun = time.perf_counter()
    shown = shipped.stream(PROMPTS, num_beams=2, max_new_tokens=4)
    time.sleep(slept := 0.3)
    for _ in shown:
        time.sleep(0.1)
        slept += 0.1
    stats = shown.result().stats
    assert stats.ttft_s < stats.total_s < time.perf_counter() - begun - slept


class TestAsync:
    def test_the_chunks_are_those_of_a_stream(self, shipped):
        async def main():
            chunks = shipped.astream(PROMPTS, max_new_tokens=NEW)
            found = [chunk async for chunk in chunks]
            assert [chunk async for chunk in chunks] == []
            return found, await chunks.result()

        chunks, result = asyncio.run(main())
        check(chunks, result)
        assert result.tokens == shipped.generate(PROMPTS, max_new_tokens=NEW).tokens

    def test_other_tasks_go_on_meanwhile(self, shipped):
        async def read(prompt):
            return [chunk.tokens async for chunk in shipped.astream(prompt, max_new_tokens=3)]

        async def main():
            ticks, reading = 0, asyncio.gather(*map(read, PROMPTS))
            while not reading.done():
                ticks += 1
                await asyncio.sleep(0.001)
            return ticks, await reading

        ticks, found = asyncio.run(main())
        assert ticks > 3
        assert found == [[chunk.tokens for chunk in shipped.stream(prompt, max_new_tokens=3)] for prompt in PROMPTS]

    def test_it_is_left_early(self, shipped):
        async def main():
            async with shipped.astream(PROMPTS[0], max_new_tokens=200) as chunks:
                first = await anext(chunks)
            assert [chunk async for chunk in chunks] == []
            never = shipped.astream(PROMPTS[0], max_new_tokens=200)
            await never.aclose()
            assert [chunk async for chunk in never] == []
            return first, await chunks.result()

        first, result = asyncio.run(main())
        assert result.tokens == [list(first.tokens)]
        assert result.finish_reasons == [None]

    @pytest.mark.parametrize("way", ["task", "aclose", "event"])
    def test_a_step_that_runs_is_cancelled(self, shipped, way):
        steps, goes_on, given = threading.Event(), threading.Event(), threading.Event()

        def waits(ids, scores):
            if ids.shape[1] > len(shipped.tokenizer(PROMPTS[0])["input_ids"]):
                steps.set()
                goes_on.wait(10)
            return scores

        async def main():
            options = {"max_new_tokens": 200, "logits_processor": [waits], "cancellation": given}
            chunks = shipped.astream(PROMPTS[0], **options)
            await anext(chunks)
            task = asyncio.ensure_future(anext(chunks))
            while not steps.is_set():
                await asyncio.sleep(0.001)
            leaving = []
            if way == "task":
                task.cancel()
            elif way == "aclose":
                leaving = [asyncio.ensure_future(chunks.aclose())]
            else:
                given.set()
            await asyncio.sleep(0.01)
            goes_on.set()
            ends = {"task": asyncio.CancelledError, "event": engine.GenerationCancelled}
            with suppress(ends.get(way, StopAsyncIteration)):
                await task
                await anext(chunks)
            await asyncio.gather(*leaving)
            return await chunks.result()

        assert asyncio.run(main()).stats.new_tokens < 5

    def test_errors(self, shipped):
        async def main():
            with pytest.raises(engine.OptionError, match="nonsense"):
                await anext(shipped.astream("x", nonsense=3))
            with pytest.raises(engine.OptionError, match="cancellation"):
                shipped.astream("x", cancellation=3)

        asyncio.run(main())
