"""Errors of the engine.

EngineError
├── caches.CacheError                     what a cache raises: see `caches.errors`
├── ConfigError (also a ValueError)       a configuration with an unknown key or an impossible value
├── InputError (also a ValueError)        a prompt that the model cannot be given
├── OptionError (also a ValueError, a TypeError)   an option that is unknown or cannot apply
└── GenerationInterrupted (also a RuntimeError)     something failed while generating; carries what was generated so far
    ├── InvalidLogitsError                         the model, its draft or a processor left no token to choose
    ├── GenerationCancelled                         the call's `cancellation` was set
    └── OutOfMemoryError                       memory is out, and no way to go on is left

UserInterrupt (a KeyboardInterrupt, no EngineError)     the same for Ctrl-C
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
    """A prompt that the model cannot be given."""


class OptionError(EngineError, ValueError, TypeError):
    """An option that is unknown, contradicts another, or cannot apply to this model."""


class GenerationInterrupted(EngineError, RuntimeError):
    """Something raised while generating. `partial` holds all tokens emitted before, and the cache to continue.

    Of a search it holds the best beams so far. Before the first tokens it has the rows of the prompt.
    """

    def __init__(self, message: str, partial: Generation):
        super().__init__(message)
        self.partial = partial


class InvalidLogitsError(GenerationInterrupted):
    """NaN, infinite, or only -inf: scores that no token can be chosen by. `partial` ends before the step of them."""


class GenerationCancelled(GenerationInterrupted):
    """The event that was given as `cancellation` was set."""


class OutOfMemoryError(GenerationInterrupted):
    """Memory is out, and `on_oom` leaves no way to go on. `partial.stats.fallbacks` says what was tried."""


class UserInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed while generating. `partial` as of `GenerationInterrupted`.

    As every KeyboardInterrupt it is no Exception: code that goes on after whatever fails lets it pass.
    """

    partial: Generation
