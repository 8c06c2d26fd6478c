"""Streams carry what `generate` returns, stop where it stops, and end whatever happens."""

import time

import pytest
import torch
from streamers import check
from transformers import TextIteratorStreamer

import engine

pytestmark = pytest.mark.covering("values", "pairs")

PROMPTS = ["import os\n", "class Path:\n    def __init__(self", "def "]
OPTIONS = {"max_new_tokens": 40}


@pytest.fixture(autouse=True, params=[False, True], ids=["read at once", "read late"])
def _late(request, monkeypatch):
    """Everything here also with tokens read one step late, as on an accelerator."""
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: request.param)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_stream_is_the_generation(shipped, cache, sample):
    options = OPTIONS | {"cache": cache, "do_sample": sample, "eos_token_id": [0, 5, 200]}
    torch.manual_seed(3)
    whole = shipped.generate(PROMPTS, **options)
    torch.manual_seed(3)
    stream = shipped.stream(PROMPTS, **options)
    check(list(stream), whole)
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
    out = shipped.generate(PROMPTS, **OPTIONS, stop_strings=stops)
    assert out.text == expected
    check(list(shipped.stream(PROMPTS, **OPTIONS, stop_strings=stops)), out)
    reasons = ["stop_string" if text != all else "length" for text, all in zip(expected, free, strict=True)]
    assert out.finish_reasons == reasons
    # The tokens are those of transformers' own stop strings.
    inputs = shipped.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    theirs = shipped.model.generate(
        **inputs, **OPTIONS, do_sample=False, stop_strings=stops, tokenizer=shipped.tokenizer
    )
    assert torch.equal(out.sequences, theirs)


def test_during_a_step_a_stream_cannot_be_ended(shipped):
    def end(ids, scores):
        stream.close()

    stream = shipped.stream("import os\n", max_new_tokens=4, logits_processor=[end])
    with pytest.raises(engine.GenerationInterrupted, match="the stream is in a step, in another thread") as stopped:
        list(stream)
    assert stopped.value.partial.tokens == [[]]


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
