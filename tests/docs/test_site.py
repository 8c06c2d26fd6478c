"""The site builds without a warning, and nothing that it loads comes from the network."""

import re
import subprocess
import sys

import pytest
from places import ROOT

pytest.importorskip("mkdocs")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//"""
)


@pytest.mark.slow
def test_the_site(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text()
        assert not LOADED.search(text), page
        assert 'class="mermaid"' not in text, page  # the theme would fetch its program
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style
