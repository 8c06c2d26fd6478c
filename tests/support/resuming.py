"""Going on from what an interrupted run gave back."""

from __future__ import annotations

import torch

import engine

NEW = 7


def again(model, inputs, part, **options):
    """Go on from what there is, as its user would."""
    times = len(part.sequences) // len(inputs["input_ids"])
    inputs = {name: value.repeat_interleave(times, dim=0) for name, value in inputs.items()}
    if model.config.is_encoder_decoder:
        inputs.pop("decoder_attention_mask", None)
        return engine.generate(model, inputs | {"decoder_input_ids": part.sequences}, **options)
    mask = torch.ones_like(part.sequences)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return engine.generate(model, part.sequences, attention_mask=mask, **options)


def check_goes_on(model, inputs, part, new_tokens=NEW):
    """Its cache holds what its tokens say: greedy search from both is that from the tokens alone."""
    with_cache = again(model, inputs, part, cache=part.cache, max_new_tokens=new_tokens)
    assert with_cache.tokens == again(model, inputs, part, max_new_tokens=new_tokens).tokens
    return with_cache
