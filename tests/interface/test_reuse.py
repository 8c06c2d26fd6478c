"""A padded batch that goes on six times on one cache, beside reading everything again each time."""

import pytest
import torch
from architectures import prompt, tiny_model

import caches
import engine

NEW = 5
LOSSY = ("quantized", "offloaded_quantized", "quantized_sink")  # what was encoded when depends on the steps
BACKENDS = [name for name in caches.names() if name not in ("encoder_decoder", "mamba", "none", *LOSSY)]
OPTIONS = {"sink": {"window_length": 24, "num_sink_tokens": 2}, "sliding_window": {"window_length": 24}}
STRATEGIES = {
    "greedy": {},
    "samples": {"do_sample": True, "seed": 3},
    "beams": {"num_beams": 3},
    "diverse": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def more(tokens, seed):
    return prompt(tokens=tokens, pads=0, seed=seed)["input_ids"]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "lfm2", "jamba", "mamba"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_six_turns_are_as_read_anew(backend, strategy, kind):
    model, arguments = tiny_model(kind), STRATEGIES[strategy] | {"max_new_tokens": NEW}
    options = OPTIONS.get(backend, {})
    if caches.recipe(backend).has_a_size:
        options = options | {"max_cache_len": 96, "max_batch_size": 8}
    chosen = {"cache": backend, "cache_config": options}
    first = prompt(rows=2, tokens=13, pads=4)
    try:
        out = engine.generate(model, **first, **chosen, **arguments)
    except (caches.CacheError, engine.EngineError) as refused:
        pytest.skip(str(refused))
    cache, mask, cached = out.cache, first["attention_mask"], []
    begun = out.sequences
    prompts = [
        torch.cat([begun, more(4, 1)], 1),
        torch.cat([begun, more(4, 1), more(9, 2)], 1),
        torch.cat([begun, more(4, 1), more(9, 2)], 1),  # again
        torch.cat([begun, more(4, 1), more(6, 3)], 1),  # the last message is another one
        torch.cat([begun, more(4, 1)], 1),  # a beginning of what is cached
        torch.cat([begun, more(4, 1), more(11, 4)], 1),
    ]
    for ids in prompts:
        mask_of_all = torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], 1)
        go_back(cache, ids)
        out = engine.generate(model, ids, attention_mask=mask_of_all, cache=cache, **arguments)
        cache = out.cache
        expected = engine.generate(model, ids, attention_mask=mask_of_all, **chosen, **arguments)
        assert out.tokens == expected.tokens
        cached.append(out.stats.cached_tokens)
    if kind == "llama" and backend not in OPTIONS:
        assert min(cached) >= int(first["attention_mask"].sum())


def go_back(cache, ids):
    """Keep what the cache holds of the prompt; all of a cache that cannot take tokens back goes.

    Beams leave a cache of states empty where the best text did not end last.
    """
    if cache.total_tokens == 0:
        return
    known = cache.log.ids[:, : cache.total_tokens]
    most = min(known.shape[1], ids.shape[1] - 1)
    same = (known[:, :most] == ids[:, :most]).all(0)
    common = int(same.long().cumprod(0).sum())
    if common == cache.total_tokens:
        return
    try:
        cache.crop(common)
    except caches.StepError:
        cache.reset()
