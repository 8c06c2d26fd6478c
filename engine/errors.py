"""Errors of the engine. (Those of the caches derive from `caches.CacheError`.)

EngineError
├── ConfigError (also a ValueError)       a configuration with an unknown key or an impossible value
├── InputError (also a ValueError)        a prompt that the model cannot be given
├── OptionError (also a ValueError, a TypeError)   an option that is unknown or cannot apply
└── Interrupted (also a RuntimeError)     something failed while generating; carries what was generated so far
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs import ConfigError, EngineError

if TYPE_CHECKING:
    from engine.result import Generation

__all__ = ["ConfigError", "EngineError", "InputError", "Interrupted", "OptionError"]


class InputError(EngineError, ValueError):
    """A prompt that the model cannot be given."""


class OptionError(EngineError, ValueError, TypeError):
    """An option that is unknown, contradicts another, or cannot apply to this model."""


class Interrupted(EngineError, RuntimeError):
    """Something raised while generating. `partial` holds all tokens emitted before, and the cache to continue."""

    def __init__(self, message: str, partial: Generation):
        super().__init__(message)
        self.partial = partial
