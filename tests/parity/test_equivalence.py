"""The text equals transformers' `generate`, token for token, whatever the cache and the architecture.

Parameters and records: the random calls (test_random_calls.py).
"""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, pairs, prompt, tiny_model
from parity import CLOSE, NEW, transformers_says

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


@pytest.mark.covering("values")
@pytest.mark.parametrize(
    ("name", "cache"),
    [*pairs(MORE_ARCHITECTURES), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs(RARE_ARCHITECTURES))],
)
def test_more_architectures(name, cache):
    if name in RARE_ARCHITECTURES and not hasattr(transformers, RARE_ARCHITECTURES[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    model, inputs = tiny_model(name), prompt()
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, output_logits=True)
    # Without a cache like without: transformers disagrees with itself on sparse attention.
    expected = transformers_says(name, use_cache=cache != "none")
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize(("name", "cache"), pairs(["llama", "mistral", "llama4_text", "mamba2", "jamba"]))
def test_a_padded_row_equals_the_row_alone(name, cache):
    model, inputs = tiny_model(name), prompt()
    together = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW).sequences[0, 4:]
    alone = engine.generate(model, inputs["input_ids"][:1, 4:], cache=cache, max_new_tokens=NEW).sequences[0]
    assert torch.equal(together, alone)


def test_generation_config_and_the_models_own_defaults():
    model, inputs = tiny_model("llama"), prompt()
    config = model.generation_config.from_dict({"max_new_tokens": 9, "repetition_penalty": 1.5, "pad_token_id": 0})
    expected = model.generate(**inputs, generation_config=config)
    assert torch.equal(engine.generate(model, inputs, generation_config=config).sequences, expected)
    assert engine.generate(model, inputs).sequences.shape[1] == model.generate(**inputs).shape[1] == 13 + 20


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
