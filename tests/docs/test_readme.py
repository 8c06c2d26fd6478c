"""Everything the README shows is run, and what it states is compared with where it comes from."""

import hashlib
import json
import os
import re
import shlex
import statistics
import textwrap

import pytest
from helpers import in_terminal
from places import ROOT

import configs
import engine
from caches import registry

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def test_python_blocks(capsys, monkeypatch):
    """In order, each with the names of those before it: what prints shows something. What they register is undone."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    monkeypatch.setattr(configs.CacheConfig, "_by_name", dict(configs.CacheConfig._by_name))
    names: dict = {}
    assert len(blocks("python")) >= 6
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
        assert bool(capsys.readouterr().out.strip()) == ("print(" in block), block


def test_every_stream_that_is_printed_has_text(shipped):
    """Of one that is printed in pieces: its end alone would be some output too."""
    calls = re.findall(r"for piece in gen\.(stream\(.*\)):\n    print\(", README)
    assert len(calls) >= 2
    for call in calls:
        assert "".join(piece.text for piece in eval(f"shipped.{call}")).strip(), call


def test_no_example_needs_the_checkout():
    for block in blocks("python") + blocks("sh") + blocks("console"):
        assert "engine/shipped" not in block


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


@pytest.mark.slow
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


RESULTS = ROOT / "benchmarks" / "results"


def machine(report):
    return (
        f"{report['processor']}, {report['threads']} threads, torch {report['torch']}, transformers "
        f"{report['transformers']}"
    )


def speed_table(report):
    cases = report["cases"]
    assert all(same for case in cases for same in case["same_text"].values())
    lines = [
        f"{machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s; ms per token, median (least to most).\n",
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


def memory_table(report):
    cases = report["cases"]
    assert not report["left_out"]
    assert all(row["same_text"] is not False for case in cases for row in case["rows"].values())
    longest = cases[-1]
    lines = [
        f"{machine(report)}; {longest['context']} tokens. Bytes per token are those of what is kept, by arithmetic and "
        "as measured with room for more.\n",
        "| cache | by arithmetic | measured | of keys and values in full | with scratch | peak of the process, MB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in longest["rows"].items():
        lines.append(
            f"| {name} | {row['predicted_bytes_per_token']:,.0f} | {row['bytes_per_token']:,.0f} | "
            f"{row['of_full']:.1%} | {row['of_full_with_scratch']:.1%} | {row['peak_bytes'] / 1e6:,.0f} |"
        )
    lines += [
        f"\nms per token, median (least to most) of {report['new_tokens']} steps; x is how many times faster than "
        "transformers' cache of the same kind and library.\n",
        "| context | " + " | ".join(f"{case['context']} | x" for case in cases) + " |",
        "|---|" + "---|--:|" * len(cases),
        "| floor: reading weights and full cache once | "
        + " | ".join(f"{case['floor_ms']:.1f} | " for case in cases)
        + " |",
    ]
    for name in longest["rows"]:
        cells = []
        for row in (case["rows"][name] for case in cases):
            times = "" if row["times_peer"] is None else f"{row['times_peer']:.2f}"
            cells.append("{median:.1f} ({least:.1f} to {most:.1f})".format(**row["ms"]) + f" | {times}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def quality_table(report):
    codecs, stream = report["codecs"], report["stream"]
    lines = [
        f"{machine(report)}; {report['texts']} texts of {report['text_tokens']} tokens, the last "
        f"{report['residual_length']} tokens (and up to a block more) in full.\n",
        "| cache | bits per byte | perplexity per token | beside dynamic | bytes per encoded token |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, taken in codecs.items():
        change = taken["perplexity"] / codecs["dynamic"]["perplexity"] - 1
        lines.append(
            f"| {name} | {taken['bits_per_byte']:.4f} | {taken['perplexity']:,.3f} | {change:+.2%} | "
            f"{taken['bytes_per_token']:,.0f} |"
        )
    windows, width = stream["windows"], stream["windows"] // 5
    lines += [
        f"\nPerplexity of one text of {windows} windows of {stream['window']} tokens:\n",
        "| cache | "
        + " | ".join(f"windows {begin + 1} to {begin + width}" for begin in range(0, 5 * width, width))
        + " | all, to inside the window | bytes |",
        "|---|" + "--:|" * 7,
    ]
    assert "sink" in stream["perplexity"]
    for name, per_window in stream["perplexity"].items():
        parts = [per_window[begin : begin + width] for begin in range(0, 5 * width, width)]
        cells = [f"{statistics.geometric_mean(part):.2f}" if len(part) == width else "" for part in parts]
        ratio = stream["to_inside_the_window"].get(name)
        held = sorted(set(stream["least_and_most_bytes"].get(name, [])))
        cells += ["" if ratio is None else f"{ratio:.3f}", " to ".join(f"{size:,}" for size in held)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def branching_table(report):
    cases = report["cases"]
    assert not report["quick"]
    assert all(case["same_text"] for name, case in cases.items() if "beams" in name)
    lines = [
        f"{machine(report)}, {report['bandwidth_gb_per_s']:.0f} GB/s; seconds of a whole call, median (least to most) "
        f"of {report['runs']}, prompt included; x is how many times faster than the peer.\n",
        "| | prompt + new | ours | x | cache MB | peak MB | peer | seconds | cache MB | peak MB |",
        "|---|---|---|--:|--:|--:|---|---|--:|--:|",
    ]
    for name, case in cases.items():
        [peer] = [other for other in case["engines"] if other != "ours"] or [None]
        cells = [f"{case['prompt']} + {case['new']}"]
        for engine_name in ("ours", peer):
            if engine_name is None:
                cells += ["-", "", "", ""]
                continue
            row = case["engines"][engine_name]
            seconds = "{median:.2f} ({least:.2f} to {most:.2f})".format(**row["whole_s"])
            size = f"{row['cache_bytes'] / 1e6:,.0f}"
            peak = f"{row['peak_bytes'] / 1e6:,.0f}" if "peak_bytes" in row else ""
            times = "" if case["times_peer"] is None else f"{case['times_peer']:.2f}"
            cells += [seconds, times, size, peak] if engine_name == "ours" else [peer, seconds, size, peak]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def assisted_table(report):
    engines = ("proposed", "greedy", "transformers, greedy", "transformers, proposed")
    lines = [
        f"{machine(report)}; seconds of a whole call, median (least to most) of {report['runs']}, prompt included.\n",
        f"| | prompt + new | accepted | tokens per forward | {' | '.join(engines)} |",
        "|---|---|--:|--:|---|---|---|---|",
    ]
    for name, case in report["cases"].items():
        assert case["same_text"]
        cells = [f"{case['prompt']} + {case['new']}", f"{case['acceptance']:.0%}"]
        cells.append(f"{case['tokens_per_verification']:.2f}")
        for engine_name in engines:
            row = case["engines"].get(engine_name)
            cells.append("-" if row is None else "{median:.2f} ({least:.2f} to {most:.2f})".format(**row["whole_s"]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def out_of_memory_table(report):
    lines = [
        f"{machine(report)}; seconds of a whole call.\n",
        "| | rows x prompt + new | memory beyond the model | with all memory | transformers | ours | fallbacks |",
        "|---|---|--:|--:|---|---|---|",
    ]
    for name, case in report["cases"].items():
        ours = case["engines"]["ours"]
        assert ours["same_text"] or any(taken["name"] == "quantize" for taken in ours["fallbacks"])
        told = [
            "out of memory" if run["error"] else f"{run['seconds']:.1f} s{'' if run['same_text'] else ', another text'}"
            for run in case["engines"].values()
        ]
        cells = [f"{case['rows']} x {case['prompt']} + {case['new']}", f"{case['more_mb']} MB"]
        cells += [
            f"{case['unlimited_s']:.1f} s",
            *told,
            ", ".join(taken["name"] for taken in ours["fallbacks"]) or "none needed",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    first = next(iter(report["cases"].values()))
    log = "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in first["engines"]["ours"]["log"])
    lines.append(f"\nWhat was logged in the first of them:\n\n```\n{log}\n```")
    return "\n".join(lines) + "\n"


TABLES = {
    "out_of_memory": ("out-of-memory-cpu", out_of_memory_table),
    "assisted": ("assisted-cpu", assisted_table),
    "branching": ("branching-cpu", branching_table),
    "speed": ("decode-cpu", speed_table),
    "memory": ("memory-cpu", memory_table),
    "memory_long": ("memory-long-cpu", memory_table),
    "quality": ("quality-cpu", quality_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_figures_are_those_measured(name):
    results, table = TABLES[name]
    table = table(json.loads((RESULTS / f"{results}.json").read_text()))
    text = (ROOT / "README.md").read_text()
    [found] = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, flags=re.S)
    if os.environ.get("UPDATE_README"):
        (ROOT / "README.md").write_text(text.replace(f"<!-- {name} -->\n{found}", f"<!-- {name} -->\n{table}"))
    else:
        assert found == table


@pytest.mark.parametrize("name", ["branching-cpu", "decode-cpu", "quality-cpu"])
def test_the_plot_is_of_these_results(name):
    assert f"](benchmarks/results/{name}.svg)" in README
    digest = hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()
    assert digest in (RESULTS / f"{name}.svg").read_text()


def test_the_presets_are_named():
    [line] = re.findall(r"^configs\.presets\(\)  # (.*)$", README, flags=re.M)
    assert line == ", ".join(f'"{name}"' for name in configs.presets())


def test_the_number_of_architectures():
    from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES
    from encoder_decoders import ENCODER_DECODERS
    from multimodal import MULTIMODAL

    known = [*(ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES | MULTIMODAL), *ENCODER_DECODERS]
    assert f"compare {len(known)} architectures" in README
