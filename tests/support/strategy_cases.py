"""Every strategy with small options, the models to try it on, and caches under which the text changes."""

from __future__ import annotations

import caches
import engine
import strategies
from strategies.operations import needs_of

MODELS = {
    "full": "llama",
    "window": "mistral",
    "full and windows": "gemma2",
    "states": "mamba",
    "attention and states": "jamba",
    "encoder-decoder": "t5",
}
# Small, where the defaults are large; a strategy that is not here has to do without options.
OPTIONS = {
    "sampling": {"num_return_sequences": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "diverse_beam": {"num_beams": 4, "diversity_penalty": 0.7, "num_return_sequences": 2},
    "contrastive": {"top_k": 3},
    "assisted": {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
}
LOSSY = {
    "sliding_window": {"window_length": 8},
    "sink": {"window_length": 8, "num_sink_tokens": 2},
    "quantized": {"residual_length": 3},
    "offloaded_quantized": {"residual_length": 3},
    "quantized_sink": {"window_length": 16, "num_sink_tokens": 2, "residual_length": 3},
}
REFUSALS = (caches.CacheError, engine.OptionError)

NEW = 24
NO_EOS = 4000  # nothing says it; a text that has ended would hold back what its beams agree on
NAMES = strategies.names()


def asked(name, model):
    """Arguments that ask for this strategy, small. One that needs a draft gets one that says the same."""
    strategy = strategies.build(name, **OPTIONS.get(name, {}))
    needs_draft = needs_of(strategy).draft
    options = {"strategy": strategy, "max_new_tokens": NEW, "eos_token_id": NO_EOS}
    return options | ({"assistant_model": model} if needs_draft else {})
