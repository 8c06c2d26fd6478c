"""The longest common beginning among many sequences, beside a search through all of them."""

import random
from types import SimpleNamespace

import pytest

from engine.reuse.token_index import TokenIndex, common


def entry(*ids):
    return SimpleNamespace(ids=tuple(ids))


@pytest.mark.parametrize("seed", range(20))
def test_beside_a_search_through_all(seed):
    draw = random.Random(seed)
    index, known = TokenIndex(), {}

    def sequence(most=8):
        return tuple(draw.randrange(3) for _ in range(draw.randint(0, most)))

    for _ in range(200):
        if known and draw.random() < 0.3:
            index.remove(known.pop(draw.choice(sorted(known))))
        else:
            added = entry(draw.randrange(3), *sequence())
            if added.ids not in known:
                known[added.ids] = added
                index.add(added)
        ids = sequence(10)
        found, tokens = index.nearest(ids)
        longest = max((sum(1 for _ in _same(one, ids)) for one in known), default=0)
        assert tokens == longest
        assert (found is None) == (longest == 0)
        assert found is None or found.ids[:tokens] == ids[:tokens]
        whole = sorted((one for one in known if ids[: len(one)] == one), key=len, reverse=True)
        assert [one.ids for one in index.beginnings(ids)] == whole
        assert len(index) == len(known)


def _same(one, other):
    for left, right in zip(one, other, strict=False):
        if left != right:
            return
        yield left


def test_what_both_begin_with():
    for one, other, expected in [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 2), 2), ((2, 1), (1, 1), 0)]:
        assert common(one, other) == common(other, one) == expected
