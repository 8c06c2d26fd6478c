"""All benchmarks, one after the other, and their plots: `make bench`. Takes about three hours on two quiet cores.

    python benchmarks/all.py --only "decode; scaling"

Each runs in a process of its own and writes results/PROCESSOR/NAME-cpu.json, where the documentation reads it. Peers
are measured in turns in the same run; llama.cpp takes part where it is installed (`pip install -e '.[peers]'`).
`quality.py` is not among them: what it measures depends on the model, not on the processor.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from common import folder_of_results, picked

HERE = Path(__file__).parent
_LONG = "transformers quanto, 4 bits; transformers hqq, 4 bits; dynamic; quantized: quanto, 4 bits, unpacked; " \
        "quantized: quanto, 4 bits, fused; quantized: hqq, 4 bits, unpacked; quantized: hqq, 4 bits, fused"  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "decode": ["decode.py"],
    "branching": ["branching.py"],
    "scaling": ["scaling.py"],
    "memory": ["memory.py", "--peak", "--contexts", "1024,4096"],
    "memory-long": ["memory.py", "--peak", "--contexts", "16384", "--only", _LONG],
    "assisted": ["assisted.py"],
    "reuse": ["reuse.py"],
    "many": ["many.py"],
    "structured": ["structured.py"],
    "serve": ["serve.py"],
    "ray": ["ray_actors.py"],
    "tensor-parallel": ["tensor_parallel.py"],
    "out-of-memory": ["out_of_memory.py"],
    "startup": ["startup.py"],
    "compiling": ["compiling.py"],
    "weights": ["weights.py"],
    "decode-bfloat16": ["decode.py", "--dtype", "bfloat16", "--prompts", "64,1000"],
    "decode-float16": ["decode.py", "--dtype", "float16", "--prompts", "64,1000"],
    "decode-smollm2-bfloat16": ["decode.py", "--dtype", "bfloat16", "--prompts", "64,1000", "--model", "smollm2"],
    "branching-bfloat16": ["branching.py", "--dtype", "bfloat16", "--no-curve", "--no-peak",
                           "--scenarios", "16 beams; 16 samples"],
    "memory-bfloat16": ["memory.py", "--dtype", "bfloat16", "--contexts", "4096", "--only", _LONG],
    "many-bfloat16": ["many.py", "--dtype", "bfloat16", "--count", "60", "--slots", "16,32",
                      "--only", "16 slots; 32 slots; transformers, one padded batch"],
}  # fmt: skip
PLOTTED = ("decode", "branching", "scaling", "many")


def main(only: Annotated[str, typer.Option(help="names with ; between, or 'all'")] = "all") -> None:
    folder, failed = folder_of_results(), []
    for name, (script, *options) in picked(COMMANDS, only).items():
        out, begun = folder / f"{name}-cpu.json", time.monotonic()
        done = subprocess.run([sys.executable, HERE / script, *options, "--out", out])
        print(f"{name}: {time.monotonic() - begun:.0f} s, exit code {done.returncode}", flush=True)
        if done.returncode != 0:
            failed.append(name)
        elif name in PLOTTED:
            subprocess.run([sys.executable, HERE / "plot.py", out], check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
