"""Everything the README shows is run, and what it states is compared with where it comes from."""

import json
import re
import shlex
from pathlib import Path

import pytest

import engine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def test_python_blocks(capsys):
    """In order, each with the names of those before it."""
    names: dict = {}
    assert len(blocks("python")) >= 6
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert capsys.readouterr().out


def test_shell_blocks(cli):
    commands = [line for block in blocks("sh") for line in block.splitlines() if line]
    assert len(commands) == 4
    for command in commands:
        if command.startswith("make "):  # run by CI itself
            target = command.removeprefix("make ")
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)
            assert command in (ROOT / ".ci" / "run").read_text().splitlines()
            continue
        piped, _, command = command.rpartition(" | ")
        words = shlex.split(command)
        assert words[0] == "engine"
        result = cli(words[1:], input=shlex.split(piped)[1] + "\n" if piped else None)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()


@pytest.mark.parametrize("file", re.findall(r"`((?:benchmarks|tests|engine|caches)/\w+\.py)`", README))
def test_files_it_names_exist(file):
    assert (ROOT / file).exists()


def test_the_shipped_models_figures(shipped):
    report = json.loads((engine.SHIPPED_MODEL / "training.json").read_text())
    assert f"{report['held_out_bits_per_byte']:.2f} bits per byte" in README
    assert f"{report['xz_bits_per_byte']:.2f}" in README
    model = shipped.model
    assert f"{model.num_parameters() / 1e6:.1f} million parameters" in README
    assert f"vocabulary of {model.config.vocab_size}" in README
    script = (ROOT / "benchmarks" / "train_shipped_model.py").read_text()
    assert f"--steps {report['steps']}" in script


def test_the_number_of_architectures():
    from architectures import ARCHITECTURES, MORE_ARCHITECTURES

    assert f"compare {len(ARCHITECTURES | MORE_ARCHITECTURES)} architectures" in README
