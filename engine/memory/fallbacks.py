"""`Recovery`: applies one fallback after the other when memory is out in a run, which then repeats the failed step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from caches import CacheError
from caches.platform.out_of_memory import Exhausted, empty_allocators, in_words, recovering
from configs import ConfigError
from engine.decoding.feeder import Feeder
from engine.result import Fallback

_logger = logging.getLogger("engine")


class Recovery:
    """The fallbacks of one model in a run: see `configs.FALLBACKS`. taken: the list that the applied ones go to.

    release: frees what is kept between calls. make_room: called before each fallback; it says whether it has freed
    memory of other runs, so that this one needs no fallback yet.
    """

    def __init__(
        self,
        fallbacks: Sequence[str],
        applied: list[Fallback],
        release: Callable[[], None],
        make_room: Callable[[], bool],
    ):
        self._left, self._allowed, self.taken = list(fallbacks), tuple(fallbacks), applied
        self._free, self._make_room = release, make_room
        self._tried: set[tuple[str, int, int]] = set()  # since one that is applied once

    def apply_next(self, feeder: Feeder, error: BaseException) -> None:
        """Apply the next fallback that may help `feeder`, which failed with `error`. Raises `Exhausted`."""
        has_room = self._make_room()
        empty_allocators()
        if has_room:
            return
        reason = in_words(error)
        refused = []
        for name in self._in_order():
            bytes_before = feeder.cache.device_bytes
            if name == "release":
                self._free()
            description, refusal = _applied(_APPLY[name], feeder)
            if refusal is not None:
                refused.append(f"{name} ({refusal})")
            if description is None:
                continue
            empty_allocators(collects=name == "release")  # compiled graphs are in cycles, caches are not
            fallback = Fallback(name, description, feeder.cache.total_tokens, bytes_before, feeder.cache.device_bytes)
            if self._is_progress(fallback, feeder.cache.batch_size):
                self._note(reason, fallback)
                return
            refused.append(f"{name} ({description}, as before with as many tokens: that is no progress)")
        raise Exhausted(self._why_exhausted(reason, refused)) from error

    def _is_progress(self, fallback: Fallback, rows: int) -> bool:
        """Note what a fallback has done. False where it did the same before at this place, and nothing else has changed
        since: the step would fail again, and again, and the run would never end."""
        if fallback.name not in _REPEATABLE:
            self._left.remove(fallback.name)
            self._tried.clear()
            return True
        tried = len(self._tried)
        self._tried.add((f"{fallback.name}: {fallback.what}", fallback.tokens, rows))
        return len(self._tried) > tried

    def apply_before(self, error: BaseException, groups: int, max_groups: int) -> int:
        """Apply the next fallback for an encoder: in how many groups of rows to encode next, `max_groups` at most."""
        reason = in_words(error)
        if "release" in self._left:
            self._left.remove("release")
            self._free()
            self._note(reason, Fallback("release", "what the allocator kept was dropped", 0, 0, 0))
            return groups
        if "split" not in self._left or groups >= max_groups:
            raise Exhausted(self._why_exhausted(reason, [])) from error
        doubled = min(2 * groups, max_groups)
        self._note(reason, Fallback("split", f"the rows are encoded in {doubled} parts, one after the other", 0, 0, 0))
        return doubled

    def _note(self, reason: str, fallback: Fallback) -> None:
        self.taken.append(fallback)
        _logger.warning("out of memory (%s); %s", reason, fallback)

    def _in_order(self) -> list[str]:
        """The fallbacks that are left. Where two smaller chunk sizes did not help, the others come before a third."""
        pieces = sum(fallback.name == "chunk" for fallback in self.taken)
        return sorted(self._left, key=lambda name: name == "chunk" and pieces >= 2)

    def _why_exhausted(self, reason: str, refused: list[str]) -> str:
        if not self._allowed:
            return f"{reason}; on_oom allows no way to go on"
        applied = ", ".join(fallback.name for fallback in self.taken) or "none"
        could_not = f"; could not be taken: {', '.join(refused)}" if refused else ""
        return f"{reason}; on_oom={list(self._allowed)}, taken: {applied}{could_not}"


def _applied(fallback: Callable[[Feeder], str | None], feeder: Feeder) -> tuple[str | None, str | None]:
    """A description of what the fallback did, or the reason why it could not."""
    total_tokens = feeder.cache.total_tokens
    with recovering(CacheError, ConfigError) as outcome:
        return fallback(feeder), None
    failure = outcome.failure
    assert failure is not None
    if isinstance(failure, (CacheError, ConfigError)) and feeder.cache.total_tokens < total_tokens:
        raise Exhausted(in_words(failure)) from failure
    return None, in_words(failure)


def _release(feeder: Feeder) -> str | None:
    feeder.executor.release()
    return "compiled graphs, scratch memory, what the allocator kept, and stored prefixes (from memory) were dropped"


def _chunk(feeder: Feeder) -> str | None:
    tokens = feeder.executor.read_in_smaller_chunks(feeder.waiting)
    return None if tokens is None else f"the prompt is read on in pieces of {tokens} tokens"


def _quantize(feeder: Feeder) -> str | None:
    moved = feeder.executor.offload(quantized=True)
    return None if moved is None else f"{moved}, which changes what is generated"


def _split(feeder: Feeder) -> str | None:
    if feeder.waiting <= 0:  # work between forwards is for all rows at once
        return None
    groups = feeder.executor.split()
    return None if groups is None else f"the rows are computed in {groups} parts, one after the other"


_APPLY: dict[str, Callable[[Feeder], str | None]] = {
    "release": _release,
    "chunk": _chunk,
    "offload": lambda feeder: feeder.executor.offload(),
    "quantize": _quantize,
    "split": _split,
}
_REPEATABLE = ("chunk", "split")  # until nothing can be made smaller
