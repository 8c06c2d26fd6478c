"""Random failures, seeded: whatever fails and whenever, the text is that of a run that nothing disturbed.

    python tests/support/torture.py 20000          seeds 0 to 19999, on all cores
    python tests/support/torture.py --seed 4711    that one, and what it does

Each seed draws a scene (a strategy, a backend, a model, prompts) and up to four failures in it, of the model or its
draft. The run recovers and gives the text, the scores and the random state of the undisturbed one; or it gives up, and
then what it hands back begins that text and its cache goes on to it. Anything else is an error that says the seed.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from random import Random
from typing import Any

import torch
from encoder_decoders import ENCODER_DECODERS
from helpers import needed
from injection import ERRORS, failing, starving
from references import draft_of, tiny
from resuming import check_goes_on
from rich.progress import track
from strategy_cases import OPTIONS, REFUSALS

import caches
import engine
import strategies

NAMES = ("llama", "mistral", "gemma2", "gpt2", "mamba", "jamba", "bamba", "lfm2", "falcon_h1", "t5", "bart")
FALLBACKS = ("release", "chunk", "offload", "split")
PER_SCENE = 4  # seeds that share a scene, and so its undisturbed run
BATCH = 100
ANOTHER_ORDER = {"atol": 5e-2, "rtol": 5e-3}  # of computing; some models amplify rounding


@dataclass(frozen=True)
class Scene:
    name: str
    cache: str
    strategy: str
    samples: bool
    rows: int
    pads: int
    new: int
    eos: tuple[int, ...]
    chunk: int | None

    @staticmethod
    def drawn(number: int) -> Scene:
        draw = Random(f"scene {number}")
        name = draw.choice(NAMES)
        rows = draw.randint(1, 3)
        cache = draw.choice(caches.names())
        while not suits(cache, name):
            cache = draw.choice(caches.names())
        return Scene(
            name=name,
            cache=cache,
            strategy=draw.choice(strategies.names()),
            samples=draw.random() < 0.3,
            rows=rows,
            pads=draw.choice([0, 4]) if name not in ENCODER_DECODERS or rows == 2 else 0,
            new=draw.randint(6, 10),
            eos=tuple(draw.sample(range(5, 101), 12)) if draw.random() < 0.4 else (),
            chunk=draw.choice([None, None, 3, 5]) if cache != "none" else None,
        )

    def generate(self, **more: Any) -> engine.Generation:
        model, inputs = self.read()
        strategy = strategies.build(self.strategy, **OPTIONS.get(self.strategy, {}))
        if self.samples and hasattr(strategy, "do_sample"):
            strategy = replace(strategy, do_sample=True)
        draft = {"assistant_model": self.draft} if self.draft is not None else {}
        torch.manual_seed(4)
        return engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=self.chunk)).generate(
            inputs,
            cache=self.cache,
            cache_config=needed(self.cache),
            strategy=strategy,
            max_new_tokens=self.new,
            eos_token_id=list(self.eos) or None,
            pad_token_id=3,
            output_scores=True,
            **draft,
            **more,
        )

    def read(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return tiny(self.name, pads=self.pads, rows=self.rows)

    @property
    def draft(self) -> Any:
        return draft_of(self.name) if self.strategy == "assisted" else None


@functools.cache
def suits(cache: str, name: str) -> bool:
    model, inputs = tiny(name)
    try:
        engine.generate(model, inputs, cache=cache, cache_config=needed(cache), max_new_tokens=1)
    except REFUSALS:
        return False
    return True


@dataclass(frozen=True)
class Attack:
    """at: where the model fails, and where its draft does; each a forward and a layer."""

    at: tuple[tuple[tuple[int, int], ...], ...]
    error: str
    late: bool
    on_oom: tuple[str, ...]

    @staticmethod
    def drawn(seed: int, forwards: tuple[int, ...]) -> Attack:
        """forwards: how many there are of the model, and of its draft."""
        draw = Random(f"attack {seed}")
        at: list[dict[int, int]] = [{} for _ in forwards]
        for _ in range(draw.randint(1, 4)):
            side = draw.choice([side for side, count in enumerate(forwards) if count])
            again = max(at[side], default=-1) + 1  # the one that tries again what failed
            number = again if again and draw.random() < 0.5 else draw.randrange(forwards[side])
            at[side][number] = draw.choice([0, 1, -1])
        some = tuple(fallback for fallback in FALLBACKS if draw.random() < 0.5)
        return Attack(
            at=tuple(tuple(points.items()) for points in at),
            error=draw.choice(list(ERRORS)),
            late=draw.random() < 0.5,
            on_oom=FALLBACKS if draw.random() < 0.6 else some,
        )

    @property
    def failures(self) -> int:
        return sum(map(len, self.at))


@dataclass(frozen=True)
class DecodingLoop:
    """What came of it, the random state after it, and how many forwards there were."""

    out: engine.Generation
    random: torch.Tensor
    forwards: tuple[int, ...]


def run(scene: Scene, attack: Attack = Attack(((), ()), "device", False, FALLBACKS)) -> DecodingLoop:
    models = [scene.read()[0]] + [draft for draft in [scene.draft] if draft is not None]
    with ExitStack() as stack:
        found = [
            stack.enter_context(failing(model, points, attack.error, attack.late))
            for model, points in zip(models, attack.at, strict=False)
        ]
        out = scene.generate(on_oom=attack.on_oom)
    return DecodingLoop(out, torch.get_rng_state(), tuple(one.forwards for one in found))


@functools.lru_cache(maxsize=4)
def undisturbed(scene: Scene) -> DecodingLoop:
    return run(scene)


def torture(seed: int) -> list[str]:
    """The fallbacks that were taken, and "gave up" where they were not enough. Raises AssertionError."""
    scene = Scene.drawn(seed // PER_SCENE)
    whole = undisturbed(scene)
    attack = Attack.drawn(seed, whole.forwards)
    try:
        return _play(scene, attack, whole)
    except Exception as error:
        told = f"seed {seed} (python tests/support/torture.py --seed {seed}): {scene}, {attack}"
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error


def _play(scene: Scene, attack: Attack, whole: DecodingLoop) -> list[str]:
    try:
        found = run(scene, attack)
    except engine.OutOfMemoryError as stopped:
        part = stopped.partial
    else:
        assert found.out.tokens == whole.out.tokens
        assert torch.equal(found.out.sequences, whole.out.sequences)
        assert found.out.finish_reasons == whole.out.finish_reasons
        assert torch.equal(found.random, whole.random)
        fallbacks = [taken.name for taken in found.out.stats.fallbacks]
        close = ANOTHER_ORDER if set(fallbacks) - {"release"} else {"atol": 0, "rtol": 0}
        for name in ("scores", "sequences_scores", "beam_indices"):
            torch.testing.assert_close(getattr(found.out, name), getattr(whole.out, name), **close)
        assert len(fallbacks) == attack.failures
        return fallbacks
    fallbacks = [taken.name for taken in part.stats.fallbacks]
    assert len(fallbacks) < attack.failures
    assert "release" in fallbacks or "release" not in attack.on_oom
    if not scene.eos:
        check_goes_on(*scene.read(), part)
    return [*fallbacks, "gave up"]


@functools.lru_cache(maxsize=1)
def counted(scene: Scene) -> tuple[engine.Generation, int]:
    """The undisturbed run, and how many tensors are made in it from its first forward on."""
    with starving(scene.read()[0]) as found:
        return scene.generate(), found.made


def starve(seed: int) -> bool:
    """Whether a run recovers that has no memory for one of all the tensors that are made in it, by any library; or
    for two. Else what it hands back must go on to the undisturbed text. Raises AssertionError."""
    scene, draw = Scene.drawn(seed // PER_SCENE), Random(f"tensors {seed}")
    whole, made = counted(scene)
    first = draw.randrange(made)
    at = {first, first + draw.randint(1, 4)} if draw.random() < 0.3 else {first}
    try:
        with starving(scene.read()[0], at) as found:
            out = scene.generate()
        assert out.tokens == whole.tokens
        assert found.raised > 0
        return True
    except engine.OutOfMemoryError as stopped:
        part = stopped.partial
    except Exception as error:
        raise AssertionError(f"seed {seed}: {scene}, at {at} of {made}: {type(error).__name__}: {error}") from error
    if not scene.eos:
        check_goes_on(*scene.read(), part)
    return False


def torture_all(seeds: Iterable[int]) -> Counter[str]:
    """How often each fallback was taken, how many runs recovered and how many gave up."""
    taken: Counter[str] = Counter()
    for seed in seeds:
        fallbacks = torture(seed)
        taken.update(fallbacks)
        taken["recovered"] += "gave up" not in fallbacks
    return taken


def _quietly() -> None:
    logging.getLogger("engine").setLevel(logging.ERROR)  # every fallback that is taken is a warning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=2000)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    if given.seed is not None:
        scene = Scene.drawn(given.seed // PER_SCENE)
        print(scene, Attack.drawn(given.seed, undisturbed(scene).forwards), sep="\n")
        print(torture(given.seed))
        return
    batches = [range(begin, min(begin + BATCH, given.seeds)) for begin in range(0, given.seeds, BATCH)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_quietly) as pool:
        done = track(pool.map(torture_all, batches), "failures", total=len(batches))
        taken = sum(done, Counter())
    print(", ".join(f"{name} {count}" for name, count in taken.most_common()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
