"""Draw the results of a benchmark: `python benchmarks/plot.py benchmarks/results/decode-cpu.json`. Needs matplotlib."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import matplotlib as mpl
import typer
from matplotlib import pyplot as plt

mpl.rcParams["svg.hashsalt"] = "kvengine"  # the same results give the same file


def main(results: Path) -> None:
    found = json.loads(results.read_text())
    cases = found["cases"]
    figure, axes = plt.subplots(1, len(cases), figsize=(11, 3.2), sharey=True, layout="constrained")
    for case, axis in zip(cases, axes, strict=True):
        names = list(case["engines_ms"])[::-1]
        taken = [case["engines_ms"][name] for name in names]
        medians = [t["median"] for t in taken]
        errors = [[t["median"] - t["least"] for t in taken], [t["most"] - t["median"] for t in taken]]
        colours = ["#9aa5b1" if name.startswith(("transformers", "llama.cpp")) else "#2f6fab" for name in names]
        axis.barh(names, medians, xerr=errors, color=colours, error_kw={"ecolor": "#333333", "capsize": 2, "lw": 1})
        axis.axvline(case["floor_ms"], color="#c0392b", lw=1.2, ls="--", label="floor: memory read once")
        axis.set_xlim(0, 1.3 * max(medians))  # one bad run must not hide the others
        axis.set_title(f"prompt of {case['prompt_tokens']} tokens", fontsize=10)
        axis.set_xlabel("ms per token (less is better)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    # By this the tests know which results were drawn.
    digest = hashlib.sha256(results.read_bytes()).hexdigest()
    figure.savefig(results.with_suffix(".svg"), metadata={"Date": None, "Description": f"sha256 {digest}"})


if __name__ == "__main__":
    typer.run(main)
