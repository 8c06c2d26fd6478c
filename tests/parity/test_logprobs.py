"""Log probabilities of tokens: those of the model's own logits, for every strategy whose rows are texts."""

from dataclasses import dataclass

import pytest
import torch
from architectures import prompt, tiny_model
from transformers.utils import ModelOutput

import engine
from strategies import Finish, Needs, Rows, read_prompt

CALLS = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 20},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "penalties": {"repetition_penalty": 1.5},
    "eos": {"eos_token_id": list(range(0, 101, 9)), "pad_token_id": 0, "do_sample": True, "seed": 1},
}


def check(found, expected, top):
    """expected: the result of the same call with `output_logits`."""
    assert found.tokens == expected.tokens
    assert found.logits is None
    checked = 0
    for row, tokens in enumerate(expected.tokens):
        assert [one.token for one in found.logprobs[row]] == tokens
        for column, one in enumerate(found.logprobs[row]):
            all_of_them = expected.logits[column][row].log_softmax(dim=-1)
            assert one.logprob == pytest.approx(float(all_of_them[one.token]), abs=1e-5)
            best = all_of_them.topk(top)
            assert [token for token, _ in one.top] == best.indices.tolist()
            torch.testing.assert_close(torch.tensor([value for _, value in one.top]), best.values)
            checked += 1
    assert checked >= len(expected.tokens)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized", "none"])
@pytest.mark.parametrize("call", CALLS)
def test_every_strategy(call, cache, top):
    gen, inputs = engine.Generator(tiny_model("llama")), prompt()
    options = {"cache": cache, "max_new_tokens": 9} | CALLS[call]
    expected = gen.generate(inputs, **options, output_logits=True)
    check(gen.generate(inputs, **options, top_logprobs=top), expected, top)


def test_a_draft_and_a_stream():
    gen, draft, inputs = engine.Generator(tiny_model("llama")), tiny_model("mistral"), prompt()
    options = {"assistant_model": draft, "max_new_tokens": 9}
    expected = gen.generate(inputs, **options, output_logits=True)
    stream = gen.stream(inputs, **options, top_logprobs=2)
    chunks = list(stream)
    check(stream.result(), expected, 2)
    for row in range(2):
        pieces = [one for chunk in chunks if chunk.row == row for one in chunk.logprobs]
        assert pieces == stream.result().logprobs[row]
    assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)


def test_beside_the_logits():
    out = engine.generate(tiny_model("llama"), prompt(), max_new_tokens=5, top_logprobs=1, output_logits=True)
    assert len(out.logits) == 5
    assert len(out.logprobs[0]) == 5


def test_many_prompts():
    gen, inputs = engine.Generator(tiny_model("llama")), [prompt(rows=1, seed=seed) for seed in range(3)]
    for request in gen.generate_many(inputs, max_new_tokens=6, top_logprobs=2):
        check(request.result(), gen.generate(request.inputs, max_new_tokens=6, output_logits=True), 2)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}])
def test_where_rows_are_candidates(options):
    with pytest.raises(engine.OptionError, match="rows are candidates"):
        engine.generate(tiny_model("llama"), prompt(), max_new_tokens=3, top_logprobs=1, **options)


@dataclass(frozen=True)
class Better:
    """Reads two rows for every prompt and returns one of them, without scores."""

    name, samples, needs = "better", True, Needs(rows_per_prompt=2)

    def flow(self, task):
        ids, logits = yield from read_prompt(task, 2)
        tokens = task.process(ids, logits).argmax(dim=-1, keepdim=True)
        yield Rows(torch.arange(0, len(tokens), 2))
        yield Finish(tokens[::2], [1] * (len(tokens) // 2))


def test_where_a_strategy_returns_fewer_texts_than_rows(caplog):
    """Log probabilities and scores came back empty."""
    model, options = tiny_model("llama"), {"strategy": Better(), "max_new_tokens": 1}
    with pytest.raises(engine.OptionError, match="cannot apply to better, whose rows are candidates"):
        engine.generate(model, prompt(), top_logprobs=1, **options)
    with caplog.at_level("WARNING", "engine"):
        assert engine.generate(model, prompt(), output_scores=True, **options).scores == ()
    assert "better hands no scores to Finish" in caplog.text


def test_no_logits_are_kept():
    """Only the logits that are not read yet exist beside the model's own."""
    from engine.decoding.records import Records

    records = Records(tiny_model("llama").generation_config, torch.device("cpu"), 2)
    for column in range(4):
        records.add_forward(ModelOutput(logits=torch.randn(2, 1, 7)), 1)
        assert len(records.logprobs(column, [1, 2])) == 2
    assert records._values["logits"] == [None] * 4
    assert records.fields() == {}
