"""Random histories notice breakages of what keeps wrong caches, and caches of changed models, from being used; random
calls notice those of steps (tests/support/damage.py)."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import changed
import histories
import pytest
import random_calls
import torch
from damage import DAMAGES

import caches
from caches.hf import adapter
from caches.layers import read_by
from caches.layers.model_version import ModelVersion
from caches.layers.read_by import ReadBy
from caches.transfer import comparison
from engine import run_builder
from engine.model import facts
from engine.request.inputs import continuation

_version_of = read_by.model_version


def without(**parts):
    return read_by, "model_version", lambda model: replace(_version_of(model), **parts)


CONTENT = {
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
MODELS = {
    "no caller asks": (caches.TokenLog, "why_other", lambda self, now: None),
    "a version never differs": (ModelVersion, "difference", lambda self, later: None),
    "weights are not read": without(weights=0),
    "buffers are not read": without(buffers=0),
    "settings are not read": without(settings=()),
    "what changes in the middle does not count": (ReadBy, "until", lambda self, end: end),
    "fingerprints are alike": (read_by, "differences", lambda before, now: ""),
    "a freed model is like any": (
        ReadBy,
        "why_other",
        lambda self, now, asked=ReadBy.why_other: None if self.reader and self.reader() is None else asked(self, now),
    ),
}
CALLS = [
    "shift_mask", "accept_every_proposal", "look_for_stop_strings_in_new_text_alone", "shift_growing_write",
    "shift_write_index", "shift_decode_positions", "shift_mask_sizes", "keep_one_column_less", "forget_states",
    "read_pads_into_states", "read_the_encoder_of_another_row", "leave_rows_where_they_are", "fork_rows_in_turn",
    "keep_the_worst_beams", "read_pads_of_one_row_as_tokens", "count_end_ids_once", "draw_once_more",
    "forget_processors_of_the_call", "forget_parameters_that_apply", "record_no_attentions",
    "record_states_of_the_last_token_alone",
]  # fmt: skip
QUICK = {*CONTENT, "no caller asks", "weights are not read", "a freed model is like any", "shift_mask"}


def those(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def play_histories(of_transformers):
    pairs = histories.pairs()
    for seed in range(500):
        if not of_transformers or pairs[seed % len(pairs)][1] in histories.THEIRS:
            histories.play(seed)


@pytest.mark.parametrize("breakage", CONTENT)
def test_histories_of_caches_notice(breakage, monkeypatch):
    monkeypatch.setattr(*CONTENT[breakage])
    with pytest.raises(AssertionError):
        play_histories("transformers" in breakage)


@pytest.mark.parametrize("breakage", those(MODELS))
def test_histories_of_models_notice(breakage, monkeypatch):
    monkeypatch.setattr(*MODELS[breakage])
    with pytest.raises(AssertionError):
        changed.run(range(500))


@pytest.fixture
def own_facts(monkeypatch, tmp_path):
    """What trials say of damaged models is kept neither in this process nor in a file."""
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(facts, "_answers", WeakKeyDictionary())


@pytest.mark.usefixtures("own_facts")
@pytest.mark.parametrize("damage", those(CALLS))
def test_the_first_calls_notice(damage, monkeypatch):
    random_calls.cells()  # which caches lose nothing is found out before
    DAMAGES[damage](monkeypatch)
    assert any(random_calls.play(range(begin, begin + 10))[2] for begin in range(0, 300, 10))


def test_without_damage_calls_pass():
    assert not random_calls.play(range(10))[2]
    assert random_calls.draw(3).script() == random_calls.draw(3).script()
