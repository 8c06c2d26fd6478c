"""Random histories notice each of these breakages of what keeps caches of changed models from being used."""

from dataclasses import replace

import changed
import pytest

import caches
from caches.layers import read_by
from caches.layers.model_version import ModelVersion
from caches.layers.read_by import ReadBy

_version_of = read_by.model_version


def without(**parts):
    return read_by, "model_version", lambda model: replace(_version_of(model), **parts)


BREAKAGES = {
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


QUICK = {"no caller asks", "weights are not read", "a freed model is like any"}


@pytest.mark.parametrize(
    "breakage", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in BREAKAGES]
)
def test_a_breakage_is_noticed(breakage, monkeypatch):
    monkeypatch.setattr(*BREAKAGES[breakage])
    for seed in range(500):
        try:
            changed.run([seed])
        except AssertionError:
            return
    pytest.fail("500 histories were all right")
