import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoTokenizer

import engine

torch.set_num_threads(1)  # on models this small, threads only wait for each other


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shipped() -> engine.Generator:
    """A generator of the model that ships with the package."""
    return engine.Generator(engine.SHIPPED_MODEL)


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)


@pytest.fixture
def cli():
    """Runs `engine ...` in this process: a function of its arguments, with `exit_code`, `stdout`, `stderr`."""
    from typer.testing import CliRunner

    from engine.cli import app

    runner = CliRunner()
    return lambda arguments, input=None: runner.invoke(app, arguments, input=input)
