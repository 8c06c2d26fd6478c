"""`engine bench`: the lower bound and the time of a step, and how far lossy probabilities are from those in full."""

from __future__ import annotations

import json
import math

import pytest
import torch

import engine
from engine.measuring import decoding
from engine.measuring.decoding import read_bytes, step_time
from engine.measuring.quality import Reference, engine_reader

TEXT = (engine.SHIPPED_MODEL / "training.json").read_text()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(decoding, "bandwidth", lambda device: 1e9)


def numbered(logits):
    """A reader whose logits are given, [rows, tokens, words]; in pieces of 3 tokens."""

    def read(ids, record):
        for row in range(ids.shape[0]):
            for begin in range(0, ids.shape[1] - 1, 3):
                record(slice(row, row + 1), begin, logits[row : row + 1, begin : min(begin + 3, ids.shape[1] - 1)])

    return read


def test_divergence_is_that_of_its_definition():
    torch.manual_seed(0)
    ids = torch.randint(7, (2, 11))
    full, lossy = torch.randn(2, 10, 7), torch.randn(2, 10, 7)
    reference = Reference(ids, numbered(full), skipped=4)
    measured = reference.compare(numbered(lossy))
    p, q = full[:, 4:].double().log_softmax(-1), lossy[:, 4:].double().log_softmax(-1)
    nats = -q.gather(-1, ids[:, 5:, None]).mean()
    assert measured.tokens == 12
    assert measured.perplexity == pytest.approx(math.exp(nats), rel=1e-5)
    assert measured.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    assert measured.same_top == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert (reference.full.kl, reference.full.same_top) == (pytest.approx(0, abs=1e-8), 1)


def test_the_perplexity_in_full_is_that_of_scores(shipped):
    ids = torch.tensor([shipped.tokenizer(TEXT)["input_ids"][:60]] * 2)
    ids[1] = ids[1].flip(0)
    reference = Reference(ids, engine_reader(shipped.generate), skipped=0)
    logprobs = [logprob for score in shipped.score(ids.tolist()) for logprob in score.logprobs]
    assert reference.full.perplexity == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-4)
    cut = reference.compare(engine_reader(lambda *given, **more: shipped.generate(
        *given, **more, cache="sliding_window", cache_config={"window_length": 8})))  # fmt: skip
    assert cut.kl > 0.01
    assert cut.same_top < 1
    exact = reference.compare(engine_reader(lambda *given, **more: shipped.generate(*given, **more, cache="static")))
    assert exact.kl < 1e-6


def test_what_a_step_reads(shipped):
    model = shipped.model
    assert model.config.tie_word_embeddings
    assert read_bytes(model) == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    step = step_time(shipped, 8, 4)
    assert step.floor_ms == pytest.approx((step.weight_bytes + step.cache_bytes) / 1e6)
    assert step.cache_bytes == 6144 * 64  # the room that a growing cache begins with
    assert 0 < step.least_ms <= step.ms <= step.most_ms
    assert step.share == step.floor_ms / step.ms


def test_the_command(cli, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    done = cli(["bench", "--prompt-tokens", "8", "-n", "3", "--weights", "int4", "--quality", str(text), "--json"])
    report = json.loads(done.stdout)
    assert report["step"]["ms"] > 0
    assert report["quality"]["kl"] > 1e-3
    assert report["quality"]["perplexity"] != report["quality"]["full_perplexity"]
    shown = cli(["bench", "--prompt-tokens", "8", "-n", "3"]).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["weights", "cache", "bandwidth", "lower", "measured"]
    text.write_text("a short text")
    done = cli(["bench", "--quality", str(text)])
    assert done.exit_code == 2
    assert "give a text of 128 or more" in done.stderr
