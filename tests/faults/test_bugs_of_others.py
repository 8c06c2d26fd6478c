"""A bug in a processor or a criterion: it is told, and the caller's cache is as good as before."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import tiny_model
from fallbacks import prompt

import caches
import engine
from caches.core.row_selection import RowSelection

NEW = 8


class Follows:
    """A processor that follows rows, until it is told of so many choices."""

    def __init__(self, choices: int):
        self.left = choices

    def __call__(self, ids, scores):
        return scores

    def select_rows(self, index):
        self.left -= 1
        if self.left < 0:
            raise TypeError("a bug in rows()")

    def crop(self, columns):
        pass


@pytest.mark.parametrize("choices", [0, 1, 3])
def test_a_processor_that_cannot_follow_leaves_the_cache_whole(choices, caplog):
    model, cache = tiny_model("llama"), caches.build("dynamic", tiny_model("llama").config)
    follows = Follows(choices)
    with (
        caplog.at_level(logging.WARNING, logger="engine"),
        pytest.raises(engine.GenerationInterrupted, match="a bug in") as told,
    ):
        engine.generate(model, prompt(), cache=cache, max_new_tokens=NEW, logits_processor=[follows], num_beams=3)
    partial = told.value.partial
    assert isinstance(told.value.__cause__, TypeError)
    assert partial.cache is cache
    assert cache.total_tokens == partial.sequences.shape[1] - 1
    assert not any("emptied" in record.message for record in caplog.records)
    # It can be continued, to the text of a run that reads everything.
    mask = torch.cat([prompt()["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], dim=1)
    whole = {"input_ids": partial.sequences, "attention_mask": mask[:, : partial.sequences.shape[1]]}
    rest = engine.generate(model, whole, cache=cache, max_new_tokens=4)
    assert torch.equal(rest.sequences, engine.generate(model, whole, max_new_tokens=4).sequences)


def test_a_late_reading_that_fails_once_more_is_logged(caplog, monkeypatch):
    def fails(self):
        raise TypeError("a bug that comes again")

    def process(ids, scores):
        raise TypeError("a bug")

    monkeypatch.setattr("engine.decoding.transcript.Transcript.read_unread", fails)
    with caplog.at_level(logging.WARNING, logger="engine"), pytest.raises(engine.GenerationInterrupted, match="a bug"):
        engine.generate(tiny_model("llama"), prompt(), max_new_tokens=NEW, logits_processor=[process])
    assert any("a bug that comes again" in str(record.exc_info) for record in caplog.records)


def test_a_bug_in_putting_rows_apart_is_not_hidden(monkeypatch):
    cache = caches.build("dynamic", tiny_model("llama").config)
    with torch.no_grad():
        tiny_model("llama")(torch.arange(5, 15)[None], past_key_values=cache)
    cache.fork(2)
    monkeypatch.setattr("caches.timeline.shared_timeline.ForkedTimeline.should_unshare", True)

    def broken(self):
        raise TypeError("a bug")

    monkeypatch.setattr(RowSelection, "finish", broken)
    with pytest.raises(TypeError, match="a bug"):
        cache.selection.unshare_if_materialized()

    def starved(self):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(RowSelection, "finish", starved)
    cache.selection.unshare_if_materialized()
