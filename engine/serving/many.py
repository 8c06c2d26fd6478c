"""`generate_many`: the prompts of an iterable, run together in the calling thread."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from engine.decoding.stopping import Cancellation
from engine.errors import InputError, OptionError, UserInterrupt
from engine.parallel.ranks import OneProcess
from engine.request.call import read
from engine.request.logits_processors import with_own_processors
from engine.serving.batch_request import BatchRequest
from engine.serving.scheduler import Scheduler

if TYPE_CHECKING:  # slow to import
    from rich.progress import Progress

_SLOW_S = 0.01  # an iterable that takes longer for a prompt is slow


class EndedRequests:
    """An iterator of the requests of `generate_many`, as they end. `close()` ends those that still run."""

    def __init__(self, requests: Generator[BatchRequest, None, None]):
        self._requests = requests
        # On collection and before the process ends: the cleanup of a run needs a working interpreter.
        weakref.finalize(self, _leave, requests)

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        return next(self._requests)

    def close(self) -> None:
        """End the requests that still run; no others follow."""
        self._requests.close()


def _leave(requests: Generator[BatchRequest, None, None]) -> None:
    with suppress(ValueError):  # another thread is in it
        requests.close()


def generate_many(
    scheduler: Scheduler, prompts: Iterable[object], parameters: dict[str, object], progress: bool
) -> EndedRequests:
    """See `Generator.generate_many`."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        type_name = type(prompts).__name__
        raise InputError(f"generate_many takes an iterable of prompts, and this is one {type_name}: put it into a list")
    return EndedRequests(_ended(scheduler, prompts, parameters, progress))


def _ended(
    scheduler: Scheduler, prompts: Iterable[object], parameters: dict[str, object], progress: bool
) -> Generator[BatchRequest, None, None]:
    requests, keys = _requests(prompts, parameters), Cancellation(None, scheduler.ranks)
    total = len(prompts) if isinstance(prompts, Sized) else None
    is_last, ask_again = False, 0.0
    failure: Exception | None = None
    try:
        with _Shown(total, progress) as shown:
            while scheduler.is_busy or not is_last:
                while scheduler.has_room and not is_last:
                    asked = time.monotonic()
                    if scheduler.is_busy and scheduler.ranks.most(asked < ask_again):
                        break
                    try:
                        request = next(requests, None)
                    except Exception as error:  # raised once the prompts before it have ended
                        request, failure = None, error
                    if (seconds := time.monotonic() - asked) > _SLOW_S:  # at most half of the time goes by with waiting
                        ask_again = asked + 2 * seconds
                    is_last = request is None
                    if request is not None:
                        scheduler.add(request)
                with keys.noting_keys():
                    ended = scheduler.turn()
                shown.show(ended)
                yield from ended
                try:
                    keys.check()
                except UserInterrupt:  # of one run, whose partial result it has
                    message = "generation was stopped with Ctrl-C; prompts that had ended were yielded"
                    raise KeyboardInterrupt(message) from None
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame
        scheduler.close()


def _requests(prompts: Iterable[object], parameters: dict[str, object]) -> Iterator[BatchRequest]:
    for index, prompt in enumerate(prompts):
        yield BatchRequest(index, *_read(prompt, parameters))


def _read(prompt: object, parameters: dict[str, object]) -> tuple[object, dict[str, object]]:
    """The inputs and the parameters of one prompt: a mapping with "prompt" has parameters of its own."""
    if isinstance(prompt, Mapping) and "prompt" in prompt:
        arguments = dict(prompt)
        return arguments.pop("prompt"), parameters | arguments
    return prompt, parameters


def of_one_prompt(request: BatchRequest, ranks: OneProcess) -> dict[str, object]:
    """The parameters of the run of one prompt among many: with a seed and logits processors of its own."""
    parameters = dict(request.parameters)
    check_common({name: parameters.get(name) for name in ("streamer", "return_legacy_cache")})
    if parameters.get("seed") is None:
        parameters["seed"] = ranks.most(int(torch.randint(2**31, (), device="cpu")))
    read("cancellation", parameters.get("cancellation"))
    return with_own_processors(parameters | {"cancellation": request})


def check_common(parameters: Mapping[str, object]) -> None:
    """Raise `OptionError` for parameters that cannot be those of several requests."""
    for name, instead in _OF_ONE.items():
        if parameters.get(name) is not None:
            raise OptionError(f"{name}= belongs to one text, and here are many: {instead}")


_OF_ONE = {
    "return_legacy_cache": "results have no cache",
    "streamer": "read the chunks of a request with its stream()",
    "past_key_values": "give each prompt its own, or EngineConfig(prefix_store_bytes=...)",
}


class _Shown:
    """A progress bar on standard error, with new tokens per second. total: how many prompts; None if unknown."""

    def __init__(self, total: int | None, is_shown: bool):
        self._tokens, self._bar = 0, _bar() if is_shown else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total, rate="")

    def __enter__(self) -> _Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, ended: list[BatchRequest]) -> None:
        if self._bar is None or self._task is None or not ended:
            return
        self._tokens += sum(request.new_tokens for request in ended)
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed_s:.1f} tokens/s" if elapsed_s else ""
        self._bar.update(self._task, advance=len(ended), rate=rate)


def _bar() -> Progress:
    from rich.console import Console  # slow to import
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), TextColumn("prompts"), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
