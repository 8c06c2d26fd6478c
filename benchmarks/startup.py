"""From the start of a process to the first text: the command line, a script of ours, and one of transformers.

    python benchmarks/startup.py --out startup-cpu.json

All write 20 tokens with the small model of the package and print them. Each runs in a process of its own, and they
take turns. Three times are taken: seconds until the text is there, and seconds of processor time, which other work on
the machine changes less, until then and until the process has ended. "import torch" alone is the floor. What is the
first on a machine has an empty cache folder, so it measures matrix products where its processor does not tell; all of
its runs are counted. `--beside` runs the command line and the script of another checkout too. Prints a table, and at
the end one JSON line. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from common import report, spread
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "engine" / "shipped"
PROMPT, NEW = "def f(x):", 20
OURS = f"""
import engine
print(engine.Generator({str(MODEL)!r}).generate({PROMPT!r}, max_new_tokens={NEW}).text[0], flush=True)
"""
PEER = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained({str(MODEL)!r}) for kind in (AutoTokenizer, AutoModelForCausalLM))
ids = tokenizer({PROMPT!r}, return_tensors="pt")
out = model.generate(**ids, max_new_tokens={NEW}, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True), flush=True)
"""
TIMES = {"text_s": "s to the text", "text_processor_s": "of processor time", "processor_s": "in all"}
FLOOR = "import torch; print(flush=True)"
_console = Console()


@dataclass
class Program:
    """arguments: of Python. folder: where its packages are. is_first: whether its cache folder is empty."""

    arguments: list[str]
    folder: Path = ROOT
    is_first: bool = False
    text: str = ""
    taken: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})

    def run(self, threads: int) -> None:
        with tempfile.TemporaryDirectory() as empty:
            self._run(threads, {"KVENGINE_CACHE": empty} if self.is_first else {})

    def _run(self, threads: int, variables: dict[str, str]) -> None:
        environment = os.environ | variables | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, *self.arguments]
        begun = time.perf_counter()
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            first = process.stdout.read(1)
            self.taken["text_s"].append(time.perf_counter() - begun)
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            self.taken["text_processor_s"].append(sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"))
            self.text = (first + process.stdout.read()).decode()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}: run it to see why")
        self.taken["processor_s"].append(used.ru_utime + used.ru_stime)


def programs(beside: Path | None) -> dict[str, Program]:
    command_line = ["-m", "engine.cli", "generate", PROMPT, "--max-new-tokens", str(NEW)]
    found = {
        "import torch": Program(["-c", FLOOR]),
        "command line": Program(command_line),
        "command line, first on a machine": Program(command_line, is_first=True),
        "script": Program(["-c", OURS]),
        "transformers": Program(["-c", PEER]),
    }
    if beside is not None:
        found["command line, other checkout"] = Program(command_line, beside)
        found["script, other checkout"] = Program(["-c", OURS], beside)
    return found


def table_of(cases: dict[str, Any]) -> Table:
    table = Table("", *TIMES.values(), "times transformers")
    for name, case in cases.items():
        cells = [f"{case[taken]['median']:.2f}" for taken in TIMES]
        table.add_row(name, *cells, f"{case['times_peer']:.2f}")
    return table


def main(
    runs: Annotated[int, typer.Option(help="Of each program; one before is not counted.", min=1)] = 7,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = os.cpu_count() or 1,
    beside: Annotated[Path | None, typer.Option(help="The folder of another checkout to compare with.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON line to this file too.")] = None,
) -> None:
    chosen = programs(beside)
    with _console.status("running") as status:
        for program in chosen.values():  # files come from the disk
            if program.is_first:
                continue
            program.run(threads)
            for taken in program.taken.values():
                taken.clear()
        for number in range(runs):
            status.update(f"run {number + 1} of {runs}")
            for program in chosen.values():
                program.run(threads)
    cases: dict[str, Any] = {
        name: {what: spread(samples) for what, samples in program.taken.items()} for name, program in chosen.items()
    }
    peer = cases["transformers"]["text_processor_s"]["median"]
    for case in cases.values():
        case["times_peer"] = case["text_processor_s"]["median"] / peer
    texts = {program.text.strip() for name, program in chosen.items() if name != "import torch"}
    _console.print(table_of(cases))
    report("startup", out, threads=threads, new_tokens=NEW, runs=runs, same_text=len(texts) == 1, cases=cases)


if __name__ == "__main__":
    typer.run(main)
