"""The table of models' quirks: the families that it names exist, and no other file names one."""

import pytest
import transformers
from compared import comparisons
from packaging.version import Version
from transformers import CONFIG_MAPPING

import caches
import strategies
from caches.spec.quirks import _QUIRKS, Quirks, read_layers

PUBLIC = "caches/__init__.py"  # classes with the names of transformers' own


def families():
    """All types of configurations of the installed release, those of models' parts included."""
    wholes = list(CONFIG_MAPPING.values())
    parts = [part for config in wholes for part in config.sub_configs.values()]
    return {getattr(config, "model_type", "") for config in wholes + parts}


def test_every_family_exists():
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this release of transformers does not know all of them")
    assert set(_QUIRKS) <= families()


def test_every_row_says_something():
    assert Quirks() not in _QUIRKS.values()
    assert read_layers() == {"dt_proj", "classifier"}


def test_no_other_file_names_a_family():
    names = families() | set(_QUIRKS) | {name for name in dir(transformers) if name[:1].isupper()}
    names -= {*caches.names(), *strategies.names(), ""}
    assert not comparisons(names, {"caches/spec/quirks.py", PUBLIC}, set())
