"""The site builds without a warning, and nothing that it loads comes from the network."""

import json
import re
import shutil
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
    check_search_of_files(tmp_path)
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style


def check_search_of_files(site):
    """The index is a script, which pages that were opened as files can load; with Node it is searched."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = ")
    assert "assets/iframe-worker.js" in (site / "guide" / "generate.html").read_text()
    if (node := shutil.which("node")) is not None:
        command = [node, str(ROOT / "tests" / "docs" / "search_in_files.js"), str(site), "attention sinks"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "guide/sliding-and-sinks.html" in json.loads(done.stdout)[:5], done.stderr
