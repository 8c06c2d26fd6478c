"""`engine.__version__`, installed and in a checkout, and the license."""

import importlib.metadata
import re
import subprocess
import sys

from places import ROOT

import engine
from engine import version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DECLARED = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)[1]


def test_it_is_that_of_the_installed_package(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"kvengine": "7.8.9"}[name])
    monkeypatch.delitem(sys.modules, "engine.version")
    assert engine.__version__ == "7.8.9"


def test_without_an_installation_it_says_so(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(sys.modules, "engine.version")
    assert engine.__version__ == f"{DECLARED}+unknown"


def test_here():
    assert version.__version__.startswith(DECLARED)


def test_it_is_looked_up_late():
    """`import engine` reads no metadata; asking for the version imports no torch."""
    script = (
        "import sys, engine; assert 'engine.version' not in sys.modules;"
        "print(engine.__version__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [version.__version__, "False"]


def test_the_license_is_apache_2():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    texts = [(ROOT / file).read_text() for file in project["license-files"]]
    assert ["Apache License" in text and "Version 2.0, January 2004" in text for text in texts] == [True]
    assert "END OF TERMS AND CONDITIONS" in texts[0]
