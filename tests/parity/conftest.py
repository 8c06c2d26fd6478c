import pytest

from caches.timeline.timeline import Timeline


@pytest.fixture(autouse=True)
def _short_buffers(monkeypatch):
    """Short texts reach the end of a window's buffer, and what it holds moves to the front."""
    monkeypatch.setattr(Timeline, "slack", 2)
