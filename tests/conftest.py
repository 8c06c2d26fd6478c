import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On models this small threads only wait for each other, in the commands that tests start too.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import getpass
import io
import json
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from covering import keep_default_cells, mark_surplus
from damage import DAMAGES
from exact_codecs import as_they_are, exactly  # noqa: F401 - fixtures
from transformers import AutoTokenizer
from trial import Trial

import engine
from caches.platform.machine import write_atomically
from engine.kernels import linear_routes

# Kernels are compiled once and kept; which matrix product is the fastest is not measured here, in no command either.
os.environ.setdefault("KVENGINE_CACHE", str(Path(tempfile.gettempdir()) / f"kvengine-tests-{getpass.getuser()}"))
_FASTEST = ["torch", "mm", "onednn", "swapped", "swapped", "onednn", "torch"]
_SHAPES = ("704x256", "256x704", "4096x256")  # of the model that ships with the package


def pytest_configure():
    write_atomically(linear_routes.path(), json.dumps(dict.fromkeys(_SHAPES, _FASTEST)).encode())


def pytest_addoption(parser):
    parser.addoption("--damage", choices=list(DAMAGES), help="break the engine like this: tests must fail")


@pytest.fixture(autouse=True)
def _damaged(request, monkeypatch):
    if name := request.config.getoption("--damage"):
        DAMAGES[name](monkeypatch)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    if "not slow" in metafunc.config.option.markexpr:
        keep_default_cells(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_surplus(items)


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """What is there before a file of tests is not looked through by collections: libraries are a million objects."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ctrl_c_is_pythons():
    """A shell ignores it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shipped() -> engine.Generator:
    """A generator of the model that ships with the package."""
    return engine.Generator(engine.SHIPPED_MODEL)


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)


@dataclass(frozen=True)
class Done:
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs `engine ...` in this process: a function of its arguments, and of what is piped into it."""
    from engine.cli import main

    def run(arguments, input=""):
        piped = input if isinstance(input, bytes) else input.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Done(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(params=[1, 3], ids=lambda rows: f"{rows} rows")
def rows(request):
    return request.param


@pytest.fixture
def trial(backend, kind, request):
    """A cache for one cell of the contract, with as many rows as the test asks for."""
    return Trial(backend, kind, request.getfixturevalue("rows") if "rows" in request.fixturenames else 3)
