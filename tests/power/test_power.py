"""The comparisons with transformers can fail: put any part of a step's bookkeeping off by one, and the text changes."""

import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder

import engine
from caches.state import State
from caches.store import GrowingStore
from caches.timeline import Timeline
from engine.masks import Columns


def shift_growing_write(monkeypatch):
    def write(self, buffer, new):
        end = max(0, self.timeline.end - 1)
        buffer[:, :, end : end + new.shape[-2]] = new

    monkeypatch.setattr(GrowingStore, "_write", write)


def shift_write_index(monkeypatch):
    original = Timeline.write_index
    monkeypatch.setattr(Timeline, "write_index", lambda self, device: (original(self, device) - 1).clamp(min=0))


def shift_mask(monkeypatch):
    original = Columns.mask
    monkeypatch.setattr(Columns, "mask", lambda self, columns: original(self, columns).roll(1, dims=1))


def shift_step_mask(monkeypatch):
    original = Columns.step_mask
    monkeypatch.setattr(Columns, "step_mask", lambda self, *arguments: original(self, *arguments).roll(1, dims=3))


def shift_decode_positions(monkeypatch):
    original = Columns.positions
    # All positions shifted together change nothing under rotary embeddings; these drift from the prompt's.
    monkeypatch.setattr(Columns, "positions", lambda self, begin, end: original(self, begin, end) + (begin > 0))


def shift_mask_sizes(monkeypatch):
    original = Timeline.mask_sizes

    def sizes(self, tokens, unsettled=0):
        length, offset = original(self, tokens, unsettled)
        return length, offset + (1 if offset > 0 else 0)

    monkeypatch.setattr(Timeline, "mask_sizes", sizes)


def keep_one_column_less(monkeypatch):
    monkeypatch.setattr("caches.retention.KeepRecent.surviving", lambda self, held: min(held, self.columns - 1))


def compact_one_off(monkeypatch):
    original = GrowingStore.compact

    def compact(self):
        original(self)
        self.buffer[:, :, : self.timeline.held] = self.buffer[:, :, : self.timeline.held].roll(1, dims=2)

    monkeypatch.setattr(GrowingStore, "compact", compact)


def shift_what_a_convolution_reads(monkeypatch):
    original = State.append_conv
    monkeypatch.setattr(State, "append_conv", lambda self, *arguments: original(self, *arguments).roll(1, dims=-1))


def keep_states_as_they_were(monkeypatch):
    """A step that writes its states in place writes into a copy."""
    monkeypatch.setattr(State, "get", lambda self, key: self._used(key).clone() if key in self._known else None)
    # What models of transformers 5.17 ask for.
    numbered = State.numbered
    monkeypatch.setattr(
        State, "numbered", lambda self, kind: {number: state.clone() for number, state in numbered(self, kind).items()}
    )


def forget_states(monkeypatch):
    original = State.set
    monkeypatch.setattr(State, "set", lambda self, key, value: original(self, key, torch.zeros_like(value)))


def read_pads_into_states(monkeypatch):
    monkeypatch.setattr(Columns, "mask", lambda self, columns: None)


CASES = [
    ("llama", "dynamic", shift_growing_write),
    ("llama", "static", shift_write_index),
    ("llama", "dynamic", shift_mask),
    ("llama", "static", shift_mask),
    ("llama", "none", shift_mask),
    ("llama", "dynamic", shift_step_mask),
    ("qwen3", "static", shift_step_mask),
    ("llama", "dynamic", shift_decode_positions),
    ("gpt2", "static", shift_decode_positions),
    ("mistral", "dynamic", shift_mask_sizes),
    ("gemma2", "static", shift_mask_sizes),
    ("mistral", "dynamic", keep_one_column_less),
    ("llama4_text", "static", keep_one_column_less),
    ("mistral", "dynamic", compact_one_off),
    ("qwen3", "static", compact_one_off),
    ("lfm2", "dynamic", shift_what_a_convolution_reads),
    ("mamba2", "static", shift_what_a_convolution_reads),
    ("mamba", "mamba", keep_states_as_they_were),
    ("falcon_h1", "static", keep_states_as_they_were),
    ("bamba", "dynamic", forget_states),
    ("qwen3_next", "static", forget_states),
    ("mamba2", "dynamic", read_pads_into_states),
    ("lfm2", "static", read_pads_into_states),
]


def is_noticed(generate, expected):
    try:
        return not torch.equal(generate().sequences, expected)
    except engine.BadLogits:  # memory that nobody has written to may hold anything, NaN too
        return True


@pytest.mark.parametrize(("name", "cache", "damage"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_noticed(name, cache, damage, monkeypatch):
    model, inputs = tiny_model(name), prompt()
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    damage(monkeypatch)
    # In pieces, so that a window is full before the prompt ends.
    config = engine.EngineConfig(prefill_chunk_tokens=None if cache == "none" else 5)
    generator = engine.Generator(model, config=config)
    assert is_noticed(lambda: generator.generate(inputs, cache=cache, max_new_tokens=40), expected)


@pytest.mark.parametrize("part", ["own", "cross"])
def test_damage_to_either_part_of_an_encoder_decoder_cache_is_noticed(part, monkeypatch):
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    committed = GrowingStore.committed

    def of_another_row(self):
        held = committed(self)
        return None if held is None else held.roll(1, dims=0)

    if part == "cross":  # models read it where it lies
        monkeypatch.setattr(GrowingStore, "committed", of_another_row)
    else:
        shift_growing_write(monkeypatch)
    assert is_noticed(lambda: engine.generate(model, inputs, max_new_tokens=20), expected)
