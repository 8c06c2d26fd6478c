"""Streams carry what `generate` returns, stop where it stops, and end whatever happens."""

import time

import pytest
import torch
from helpers import StopAfter
from transformers import TextIteratorStreamer, TextStreamer

import engine

pytestmark = pytest.mark.covering("values", "pairs")

PROMPTS = ["import os\n", "class Path:\n    def __init__(self", "def "]
OPTIONS = {"max_new_tokens": 40}


@pytest.fixture(autouse=True, params=[False, True], ids=["read at once", "read late"])
def _late(request, monkeypatch):
    """Everything here also with tokens read one step late, as on an accelerator."""
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: request.param)


def joined(pieces, rows):
    tokens, texts = [[] for _ in range(rows)], ["" for _ in range(rows)]
    for piece in pieces:
        tokens[piece.row] += piece.tokens
        texts[piece.row] += piece.text
    return tokens, texts


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_stream_is_the_generation(shipped, cache, sample):
    options = OPTIONS | {"cache": cache, "do_sample": sample, "eos_token_id": [0, 5, 200]}
    torch.manual_seed(3)
    whole = shipped.generate(PROMPTS, **options)
    torch.manual_seed(3)
    stream = shipped.stream(PROMPTS, **options)
    pieces = list(stream)
    tokens, texts = joined(pieces, 3)
    assert texts == whole.text == stream.result().text
    for row, ids in enumerate(tokens):
        new = whole.sequences[row, -max(map(len, tokens)) :].tolist()
        assert new[: len(ids)] == ids
        assert set(new[len(ids) :]) <= {1}  # pads
    ends = [piece for piece in pieces if piece.finish_reason]
    assert [piece.finish_reason for piece in sorted(ends, key=lambda p: p.row)] == whole.finish_reasons
    assert torch.equal(stream.result().sequences, whole.sequences)


@pytest.mark.parametrize("stops", [["self"], ["\n\n", "import"], [".", "("], "os"])
def test_stop_strings_end_exactly_and_do_not_leak(shipped, stops):
    free = shipped.generate(PROMPTS, **OPTIONS).text
    given = [stops] if isinstance(stops, str) else stops
    expected = []
    for text in free:
        found = [text.find(stop) for stop in given if stop in text]
        expected.append(text[: min(found)] if found else text)
    assert expected != free
    stream = shipped.stream(PROMPTS, **OPTIONS, stop_strings=stops)
    _, texts = joined(stream, 3)
    out = shipped.generate(PROMPTS, **OPTIONS, stop_strings=stops)
    assert texts == out.text == stream.result().text == expected
    reasons = ["stop_string" if text != all else "length" for text, all in zip(expected, free, strict=True)]
    assert out.finish_reasons == reasons
    # The tokens are those of transformers' own stop strings.
    inputs = shipped.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    theirs = shipped.model.generate(
        **inputs, **OPTIONS, do_sample=False, stop_strings=stops, tokenizer=shipped.tokenizer
    )
    assert torch.equal(out.sequences, theirs)


def test_a_stream_left_early_gives_what_there_is(shipped):
    whole = shipped.generate(PROMPTS[0], **OPTIONS)
    stream = shipped.stream(PROMPTS[0], **OPTIONS)
    for _ in range(7):
        next(stream)
    part = stream.result()
    assert part.stats.new_tokens == 7
    assert part.finish_reasons == [None]
    assert torch.equal(part.sequences, whole.sequences[:, : part.sequences.shape[1]])
    rest = shipped.generate(part.sequences, cache=part.cache, max_new_tokens=33)
    assert torch.equal(rest.sequences, whole.sequences)


def test_during_a_step_a_stream_cannot_be_ended(shipped):
    def end(ids, scores):
        stream.close()

    stream = shipped.stream("import os\n", max_new_tokens=4, logits_processor=[end])
    with pytest.raises(engine.GenerationInterrupted, match="the stream is in a step, in another thread") as stopped:
        list(stream)
    assert stopped.value.partial.tokens == [[]]


def test_transformers_streamers(shipped, capsys):
    out = shipped.generate(PROMPTS[1], **OPTIONS, streamer=TextStreamer(shipped.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == out.text[0] + "\n"
    iterator = TextIteratorStreamer(shipped.tokenizer, skip_prompt=True, timeout=5)
    out = shipped.generate(PROMPTS[1], **OPTIONS, streamer=iterator)
    assert "".join(iterator) == out.text[0]  # would time out if it had not been ended


def test_criteria_and_time(shipped):
    begin = shipped.generate(PROMPTS[0], max_new_tokens=1).sequences.shape[1] - 1
    out = shipped.generate(PROMPTS[0], **OPTIONS, stopping_criteria=[StopAfter(begin + 6)])
    assert (out.stats.new_tokens, out.finish_reasons) == (6, ["criteria"])
    out = shipped.generate(PROMPTS[0], max_new_tokens=1500, max_time=0.2)
    assert out.finish_reasons == ["time"]
    assert 0.1 < out.stats.total_s < 5


class Broken:
    """A logits processor that raises at its fifth call."""

    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 5:
            raise ArithmeticError("no fifth")
        return scores


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_was_generated_survives_a_failure(shipped, cache):
    options = OPTIONS | {"cache": cache}
    if cache == "static":
        options["cache_config"] = {"max_cache_len": 99}
    whole = shipped.generate(PROMPTS, **options)
    with pytest.raises(
        engine.GenerationInterrupted, match=r"after 4 new tokens per row \(ArithmeticError: no fifth"
    ) as failure:
        shipped.generate(PROMPTS, logits_processor=[Broken()], **options)
    part = failure.value.partial
    assert isinstance(failure.value.__cause__, ArithmeticError)
    assert part.sequences.shape[1] == whole.sequences.shape[1] - 36
    mask = (part.sequences != 1).long()
    rest = shipped.generate(part.sequences, attention_mask=mask, cache=part.cache, max_new_tokens=36)
    assert torch.equal(rest.sequences, whole.sequences)


def test_a_forward_that_fails_leaves_a_usable_cache(shipped, monkeypatch):
    whole = shipped.generate(PROMPTS[0], **OPTIONS)
    layer, calls = shipped.model.model.layers[3], []
    forward = layer.forward

    def fails_once(*args, **kwargs):
        calls.append(0)
        if len(calls) == 12:
            raise RuntimeError("layer 3 is gone")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", fails_once)
    with pytest.raises(engine.GenerationInterrupted, match="layer 3 is gone") as failure:
        shipped.generate(PROMPTS[0], **OPTIONS)
    part = failure.value.partial
    assert part.stats.new_tokens == 11
    rest = shipped.generate(part.sequences, cache=part.cache, max_new_tokens=29)
    assert torch.equal(rest.sequences, whole.sequences)


def test_an_ended_streamer_even_after_a_failure(shipped):
    class Recorder:
        ended = 0

        def put(self, value):
            pass

        def end(self):
            self.ended += 1

    recorder = Recorder()
    with pytest.raises(engine.GenerationInterrupted):
        shipped.generate(PROMPTS[0], **OPTIONS, streamer=recorder, logits_processor=[Broken()])
    assert recorder.ended == 1


def test_a_stop_string_that_is_a_special_token(shipped):
    forced = shipped.tokenizer(" hello world")["input_ids"] + [0, 7, 7, 7]
    begin = len(shipped.tokenizer(PROMPTS[0])["input_ids"])

    class Force:
        def __call__(self, ids, scores):
            return torch.full_like(scores, -1e9).index_fill(1, torch.tensor(forced[ids.shape[1] - begin]), 0.0)

    options = {"max_new_tokens": len(forced), "eos_token_id": 4000, "logits_processor": [Force()]}
    out = shipped.generate(PROMPTS[0], stop_strings=["<|endoftext|>"], **options)
    assert (out.text, out.finish_reasons) == ([" hello world"], ["stop_string"])
    assert out.sequences[0, begin:].tolist() == forced[:-3]


def test_the_consumers_time_is_not_ours(shipped):
    stream = shipped.stream(PROMPTS[0], max_new_tokens=4)
    time.sleep(0.3)
    for _ in stream:
        time.sleep(0.2)
    stats = stream.result().stats
    assert stats.ttft_s < 0.3
    assert stats.total_s < 0.5


def test_stats_add_up(shipped):
    begun = time.perf_counter()
    stats = shipped.generate(PROMPTS, max_new_tokens=10).stats
    assert stats.total_s <= time.perf_counter() - begun
    assert 0 < stats.ttft_s < stats.total_s
    assert stats.new_tokens == 30
    assert stats.prefill_tokens_per_s == pytest.approx(stats.prompt_tokens / stats.ttft_s)
    assert stats.decode_tokens_per_s == pytest.approx(27 / (stats.total_s - stats.ttft_s))
    assert stats.peak_bytes is None  # a CPU does not report it
    one = shipped.generate(PROMPTS[0], max_new_tokens=1).stats
    assert one.decode_tokens_per_s is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 2},
        {"num_beams": 3, "num_return_sequences": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_a_stop_string_across_the_end_of_the_prompt(shipped, options):
    """The rule is that of transformers, in every strategy; no part of it shows, in no stream."""
    given = options | {"stop_strings": ["os\nimport", "os\nfrom", "os\ndef", "os\nclass"], "max_new_tokens": 6}
    out = shipped.generate("import os\n", **given)
    [first, *_] = zip(out.tokens, out.text, out.finish_reasons, strict=True)
    assert first == (out.tokens[0][:1], "", "stop_string")
    if "num_beam_groups" not in options and "penalty_alpha" not in options:
        inputs = shipped.tokenizer("import os\n", return_tensors="pt")
        torch.manual_seed(0)
        theirs = shipped.model.generate(
            **inputs, **given | {"do_sample": "top_k" in given}, tokenizer=shipped.tokenizer
        )
        torch.manual_seed(0)
        assert torch.equal(shipped.generate("import os\n", **given).sequences, theirs)
    pieces = list(shipped.stream("import os\n", **given))
    assert [(piece.text, piece.finish_reason) for piece in pieces if piece.row == 0][-1] == ("", "stop_string")
    shown = TextIteratorStreamer(shipped.tokenizer, skip_prompt=True)
    shipped.generate("import os\n", **given, streamer=shown)
    assert "".join(shown).split("\n")[0] == ""


def test_the_tokenizer_of_a_generator_may_be_replaced_its_configuration_not(shipped, tokenizer):
    generator = engine.Generator(shipped.model)
    ids = tokenizer("import os", return_tensors="pt").input_ids
    assert generator.generate(ids, max_new_tokens=2).text is None
    generator.tokenizer = tokenizer
    assert generator.generate(ids, max_new_tokens=2).text == shipped.generate(ids, max_new_tokens=2).text
    with pytest.raises(AttributeError, match="config"):
        generator.config = engine.EngineConfig(on_oom=[])
