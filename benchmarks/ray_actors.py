"""Ray Data with one actor and with two, of one thread each: rows per second of model "small".

Rates are of the rows between the first and the last tenth, so that starting the actors does not count.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
import typer
from common import SHAPES, report
from serve import requests_of, save_model

from engine.distributed import Predictor


def rate(folder: str, prompts: list[str], actors: int, new: int, batch: int) -> tuple[float, dict[int, str]]:
    """Rows per second, and the texts by number."""
    rows = ray.data.from_items([{"number": number, "prompt": prompt} for number, prompt in enumerate(prompts)])
    done = rows.repartition(len(prompts) // batch).map_batches(
        Predictor,
        fn_constructor_args=[folder],
        fn_constructor_kwargs={"max_new_tokens": new, "slots": batch},
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=batch,
        num_cpus=1,
    )
    times, texts = [], {}
    for row in done.iter_rows():
        times.append(time.perf_counter())
        texts[row["number"]] = row["text"]
    begin, end = len(times) // 10, len(times) - 1 - len(times) // 10
    return (end - begin) / (times[end] - times[begin]), texts


def main(model: str = "small", count: int = 320, new: int = 32, batch: int = 8, out: Path | None = None) -> None:
    environment: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    # Two for the actors, and some for the tasks that deal out the rows.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    prompts = [" ".join(prompt.split()[:64]) for [(prompt, _)] in requests_of(count, 1, SHAPES[model]["vocab_size"])]
    cases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(SHAPES[model], Path(folder))
        rates, texts = {}, {}
        for actors in (1, 2):
            rates[actors], texts[actors] = rate(folder, prompts, actors, new, batch)
            cases[str(actors)] = {"rows_per_s": rates[actors]}
            print(f"{actors} actors: {json.dumps(cases[str(actors)])}", flush=True)
    same = sum(texts[1][number] == texts[2][number] for number in texts[1])
    times = rates[2] / rates[1]
    report("ray", out, model=model, rows=count, new_tokens=new, cases=cases, times=times, same_texts=same)


if __name__ == "__main__":
    typer.run(main)
