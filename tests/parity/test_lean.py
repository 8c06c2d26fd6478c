"""What a decode step may cost: nothing waits for the device, and reading tokens a step late changes nothing."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, prompt, tiny_model
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine.decoding.token_buffer import Tokens

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 20
OLDER = Version(transformers.__version__) < Version("5.23")


@pytest.fixture
def late(monkeypatch):
    """Tokens are read one step late, as on an accelerator."""
    monkeypatch.setattr("engine.decoding.token_buffer.reads_late", lambda device: True)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device: numbers and lists read from a tensor, shapes found in one."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        read_list = torch.Tensor.tolist

        def tolist(tensor):
            self.count += 1
            return read_list(tensor)

        def copy_to_host(column):  # what has arrived on the host can be read without waiting
            copy = column.clone()
            return SimpleNamespace(tolist=lambda: read_list(copy)), None

        monkeypatch.setattr("engine.decoding.token_buffer._copy_to_host", copy_to_host)
        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


def waits_per_step(monkeypatch, name, cache, pads, **options):
    counts = []
    for new in (NEW // 2, NEW):
        with monkeypatch.context() as patch, Waits(patch) as waits:
            model, inputs = tiny_model(name), prompt(pads=pads)
            engine.generate(model, inputs, cache=cache, max_new_tokens=new, eos_token_id=100, **options)
        counts.append(waits.count)
    return (counts[1] - counts[0]) / (NEW - NEW // 2)


@pytest.mark.parametrize("pads", [0, 4])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "gpt_oss"])
def test_a_step_waits_for_nothing(late, monkeypatch, name, cache, pads):
    # transformers makes the masks of chunks, and looks into them; opt does it by itself in older releases.
    looks = (name == "llama4_text" and pads > 0) or (name == "opt" and pads == 0 and OLDER)
    assert waits_per_step(monkeypatch, name, cache, pads) == int(looks)


def test_waiting_would_be_seen(late, monkeypatch):
    class Peeks:
        def __call__(self, ids, scores):
            return scores if scores.max() > -1e9 else -scores

    assert waits_per_step(monkeypatch, "llama", "dynamic", 0, logits_processor=[Peeks()]) == 1


def ends_in_the_middle(model, inputs):
    """End-of-sequence ids with which the rows end at different columns, long before the last."""
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [int(free[0, 4]), int(free[1, 9])]


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("sample", [False, True])
def test_reading_late_changes_nothing(late, monkeypatch, name, cache, sample):
    model, inputs = tiny_model(name), prompt(pads=0)
    discarded = []
    discard = Tokens.discard_unread
    monkeypatch.setattr(Tokens, "discard_unread", lambda self: discarded.append(self.unread) or discard(self))
    options = {"do_sample": sample, "eos_token_id": ends_in_the_middle(model, inputs), "max_new_tokens": NEW}
    options |= {"output_scores": True, "output_logits": True}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **options, return_dict_in_generate=True)
    drawn_after = torch.rand(1)
    torch.manual_seed(3)
    out = engine.generate(model, inputs, cache=cache, **options)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.scores, expected.scores, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-3, rtol=1e-4)
    assert torch.equal(torch.rand(1), drawn_after)  # the draw for the column that was discarded is undone
    assert discarded == ([1] if out.sequences.shape[1] < 13 + NEW else [])
    if cache != "none":
        assert out.cache.total_tokens == out.sequences.shape[1] - 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_cache_of_a_late_run_goes_on(late, name, cache):
    model, inputs = tiny_model(name), prompt(rows=1, pads=0)
    ends = ends_in_the_middle(model, inputs | {"input_ids": inputs["input_ids"].repeat(2, 1), "attention_mask": None})
    config = {"max_cache_len": 64} if cache == "static" else None
    first = engine.generate(model, inputs, cache=cache, cache_config=config, max_new_tokens=NEW, eos_token_id=ends[0])
    assert first.sequences.shape[1] < 13 + NEW
    second = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW)
    assert torch.equal(second.sequences, model.generate(first.sequences, max_new_tokens=NEW, do_sample=False))
    assert second.stats.prompt_tokens == 1
