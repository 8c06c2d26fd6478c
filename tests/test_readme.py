"""Everything the README shows is run, and what it states is compared with where it comes from."""

import hashlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from support import in_terminal

import configs
import engine
from caches import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def test_python_blocks(capsys, monkeypatch):
    """In order, each with the names of those before it. What they register is gone afterwards."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(configs.CacheConfig, "_by_name", dict(configs.CacheConfig._by_name))
    names: dict = {}
    assert len(blocks("python")) >= 6
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert capsys.readouterr().out


def test_shell_blocks(cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line]
    assert len(commands) >= 4
    for command in commands:
        if command.startswith("make "):  # run by CI itself
            target = command.removeprefix("make ")
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)
            assert command in (ROOT / ".ci" / "run").read_text().splitlines()
            continue
        piped, _, command = command.rpartition(" | ")
        words = shlex.split(command)
        assert words[0] == "engine"
        result = cli(words[1:], input=shlex.split(piped)[1] + "\n" if piped else "")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()


def shown_by(command):
    """What a command leaves on a terminal, times taken out."""
    shown, _ = in_terminal(["bash", "-c", command], columns=100)
    shown = shown.rpartition("\x1b[1A\x1b[2K")[2]  # where the progress line was erased
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown).replace("\r", "")


def without_times(text):
    lines = re.sub(r"\d+\.\d (ms|tokens/s)", r"... \1", text).splitlines()
    return [line.rstrip() for line in lines]


def test_the_transcript_is_what_a_terminal_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    [block] = blocks("console")
    commands = re.findall(r"^\$ (.*)", block, flags=re.M)
    assert len(commands) >= 3
    found = "".join(f"$ {command}\n{shown_by(command)}" for command in commands)
    if os.environ.get("UPDATE_README"):
        found = "\n".join(line.rstrip() for line in found.splitlines()) + "\n"
        (ROOT / "README.md").write_text((ROOT / "README.md").read_text().replace(block, found))
    else:
        assert without_times(found) == without_times(block)


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


RESULTS = ROOT / "benchmarks" / "results" / "decode-cpu.json"


def speed_table():
    report = json.loads(RESULTS.read_text())
    cases = report["cases"]
    assert all(same for case in cases for same in case["same_text"].values())
    lines = [
        f"{report['processor']}, {report['threads']} threads, torch {report['torch']}, transformers "
        f"{report['transformers']}, {report['bandwidth_gb_per_s']:.0f} GB/s; ms per token, median (least to most).\n",
        "| | " + " | ".join(f"prompt {case['prompt_tokens']}" for case in cases) + " |",
        "|---|" + "---|" * len(cases),
        "| floor: reading weights and cache once | " + " | ".join(f"{case['floor_ms']:.1f}" for case in cases) + " |",
    ]
    for name in cases[0]["engines_ms"]:
        taken = [case["engines_ms"][name] for case in cases]
        cells = [f"{t['median']:.1f} ({t['least']:.1f} to {t['most']:.1f})" for t in taken]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["\nWhere a step of `dynamic` spends its time, in ms:\n", lines[1], lines[2]]
    for name in cases[0]["step_ms"]:
        lines.append(f"| {name} | " + " | ".join(f"{case['step_ms'][name]:.2f}" for case in cases) + " |")
    overhead = report["loop_overhead_ms"]
    lines.append(
        "\nThe loop itself, everything outside `model(...)`, on a model of 4 layers, 256 wide: "
        + ", ".join(f"{name} {taken['median']:.2f} ms" for name, taken in overhead.items())
        + " per token."
    )
    return "\n".join(lines) + "\n"


def test_the_speeds_are_those_measured():
    found = re.search(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", README, flags=re.S).group()
    if os.environ.get("UPDATE_README"):
        (ROOT / "README.md").write_text(README.replace(f"<!-- speed -->\n{found}", f"<!-- speed -->\n{speed_table()}"))
    else:
        assert found == speed_table()


def test_the_plot_is_of_these_results():
    assert "](benchmarks/results/decode-cpu.svg)" in README
    assert hashlib.sha256(RESULTS.read_bytes()).hexdigest() in RESULTS.with_suffix(".svg").read_text()


def test_the_presets_are_named():
    [line] = re.findall(r"^configs\.presets\(\)  # (.*)$", README, flags=re.M)
    assert line == ", ".join(f'"{name}"' for name in configs.presets())


def test_the_number_of_architectures():
    from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES
    from encoder_decoders import ENCODER_DECODERS
    from multimodal import MULTIMODAL

    known = [*(ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES | MULTIMODAL), *ENCODER_DECODERS]
    assert f"compare {len(known)} architectures" in README
