"""What is kept and comes back: backends with small options, models of every kind of layer."""

from __future__ import annotations

import pytest

import caches

NEW = 5
MODELS = ["llama", "gemma2", "lfm2", "mamba", "minimax_m3_vl_text"]  # of every kind of layer


PAIRS = {
    "dynamic": {"cache": "dynamic"},
    "static": {"cache": "static", "max_cache_len": 40},
    "offloaded": {"cache": "offloaded"},
    "a pair": {"cache": "encoder_decoder", "cache_config": {"self_cache": "dynamic", "cross_cache": "static"}},
}


def options_of(backend, residency):
    """Small ones, so that blocks are encoded and windows forget."""
    known = caches.recipe(backend).options.option_names()
    wanted = {"window_length": 12 if "residual_length" in known else 8, "residual_length": 2, "q_group_size": 8,
              "max_cache_len": 40, "residency": residency}  # fmt: skip
    return {name: value for name, value in wanted.items() if name in known}


def cases():
    for backend in caches.names():
        options = caches.recipe(backend).options.option_names()
        for residency in ("host", "disk") if "residency" in options else ("host",):
            yield pytest.param(backend, residency, id=f"{backend}-{residency}")
