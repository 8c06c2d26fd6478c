"""Draw the results of `decode.py`, `quality.py`, `branching.py`, `scaling.py` or `many.py`.

    python benchmarks/plot.py benchmarks/results/amd-epyc-avx512/decode-cpu.json

Needs matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.rcParams["svg.hashsalt"] = "kvengine"  # the same results give the same file
LOSSLESS = 1e-6  # nats: KL of another order of sums
OURS, THEIRS, ALARM = "#2f6fab", "#9aa5b1", "#c0392b"


def draw_decode(found: dict[str, Any]) -> Figure:
    cases = found["cases"]
    figure, axes = plt.subplots(1, len(cases), figsize=(11, 3.2), sharey=True, layout="constrained")
    for case, axis in zip(cases, axes, strict=True):
        names = list(case["engines_ms"])[::-1]
        taken = [case["engines_ms"][name] for name in names]
        medians = [t["median"] for t in taken]
        errors = [[t["median"] - t["least"] for t in taken], [t["most"] - t["median"] for t in taken]]
        colours = [THEIRS if name.startswith(("transformers", "llama.cpp")) else OURS for name in names]
        axis.barh(names, medians, xerr=errors, color=colours, error_kw={"ecolor": "#333333", "capsize": 2, "lw": 1})
        axis.axvline(case["floor_ms"], color=ALARM, lw=1.2, ls="--", label="floor: memory read once")
        axis.set_xlim(0, 1.3 * max(medians))  # one bad run must not hide the others
        axis.set_title(f"prompt of {case['prompt_tokens']} tokens", fontsize=10)
        axis.set_xlabel("ms per token (less is better)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def draw_quality(found: dict[str, Any]) -> Figure:
    """KL over bits: caches, weights, and the stream where there is one."""
    figure, axes = plt.subplots(1, 3 if "stream" in found else 2, figsize=(11, 3.8), layout="constrained")
    draw_caches(axes[0], found)
    draw_weights(axes[1], found)
    for axis in axes[:2]:
        axis.set_yscale("log")
        axis.set_ylabel("KL to the model in full, nats per token (less is better)")
    if "stream" in found:
        draw_stream(axes[2], found["stream"])
        axes[2].set_ylabel("perplexity (less is better)")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def draw_caches(axis: Axes, found: dict[str, Any]) -> None:
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in found["caches"].items():
        families[re.sub(r", (\d+ bits?|1/\d+)", "", name)][name] = row
    families["llama.cpp"] = found["peer"].get("model", {}).get("caches", {})
    draw_families(axis, families)
    axis.set_xlabel(f"bits per value after {found['text_tokens']:,} tokens")


def draw_weights(axis: Axes, found: dict[str, Any]) -> None:
    families = {}
    for name, rows in found["weights"].items():
        twin = ", twin on no grid" if name == "twin" else ""
        families |= {f"kvengine{twin}": rows, f"llama.cpp{twin}": found["peer"].get(name, {}).get("weights", {})}
    draw_families(axis, families)
    axis.set_xlabel("bits per weight")


def draw_families(axis: Axes, families: dict[str, dict[str, Any]]) -> None:
    """A line for each through its sizes, without what loses nothing."""
    for number, (name, rows) in enumerate(families.items()):
        points = sorted((row["bits"], row["kl"]) for row in rows.values() if row["kl"] > LOSSLESS)
        if points:
            theirs = name.startswith(("transformers", "llama.cpp"))
            style = {"color": THEIRS if name.startswith("transformers") else "#333333"} if theirs else {}
            dash = ":" if "twin" in name or name.startswith("transformers") else "-"
            axis.plot(*zip(*points, strict=True), marker="^" if theirs else "os"[number % 2], ms=4, lw=1, ls=dash,
                      label=name, **style)  # fmt: skip
    axis.legend(frameon=False, fontsize=6)


def draw_stream(axis: Axes, found: dict[str, Any]) -> None:
    names = {"sink": OURS, "sliding_window": "#e08e0b", "dynamic": "#3a7d44", "inside the window": THEIRS}
    for name, colour in names.items():
        values = found["perplexity"].get(name, [])
        # Texts differ from window to window far more than caches do: eight windows are taken together.
        smooth = [math.exp(sum(map(math.log, part)) / len(part)) for part in runs(values, 8)]
        positions = [found["window"] * (number + 1) for number in range(len(values))]
        axis.plot(positions, smooth, color=colour, lw=1.4, ls="--" if name == "inside the window" else "-", label=name)
    axis.axvline(found["trained_positions"], color=ALARM, lw=1, ls=":", label="end of the trained positions")
    axis.set_yscale("log")
    axis.set_xlabel(f"tokens of the stream (window of {found['window']}, {found['sinks']} sinks)")
    axis.legend(frameon=False, fontsize=7)


def runs(values: list[float], size: int) -> list[list[float]]:
    """For every value it and those before it, at most `size` together."""
    return [values[max(0, end - size) : end] for end in range(1, len(values) + 1)]


def draw_branching(found: dict[str, Any]) -> Figure:
    """Over the number of beams: seconds of a whole call, and bytes of the cache."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    for name, colour in (("transformers", THEIRS), ("ours", OURS)):
        points = [(int(number), case["engines"][name]) for number, case in found["curve"].items()
                  if name in case["engines"]]  # fmt: skip
        numbers = [number for number, _ in points]
        taken = [row["whole_s"] for _, row in points]
        medians = [t["median"] for t in taken]
        errors = [[t["median"] - t["least"] for t in taken], [t["most"] - t["median"] for t in taken]]
        axes[0].errorbar(numbers, medians, yerr=errors, color=colour, marker="o", ms=4, lw=1.4, capsize=2, label=name)
        axes[1].plot(numbers, [row["cache_bytes"] / 1e6 for _, row in points], color=colour, marker="o", ms=4, lw=1.4,
                     label=name)  # fmt: skip
    case = next(iter(found["curve"].values()))
    for axis, label in zip(axes, ("seconds (less is better)", "MB of the cache (less is better)"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([int(number) for number in found["curve"]], labels=list(found["curve"]))
        axis.set_xlabel(f"beams (prompt of {case['prompt']} tokens, {case['new']} new)")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def draw_scaling(found: dict[str, Any]) -> Figure:
    """ms of a step over the context, the rows and the beams, each with the exponent of its upper half."""
    figure, axes = plt.subplots(1, len(found["curves"]), figsize=(11, 3.4), layout="constrained")
    colours = {"transformers": THEIRS, "dynamic": OURS}
    for (name, curve), axis in zip(found["curves"].items(), axes, strict=True):
        for engine_name, exponents in curve["exponents"].items():
            taken = [(int(size), point[engine_name]["ms"]["median"]) for size, point in curve["points"].items()
                     if engine_name in point]  # fmt: skip
            axis.plot(*zip(*taken, strict=True), color=colours.get(engine_name, "#e08e0b"), marker="o", ms=4, lw=1.4,
                      label=f"{engine_name}: exponent {exponents['ms']:.2f}")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel({"context": "tokens of the context"}.get(name, name))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("ms per step (less is better)")
    return figure


def draw_many(found: dict[str, Any]) -> Figure:
    """Tokens per second over the number of slots; transformers' ways as lines across."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    slots = {int(name.split()[0]): case for name, case in found["cases"].items() if name.endswith(" slots")}
    axis.plot(list(slots), [case["tokens_per_s"] for case in slots.values()], color=OURS, marker="o", label="ours")
    peers = {name: case for name, case in found["cases"].items() if not name.endswith(" slots")}
    for (name, case), style in zip(peers.items(), ("-", "--", ":"), strict=True):
        axis.axhline(case["tokens_per_s"], color=THEIRS, ls=style, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(slots), labels=[str(number) for number in slots])
    axis.set_xlabel("slots: rows that decode at once")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("new tokens per second (more is better)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure


DRAWERS = {
    "decode": draw_decode, "quality": draw_quality, "branching": draw_branching, "scaling": draw_scaling,
    "many": draw_many,
}  # fmt: skip


def main(results: Path) -> None:
    found = json.loads(results.read_text())
    figure = DRAWERS[found["benchmark"]](found)
    figure.suptitle(f"{found['processor']}, {found['threads']} threads", fontsize=10)
    # By this the tests know which results were drawn.
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    figure.savefig(results.with_suffix(".svg"), metadata={"Date": None, "Description": f"sha256 {digest}"})


if __name__ == "__main__":
    typer.run(main)
