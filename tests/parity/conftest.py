import copy
from types import SimpleNamespace

import pytest
from architectures import tiny_model
from compiled import generator_of

from caches.timeline.timeline import Timeline
from engine.compiling import layer_compiler


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch):
    """Short texts reach the end of a window's buffer, and what it holds moves to the front."""
    monkeypatch.setattr(Timeline, "slack", 2)


@pytest.fixture
def llama():
    """A model of its own, whose layers are compiled."""
    model = copy.deepcopy(tiny_model("llama"))
    generator_of(model)
    return model


@pytest.fixture
def builds_nothing(llama, monkeypatch):
    """Packages beside those of `llama` never come: building one takes half a minute of a processor."""
    builder = SimpleNamespace(poll=lambda: None, wait=lambda: None)
    monkeypatch.setattr(layer_compiler, "start_building", lambda steps, linears: builder)
