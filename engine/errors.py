"""Errors of the engine.

EngineError
├── caches.CacheError                              errors of caches: see `caches.errors`
├── ConfigError (also a ValueError)                a configuration has an unknown key or an impossible value
├── InputError (also a ValueError)                 a model, a prompt or another input cannot be used
├── OptionError (also a ValueError, a TypeError)   an option is unknown or does not apply
└── GenerationInterrupted (also a RuntimeError)    a run failed; `partial` is the result so far
    ├── InvalidLogitsError                         logits or scores with NaN, or with no token to choose
    ├── GenerationCancelled                        the call's `cancellation` was set
    └── OutOfMemoryError                           an allocation failed, and no fallback is left

UserInterrupt (a KeyboardInterrupt, no EngineError)    Ctrl-C during a run; `partial` is the result so far
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs import ConfigError, EngineError

if TYPE_CHECKING:
    from engine.result import Generation

__all__ = [
    "ConfigError",
    "EngineError",
    "GenerationCancelled",
    "GenerationInterrupted",
    "InputError",
    "InvalidLogitsError",
    "OptionError",
    "OutOfMemoryError",
    "UserInterrupt",
]


class InputError(EngineError, ValueError):
    """A model, a prompt or another input cannot be used."""


class OptionError(EngineError, ValueError, TypeError):
    """An option is unknown, contradicts another, or does not apply to this model."""


class GenerationInterrupted(EngineError, RuntimeError):
    """A run failed. `partial` is the result so far: all tokens that were emitted, and the cache to continue with.

    For beam search it has the best beams so far; before the first token it has the prompts.
    """

    def __init__(self, message: str, partial: Generation):
        super().__init__(message)
        self.partial = partial


class InvalidLogitsError(GenerationInterrupted):
    """Scores from which no token can be chosen: NaN, +inf, or only -inf. `partial` ends before that step."""


class GenerationCancelled(GenerationInterrupted):
    """The call's `cancellation` event was set."""


class OutOfMemoryError(GenerationInterrupted):
    """An allocation failed, and no fallback of `on_oom` is left. `partial.stats.fallbacks` lists those applied."""


class UserInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed during a run. `partial` is the same as for `GenerationInterrupted`.

    It is a KeyboardInterrupt, so `except Exception` does not catch it.
    """

    partial: Generation
