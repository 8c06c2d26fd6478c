"""`ReadBy`: which model has computed keys and values, and what it was then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import nn

from caches.layers.fingerprint import differences, fingerprint, inner_model
from caches.layers.model_version import ModelVersion, model_version


@dataclass(frozen=True)
class ReadBy:
    """Which model has read tokens, and what it was when it did.

    reader: a weak reference to it, and version: what it was then; None after a pickle, where `fingerprint` names it.
    mixed: why no model can go on: it is not one model at one moment, or was not any more when it was pickled; else "".
    """

    reader: ref[nn.Module] | None = None
    version: ModelVersion | None = None
    fingerprint: dict[str, str] | None = None
    mixed: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> ReadBy:
        """A model as it is now."""
        inner = inner_model(model)
        return cls(ref(inner), model_version(inner))

    @property
    def live_model(self) -> Any:
        """The model, while it is alive."""
        return None if self.reader is None else self.reader()

    def why_other(self, now: ReadBy) -> str | None:
        """Why the model that `now` was made of may compute other keys and values; None where it computes the same."""
        if self.mixed:
            return self.mixed
        if self.reader is None:
            assert self.fingerprint is not None
            different = differences(self.fingerprint, fingerprint(now.live_model))
            return f"another model has filled it ({different})" if different else None
        if self.live_model is None:
            return _FREED
        if self.live_model is not now.live_model:
            return "another model object has filled it"
        change = self._change(now)
        return None if change is None else f"since it was filled, {change}"

    def _change(self, later: ReadBy) -> str | None:
        """What has changed in the same model."""
        assert self.version is not None
        assert later.version is not None
        return self.version.difference(later.version)

    def until(self, end: ReadBy) -> ReadBy:
        """Of tokens that this model has read from this moment to `end`."""
        change = self._change(end)
        return self if change is None else replace(self, mixed=f"while it was filled, {change}")

    @staticmethod
    def joined(readers: Sequence[ReadBy | None]) -> ReadBy | None:
        """Of the rows of several caches together; None where one of them is not known."""
        reference = readers[0]
        for read_by in readers[1:]:
            if reference is None or read_by is None:
                return None
            if reference != read_by:
                is_one_model = None is not reference.reader == read_by.reader
                change = f"between which {reference._change(read_by)}" if is_one_model else "of different models"
                mixed = reference.mixed or read_by.mixed or f"its rows come from several caches, {change}"
                return replace(reference, mixed=mixed)
        return reference

    def __reduce__(self) -> tuple[Any, ...]:
        """With the model's fingerprint in its place: a weak reference cannot be pickled, and counts mean nothing there.

        Reads all weights, unless they have been since they were written.
        """
        digests, mixed, model = self.fingerprint, self.mixed, self.live_model
        if self.reader is not None:
            mixed = _FREED if model is None else self.why_other(ReadBy.of(model)) or ""
            digests = None if mixed else fingerprint(model)
        return ReadBy, (None, None, digests, mixed)


_FREED = "the model that has filled it was freed"
