"""What a run may do when memory is out, in which order (`on_oom`)."""

from __future__ import annotations

from configs.base import nearest
from configs.errors import ConfigError

FALLBACKS = ("release", "chunk", "offload", "quantize", "split")


def checked_fallbacks(fallbacks: object) -> tuple[str, ...]:
    """`on_oom` as a tuple. Raises `ConfigError` for an unknown fallback and for one that is listed twice."""
    if isinstance(fallbacks, str) or not isinstance(fallbacks, (tuple, list)):
        raise ConfigError(
            f"on_oom={fallbacks!r}, but it has to be a list of fallbacks, such as ['offload'], or [] for none"
        )
    for fallback in fallbacks:
        if fallback not in FALLBACKS:
            raise ConfigError(f"on_oom has {fallback!r}; {nearest(str(fallback), list(FALLBACKS))}")
        if list(fallbacks).count(fallback) > 1:
            raise ConfigError(f"on_oom has {fallback!r} twice: list each fallback once")
    return tuple(fallbacks)
