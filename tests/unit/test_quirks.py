"""The table of models' quirks: its rows are so, and no other file names a family of models."""

import importlib
import inspect

import pytest
import transformers
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, randomised
from compared import comparisons
from packaging.version import Version
from transformers import CONFIG_MAPPING, GenerationMixin

import caches
import strategies
from caches.layers.quirks import _QUIRKS, Quirks, read_layers
from engine.model.model_runner import ModelRunner
from engine.model.rope_probe import check_rope

PUBLIC = "caches/__init__.py"  # classes with the names of transformers' own
MODELS = ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES
ROTATED = [name for name, quirks in _QUIRKS.items() if quirks.rotated is not Quirks().rotated]


def families():
    """All types of configurations of the installed release, those of models' parts included."""
    wholes = list(CONFIG_MAPPING.values())
    parts = [part for config in wholes for part in config.sub_configs.values()]
    return {getattr(config, "model_type", "") for config in wholes + parts}


def code_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def test_every_family_exists():
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this release of transformers does not know all of them")
    assert set(_QUIRKS) <= families()


def test_no_other_file_names_a_family():
    names = families() | set(_QUIRKS) | {name for name in dir(transformers) if name[:1].isupper()}
    names -= {*caches.names(), *strategies.names(), ""}
    assert not comparisons(names, {"caches/layers/quirks.py", PUBLIC}, set())


@pytest.mark.parametrize(("name", "has_windows"), [*((name, True) for name in ROTATED), ("exaone4", False)])
def test_keys_are_rotated_as_the_row_says(monkeypatch, name, has_windows):
    """Which two forwards of the model show."""
    config, options = MODELS[name]
    if not hasattr(transformers, config):
        pytest.skip("this release of transformers does not know it yet")
    if not has_windows:
        options = options | {"sliding_window": None, "layer_types": ["full_attention"] * options["num_hidden_layers"]}
    runner = ModelRunner(randomised(config, options))

    def check():
        check_rope(runner, caches.build("sink", runner.model.config, window_length=24))

    check()
    if has_windows:
        monkeypatch.delitem(_QUIRKS, name)
        with pytest.raises(caches.UnsupportedLayerError, match="not rotated as its configuration says"):
            check()


@pytest.mark.parametrize("name", [name for name, quirks in _QUIRKS.items() if quirks.generates_alike])
def test_a_row_about_generate_is_of_models_with_one_of_their_own(name):
    kinds = [kind for kind in vars(code_of(name)).values() if isinstance(kind, type) and kind.__module__.endswith(name)]
    assert [
        kind for kind in kinds if issubclass(kind, GenerationMixin) and kind.generate is not GenerationMixin.generate
    ]


def test_layers_that_others_read_are_in_their_code():
    for name, quirks in _QUIRKS.items():
        code = inspect.getsource(code_of(name)) if quirks.read_layers else ""
        assert all(f"self.{layer}.weight" in code for layer in quirks.read_layers), name
    assert read_layers() == {"dt_proj", "classifier"}
