"""Programs of several processes that compute one model together, and what came of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from architectures import VOCABULARY, suiting
from helpers import needed
from injection import failing
from packaging.version import Version
from random_models import tokenizer
from references import draft_of, tiny
from resuming import check_goes_on
from strategy_cases import OPTIONS, REFUSALS
from torture import PER_SCENE, Attack, DecodingLoop, Scene, run, undisturbed
from transformers import MaxTimeCriteria, StoppingCriteria

import engine
import strategies
from caches.layers.fingerprint import fingerprint
from engine.parallel.ranks import PeerError

SIZE = 2
NAMES = ("llama", "mistral", "gemma2", "jamba")


def start(program: str, folder: Path, *arguments: str, size: int = SIZE) -> list[subprocess.Popen]:
    """The processes of `program`, a function of this file, which write what they find into `folder`."""
    return processes([sys.executable, __file__, program, str(folder), *arguments], size)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving() -> Iterator[tuple[list[subprocess.Popen], str]]:
    """The processes of a server of the model that ships with the package, and its address, once it answers."""
    port = str(free_port())
    server = processes([sys.executable, "-m", "engine", "serve", "--tp", str(SIZE), "--port", port], SIZE)
    try:
        end = time.monotonic() + 90
        while True:
            assert time.monotonic() < end, "it does not answer"
            assert all(rank.poll() is None for rank in server), [rank.poll() for rank in server]
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                break
            time.sleep(0.1)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        for rank in server:
            rank.kill()


def processes(command: list[str], size: int) -> list[subprocess.Popen]:
    """One of each rank, with the variables that torchrun sets."""
    port = free_port()
    places = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]


def found(program: str, *arguments: str, timeout: float = 600) -> list[Any]:
    """What each rank of `program` has found."""
    if Version(transformers.__version__) < Version("5.23") and VOCABULARY % SIZE:
        pytest.skip("this release of transformers splits no head whose rows cannot be divided")
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        ranks = start(program, Path(folder), *arguments)
        try:
            codes = [rank.wait(timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) if code == 0 else code
            for rank, code in enumerate(codes)
        ]


def save_models(folder: Path) -> None:
    for name in NAMES:
        tiny(name)[0].save_pretrained(folder / name)


# What runs in each rank.


@cache
def split(folder: Path, name: str) -> Any:
    """This rank's part of a model."""
    config = engine.EngineConfig(tp=SIZE)
    return engine.Generator(folder / name, tokenizer(), config).model


def compare(folder: Path, *cells: str) -> Any:
    """Every strategy on these models and caches: equal texts, other ones, refusals, bytes of whole and split caches."""
    different, refused, sizes, equal = [], [], {}, 0
    for cell, strategy in product(cells, strategies.names()):
        name, cache = cell.split()
        whole, inputs = tiny(name, pads=4, rows=2)
        options = {
            "cache": cache,
            "cache_config": needed(cache),
            "strategy": strategies.build(strategy, **OPTIONS.get(strategy, {})),
            "max_new_tokens": 10,
            "assistant_model": draft_of(name) if strategy == "assisted" else None,
        }
        texts: list[Any] = []
        for model in (whole, split(folder, name)):
            torch.manual_seed(4)
            try:
                out = engine.generate(model, inputs, **options)
                texts.append(out.tokens)
                sizes.setdefault(cell, []).append(out.stats.cache_bytes)
            except REFUSALS as error:
                texts.append(str(error))
        if texts[0] != texts[1]:
            different.append([cell, strategy, *texts])
        elif isinstance(texts[0], str):
            refused.append([cell, strategy])
        else:
            equal += 1
    return {"different": different, "refused": refused, "bytes": sizes, "equal": equal}


@dataclass(frozen=True)
class SplitScene(Scene):
    """A scene whose model is split."""

    folder: str = ""

    def read(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return split(Path(self.folder), self.name), super().read()[1]


def memory(folder: Path, first: str, count: str) -> Any:
    """Random failures of memory on one rank: how often each fallback was taken, and what was wrong."""
    rank, taken, wrong = int(os.environ["RANK"]), Counter[str](), []
    for seed in range(int(first), int(first) + int(count)):
        scene = Scene.drawn(seed // PER_SCENE)
        if scene.name not in NAMES:  # transformers cannot split it
            cache = Random(seed // PER_SCENE).choice(suiting("llama"))
            scene = replace(scene, name="llama", cache=cache, chunk=None if cache == "none" else scene.chunk)
        whole = undisturbed(scene)
        attack = Attack.drawn(seed, whole.forwards)
        mine = attack if seed % SIZE == rank else replace(attack, at=tuple(() for _ in attack.at))
        try:
            fallbacks = played(SplitScene(**vars(scene), folder=str(folder)), mine, attack, whole)
        except Exception as error:
            wrong.append(f"seed {seed}: {scene}, {attack}: {type(error).__name__}: {error}")
            if isinstance(error, PeerError):
                break
        else:
            taken.update(fallbacks)
            taken["recovered"] += "gave up" not in fallbacks
    return {"taken": taken, "wrong": wrong}


def played(scene: SplitScene, mine: Attack, attack: Attack, whole: DecodingLoop) -> list[str]:
    """The fallbacks that were taken. mine: of the failures those of this rank."""
    try:
        found = run(scene, mine)
    except engine.OutOfMemoryError as stopped:
        part = stopped.partial
    else:
        assert found.out.tokens == whole.out.tokens
        assert found.out.finish_reasons == whole.out.finish_reasons
        assert torch.equal(found.random, whole.random)
        return [fallback.name for fallback in found.out.stats.fallbacks]
    if not scene.eos:
        check_goes_on(*scene.read(), part)
    return [fallback.name for fallback in part.stats.fallbacks] + ["gave up"]


class _Raises:
    """A streamer, a processor or an event for `cancellation`, that does so at its third token on one rank."""

    def __init__(self, rank: int, what: BaseException | None = None):
        self._is_mine, self._what, self._calls = int(os.environ["RANK"]) == rank, what, 0

    def is_set(self) -> bool:
        self._calls += 1
        return self._is_mine and self._calls > 2

    def put(self, value: torch.Tensor) -> None:
        if self.is_set() and self._what is not None:
            raise self._what

    def end(self) -> None:
        pass

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(ids)
        return scores


def apart(folder: Path) -> Any:
    """What the ranks get where one of them is asked to stop, fails, or is called with other arguments."""
    rank, model, inputs = int(os.environ["RANK"]), split(folder, "llama"), tiny("llama")[1]
    plain = {"max_new_tokens": 8, "do_sample": False}

    def call(**options: Any) -> Any:
        try:
            return engine.generate(model, inputs, **plain | options).tokens
        except Exception as error:
            return [
                type(error).__name__,
                len(error.partial.tokens[0]) if hasattr(error, "partial") else None,
                str(error),
            ]

    found = {"alone": engine.generate(tiny("llama")[0], inputs, **plain).tokens}
    calls: dict[str, dict[str, Any]] = {
        "arguments": {"max_new_tokens": 8, "num_beams": 1 + rank},
        "length": {"max_new_tokens": 8 + rank},
        "backend": {"cache": "static"} if rank else {},
        "cancellation": {"cancellation": _Raises(1)},
        "time": {"max_time": 0.0 if rank else 1e6, "max_new_tokens": 50},
        "time of a criterion": {"stopping_criteria": [MaxTimeCriteria(0.0 if rank else 1e6)], "max_new_tokens": 50},
        "time of beams": {"max_time": 0.0 if rank else 1e6, "max_new_tokens": 50, "num_beams": 3},
        "streamer": {"streamer": _Raises(0, ValueError("no paper"))} if rank == 0 else {},
        "processor": {"logits_processor": [_Raises(1, ValueError("no ink"))]},
        "beams": {"logits_processor": [_Raises(1, ValueError("no ink"))], "num_beams": 3},
        "option": {"num_beams": 0} if rank == 0 else {},
    }
    for name, options in calls.items():
        found[name] = call(**options)
        found[f"after {name}"] = call()
    call(num_beams=0)  # all ranks have failed, and one of them fails again before the next call
    found["option again"] = call(**calls["option"])
    found["after option again"] = call()
    call(num_beams=0)
    found["fingerprint"] = fingerprint(model)
    torch.manual_seed(rank)  # other numbers on each rank, unless they are those of rank 0
    found["samples"] = call(do_sample=True, num_return_sequences=4)
    gen, prompts = engine.Generator(model), [[1, 5, 9], [1, 7, 7, 3, 2], {"prompt": [1, 8], "num_beams": 0}, [1, 2, 30]]
    many = sorted(gen.generate_many(prompts, slots=2, **plain), key=lambda one: one.index)
    found["many"] = [str(one.error) if one.error else one.result().tokens[0] for one in many]
    whole = sorted(engine.generate_many(tiny("llama")[0], prompts, **plain), key=lambda one: one.index)
    found["many alone"] = [str(one.error) if one.error else one.result().tokens[0] for one in whole]
    return found


def batched(folder: Path, first: str, count: str) -> Any:
    """Prompts that are submitted to a batch at random times, some of which are cancelled, some beside memory that is
    out on one rank: how many have the text of one process, and what was wrong."""
    rank, whole, wrong = int(os.environ["RANK"]), tiny("llama")[0], []
    equal = cancelled = gave_up = 0
    model = split(folder, "llama")
    for seed in range(int(first), int(first) + int(count)):
        draw, at = Random(f"batch {seed}"), Random(f"memory {seed} {rank}")
        points = [(at.randrange(3, 40), at.choice([0, 1, -1])) for _ in range(at.randint(0, 2))]
        gen = engine.Generator(model)
        if seed % 2:
            with suppress(engine.EngineError):
                gen.generate([1, 2], num_beams=0)
        with failing(model, points, all_happen=False), gen.batch(slots=4) as batch:
            if rank > 0:
                continue
            submitted = []
            for _ in range(8):
                options = draw.choice([{}, {"num_beams": 2}, {"do_sample": True, "seed": 5}, {"max_new_tokens": 3}])
                ids = [draw.randrange(5, 100) for _ in range(draw.randint(1, 50))]
                options = {"max_new_tokens": 12, "cache": draw.choice(["dynamic", "static", "offloaded"])} | options
                submitted.append((ids, options, batch.submit(ids, **options)))
                time.sleep(draw.choice([0, 0, 0.02]))
                if draw.random() < 0.1:
                    submitted[-1][2].cancel()
                bad = batch.submit([1, 2], num_beams=0)  # ends before it begins, also where nothing else runs
                if draw.random() < 0.5 and not isinstance(_error_of(bad), engine.OptionError):
                    wrong.append(f"seed {seed}: {bad.error!r} of a prompt that is refused")
            for ids, options, request in submitted:
                try:
                    got = request.result(60).tokens
                except engine.GenerationCancelled:
                    cancelled += 1
                except engine.OutOfMemoryError:  # it failed more often than there are fallbacks
                    gave_up += 1
                except Exception as error:
                    wrong.append(f"seed {seed}: {ids} {options}: {error!r}")
                else:
                    expected = engine.generate(whole, ids, **options).tokens
                    equal += got == expected
                    wrong += [] if got == expected else [f"seed {seed}: {ids} {options}: {got}, not {expected}"]
    return {"equal": equal, "cancelled": cancelled, "gave up": gave_up, "wrong": wrong}


def _error_of(request: Any) -> BaseException | None:
    with suppress(Exception):
        request.result(60)
    return request.error


def batch_ends(folder: Path, runs: str) -> Any:
    """Rank 1 is killed, while it waits or while `runs` prompts run: what becomes of the prompts on rank 0."""
    model, forwards = split(folder, "llama"), []

    def die(module: torch.nn.Module, inputs: tuple) -> None:
        forwards.append(time.monotonic())
        if len(forwards) == 20 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    batch = engine.Generator(model).batch(slots=4)
    batch.submit([1, 2, 3], max_new_tokens=2).result(60) if os.environ["RANK"] == "0" else None
    if int(runs):
        model.model.layers[1].register_forward_pre_hook(die)
    elif os.environ["RANK"] == "1":
        while batch.counts.steps == 0:  # rank 0 is still reading its first prompt
            time.sleep(0.05)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "1":
        batch.close()
    asked = [batch.submit([1, 2, 3 + number], max_new_tokens=60) for number in range(int(runs))]
    errors = [str(_error_of(one)) for one in asked]
    end = time.monotonic() + 20
    while batch.is_alive and time.monotonic() < end:
        time.sleep(0.05)
    return {"errors": errors, "alive": batch.is_alive, "failure": str(batch.failure)}


def interrupted(folder: Path) -> Any:
    """Ctrl-C on one rank: what both have of the text."""
    model, inputs = split(folder, "llama"), tiny("llama")[1]
    if os.environ["RANK"] == "1":
        timer = threading.Timer(1.5, signal.raise_signal, [signal.SIGINT])
        timer.start()
    try:
        engine.generate(model, inputs, max_new_tokens=100, stopping_criteria=[_Slow()])
    except engine.UserInterrupt as stopped:
        return len(stopped.partial.tokens[0])


class _Slow(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.05)
        return torch.zeros(len(ids), dtype=torch.bool)


def ends(folder: Path) -> Any:
    """Rank 1 is killed within a forward: the error of rank 0, and after how many seconds."""
    model, inputs, forwards = split(folder, "llama"), tiny("llama")[1], []

    def die(module: torch.nn.Module, inputs: tuple) -> None:
        forwards.append(time.monotonic())
        if len(forwards) == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[1].register_forward_pre_hook(die)
    try:
        engine.generate(model, inputs, max_new_tokens=8)
    except engine.GenerationInterrupted as error:
        return [str(error), time.monotonic() - forwards[-1], len(error.partial.tokens[0])]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "compare": compare,
    "memory": memory,
    "apart": apart,
    "batched": batched,
    "interrupted": interrupted,
    "ends": ends,
    "batch_ends": batch_ends,
}

if __name__ == "__main__":
    program, here, *more = sys.argv[1:]
    torch.set_num_threads(1)
    result = PROGRAMS[program](Path(here), *more)
    (Path(here) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if not program.endswith("ends"):
        torch.distributed.destroy_process_group()
