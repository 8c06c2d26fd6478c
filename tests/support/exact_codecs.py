"""Codecs that lose nothing, so that blocks are compared exactly."""

from __future__ import annotations

import pytest
import torch

from caches import backends
from caches.attention.segments import DenseSegment


class Exactly:
    """Columns as what they are more than the first one of their block: whole numbers stay exact in float64."""

    block = 4  # of as many columns, and never a whole step

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return hash(type(self))

    def has_kernel(self, dense):
        return False

    def encode(self, columns):
        blocks = columns.unflatten(2, (-1, self.block))
        return {"codes": (blocks - blocks[:, :, :, :1]).flatten(2, 3), "first": blocks[:, :, :, 0]}

    def decode(self, parts, place, in_codes):
        out, _ = place()
        firsts = parts["first"].repeat_interleave(self.block, dim=2)[:, :, : out.shape[2]]
        return DenseSegment(torch.add(parts["codes"], firsts, out=out))

    def per_block(self, name):
        return name != "codes"


class AsTheyAre(Exactly):
    """Columns themselves, exact for any number, and one number per block that would be wrong in any other place."""

    def encode(self, columns):
        sums = columns.unflatten(2, (-1, self.block)).sum(dim=3)
        return {"codes": columns, "sums": sums}

    def decode(self, parts, place, in_codes):
        out, _ = place()
        out.copy_(parts["codes"])
        for number in range(out.shape[2] // self.block):
            whole = parts["codes"][:, :, number * self.block : (number + 1) * self.block]
            assert torch.allclose(whole.sum(dim=2), parts["sums"][:, :, number], atol=1e-4)
        return DenseSegment(out)


@pytest.fixture
def exactly(monkeypatch):
    monkeypatch.setattr(backends, "new_codec", lambda options, name: Exactly())


@pytest.fixture
def as_they_are(monkeypatch):
    monkeypatch.setattr(backends, "new_codec", lambda options, name: AsTheyAre())
