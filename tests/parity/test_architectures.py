"""More architectures: the text and logits equal transformers'."""

import pytest
import torch
import transformers
from architectures import MORE_ARCHITECTURES, RARE_ARCHITECTURES, pairs, prompt, tiny_model
from parity import CLOSE, NEW, transformers_says

import engine


@pytest.mark.covering("values")
@pytest.mark.parametrize(
    ("name", "cache"),
    [*pairs(MORE_ARCHITECTURES), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs(RARE_ARCHITECTURES))],
)
def test_greedy_on_more_architectures(name, cache):
    if name in RARE_ARCHITECTURES and not hasattr(transformers, RARE_ARCHITECTURES[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    model, inputs = tiny_model(name), prompt()
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW, output_logits=True)
    # Without a cache like without: transformers disagrees with itself on sparse attention.
    expected = transformers_says(name, use_cache=cache != "none")
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
