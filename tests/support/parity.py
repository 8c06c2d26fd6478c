"""What transformers' `generate` says, found once per model in each process."""

from __future__ import annotations

import functools

from architectures import prompt, tiny_model

CLOSE = {"atol": 2e-3, "rtol": 1e-4}
NEW = 14  # beyond a window's buffer, so that it is compacted on the way


def reference(model, inputs, **options):
    return model.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


@functools.cache
def transformers_says(name, use_cache=True):
    """Its text and logits, found once for all backends."""
    options = {"use_cache": use_cache, "output_logits": True, "return_dict_in_generate": True}
    return reference(tiny_model(name), prompt(), **options)
