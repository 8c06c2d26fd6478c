"""A type checker follows keys and values from the call of a model to the store that keeps them."""

import subprocess
import sys

import pytest
from places import ROOT

WAY = """
import torch
import caches
from caches.core.layer import Layer

def way(cache: caches.Cache, keys: torch.Tensor) -> None:
    reveal_type(cache.update)
    reveal_type(cache._used)
    reveal_type(cache.stack.layers)
    for layer in cache.stack.layers:
        reveal_type(layer.append)
        if isinstance(layer, Layer):
            for store in layer.stores.values():
                reveal_type(store)
                reveal_type(store.append)
                reveal_type(store.timeline)
"""


@pytest.mark.slow  # the type checker reads everything
def test_no_any_between_update_and_store(tmp_path):
    (tmp_path / "way.py").write_text(WAY)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "way.cache"]
    done = subprocess.run([*command, "way.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    shown = [line.split("Revealed type is ")[1] for line in done.stdout.splitlines() if "Revealed type is" in line]
    assert len(shown) == 7, done.stdout + done.stderr
    named, _, rest = shown[0].partition(", *args: Any, **kwargs: Any")  # further arguments of older releases
    assert not [line for line in [named, rest, *shown[1:]] if "Any" in line], shown
    assert "Tensor" in named
    assert "Layer" in shown[1]
