"""Joined caches hold after a step what each holds that makes it alone."""

import pytest
import torch
from contract import are_segments_of
from transformers import LlamaConfig

import caches
from caches.attention.kv_view import plain
from caches.hf.joined import JoinedCaches

CONFIG = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LENGTHS = (3, 9, 5)


def random(rows, tokens):
    return torch.randn(rows, 2, tokens, 8)


def filled(kinds, is_forked):
    """A cache of each kind, each with a prompt of its own length; two rows share the last one."""
    torch.manual_seed(0)
    made = [
        caches.build(kind, CONFIG, **({"max_cache_len": 20, "max_batch_size": 2} if kind == "static" else {}))
        for kind in kinds
    ]
    for cache, tokens in zip(made, LENGTHS, strict=True):
        cache.begin(tokens)
        for layer in range(2):
            cache.update(random(1, tokens), random(1, tokens), layer)
        cache.commit()
    if is_forked:
        made[-1].fork(2)
    return made


@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("kinds", [
    ("dynamic", "dynamic", "dynamic"), ("static", "dynamic", "dynamic"), ("dynamic", "offloaded", "dynamic"),
])  # fmt: skip
def test_a_step_is_that_of_each_cache_alone(kinds, is_forked):
    together, alone = filled(kinds, is_forked), filled(kinds, is_forked)
    rows = [cache.batch_size for cache in together]
    for step in range(4):
        whole = JoinedCaches(together)
        whole.begin(1)
        for cache in alone:
            cache.begin(1)
        for layer in range(2):
            new = random(sum(rows), 1), random(sum(rows), 1)
            slots, found = whole.open_slots([layer]), whole.update(*new, layer)
            is_first = is_forked and step == 0  # which allocates what the rows have of their own
            assert (slots is not None) == ("offloaded" not in kinds and not is_first)
            if slots is not None:
                assert are_segments_of(slots[0], *(joint.of_each_cache() for joint in found))
            for number, (cache, *own) in enumerate(zip(alone, *(one.split(rows) for one in new), strict=True)):
                for joint, expected in zip(found, cache.update(*own, layer), strict=True):
                    assert torch.equal(plain(joint.of_each_cache()[number]), plain(expected))
        for one, other in zip(together, alone, strict=True):
            one.commit()
            other.commit()
            assert torch.equal(plain(one.layers[1].keys), plain(other.layers[1].keys))
