"""A wrong cache is never used silently: random histories, of which each turn is right or refused with a true reason."""

import pytest
from histories import MODELS, pairs, play

import caches

FEW, CELLS, HISTORIES = 2, 10, 50


@pytest.mark.parametrize(
    "cell", [*range(FEW), *(pytest.param(cell, marks=pytest.mark.slow) for cell in range(FEW, CELLS))]
)
def test_every_turn_is_right_or_refused(cell):
    for seed in range(cell * HISTORIES, (cell + 1) * HISTORIES):
        play(seed)


def test_every_backend_has_histories():
    """All but those that lose something, for which `test_first_layer` stands, and the one that keeps nothing."""
    lossy = {"quantized", "offloaded_quantized", "quantized_sink", "sink", "none"}
    assert {backend for _, backend in pairs()} >= set(caches.names()) - lossy
    assert {name for name, _ in pairs()} == set(MODELS)
    assert len(pairs()) < CELLS * HISTORIES
