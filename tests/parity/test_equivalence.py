"""The text equals transformers' `generate`, token for token, whatever the cache."""

import pytest
import torch
from architectures import ARCHITECTURES, pairs, prompt, suiting, tiny_model
from parity import CLOSE, NEW, reference, transformers_says

import engine

STATES = ["mamba", "mamba2", "bamba", "lfm2", "falcon_h1", "qwen3_next"]


@pytest.mark.covering("pairs")
@pytest.mark.parametrize("chunk", [None, 3], ids=["whole", "chunked"])
@pytest.mark.parametrize(("name", "cache"), pairs([*ARCHITECTURES, *STATES]))
def test_greedy(name, cache, chunk):
    if cache == "none" and chunk is not None:
        pytest.skip("without a cache a prompt cannot be read in pieces")
    model, inputs = tiny_model(name), prompt()
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
    out = generator.generate(inputs, cache=cache, max_new_tokens=NEW, output_logits=True)
    expected = transformers_says(name)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
    assert out.finish_reasons == ["length", "length"]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize(("name", "cache"), pairs(["llama", "mistral", "llama4_text", "mamba2", "jamba"]))
def test_a_padded_row_equals_the_row_alone(name, cache):
    model, inputs = tiny_model(name), prompt()
    together = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW).sequences[0, 4:]
    alone = engine.generate(model, inputs["input_ids"][:1, 4:], cache=cache, max_new_tokens=NEW).sequences[0]
    assert torch.equal(together, alone)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("cache", suiting("mistral"))
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 2.0},
        {"repetition_penalty": 1.3, "top_k": 0},
        {"num_return_sequences": 3, "top_k": 50},
    ],
    ids=lambda options: "+".join(options),
)
def test_sampling(cache, options):
    model, inputs = tiny_model("mistral"), prompt()
    torch.manual_seed(7)
    expected = reference(model, inputs, do_sample=True, **options)
    torch.manual_seed(7)
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, do_sample=True, **options)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": 17},
        {"eos_token_id": [17, 40, 63]},
        {"max_length": 30},
        {"min_new_tokens": 9, "eos_token_id": list(range(2, 60))},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [9, 11]]},
        {"suppress_tokens": [3, 4, 5]},
        {"forced_eos_token_id": 3},
    ],
    ids=lambda options: "+".join(options),
)
def test_generation_parameters(options):
    model, inputs = tiny_model("llama"), prompt()
    if "max_length" in options:
        options = options | {"max_new_tokens": None}
    out = engine.generate(model, **inputs, **({"max_new_tokens": NEW} | options))
    assert torch.equal(out.sequences, reference(model, inputs, **options))


def test_generation_config_and_the_models_own_defaults():
    model, inputs = tiny_model("llama"), prompt()
    config = model.generation_config.from_dict({"max_new_tokens": 9, "repetition_penalty": 1.5, "pad_token_id": 0})
    expected = model.generate(**inputs, generation_config=config)
    assert torch.equal(engine.generate(model, inputs, generation_config=config).sequences, expected)
    assert engine.generate(model, inputs).sequences.shape[1] == model.generate(**inputs).shape[1] == 13 + 20


@pytest.mark.parametrize("cache", suiting("llama"))
def test_recorded_outputs(cache):
    model, inputs = tiny_model("llama"), prompt()
    asked = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), True)
    options = {"max_new_tokens": 5, "repetition_penalty": 1.4} | asked
    expected = model.generate(**inputs, **options, do_sample=False, return_dict_in_generate=True)
    out = engine.generate(model, inputs, cache=cache, **options)
    torch.testing.assert_close(out.scores, expected.scores, **CLOSE)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
    assert len(out.hidden_states) == len(expected.hidden_states) == 5
    last = [states[-1][:, -1] for states in out.hidden_states]
    torch.testing.assert_close(last, [states[-1][:, -1] for states in expected.hidden_states], **CLOSE)
    assert out.attentions is None


def test_recorded_attentions():
    inputs = prompt()
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    try:
        expected = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, output_attentions=True, return_dict_in_generate=True
        )
        out = engine.generate(model, inputs, max_new_tokens=3, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    assert len(out.attentions) == 3
    torch.testing.assert_close(out.attentions, expected.attentions, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_bfloat16_is_no_less_exact_than_transformers(cache):
    exact_model, inputs = tiny_model("llama"), prompt(tokens=60)
    half = type(exact_model)(exact_model.config).eval()
    half.load_state_dict(exact_model.state_dict())
    half.to(torch.bfloat16)
    forced = torch.randint(2, 101, (2, 20), generator=torch.Generator().manual_seed(5))

    class Force:  # the same tokens for all three, so that only rounding differs
        def __call__(self, ids, scores):
            scores = torch.full_like(scores, -1e9)
            return scores.scatter(1, forced[:, ids.shape[1] - 60, None], 0.0)

    def logits(generate, model, **options):
        options |= {"max_new_tokens": 20, "output_logits": True, "logits_processor": [Force()]}
        return torch.stack(generate(model, **inputs, **options).logits)

    def transformers_generate(model, **options):
        return model.generate(**options, do_sample=False, return_dict_in_generate=True)

    exact = logits(transformers_generate, exact_model)
    error_of_transformers = (logits(transformers_generate, half) - exact).abs().mean()
    our_error = (logits(engine.generate, half, cache=cache) - exact).abs().mean()
    assert 0 < our_error <= 1.01 * error_of_transformers
