"""Random histories notice each of these breakages of what keeps a wrong cache from being used."""

import pytest
import torch
from histories import THEIRS, pairs, play

import caches
from caches.hf import adapter
from caches.transfer import comparison
from engine import run_builder
from engine.request.inputs import continuation

BREAKAGES = {
    "unknown content passes": (run_builder, "check_content", lambda *arguments: None),
    "known content passes": (run_builder, "check_continues", lambda cache, request: True),
    "nothing differs": (
        comparison.KeptTokens,
        "differ",
        lambda self, expected, begin: torch.zeros(len(expected), expected.shape[2], dtype=torch.bool),
    ),
    "what others do to a cache of transformers is not noticed": (
        caches.HFCacheAdapter,
        "log",
        property(lambda self: adapter._logs.get(self._cache, (None,))[0], caches.HFCacheAdapter.log.fset),
    ),
    "the log is the result's memory": (caches.TokenLog, "copied", lambda self: self),
    "the log keeps its rows": (caches.TokenLog, "select_rows", lambda self, index: self),
    "a source is another's": (continuation, "_check_source", lambda *arguments: None),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_breakage_is_noticed(breakage, monkeypatch):
    monkeypatch.setattr(*BREAKAGES[breakage])
    theirs = "transformers" in breakage
    for seed in range(500):
        if theirs and pairs()[seed % len(pairs())][1] not in THEIRS:
            continue
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail("500 histories were all right")
