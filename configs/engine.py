"""How a `Generator` works, apart from what it generates; ready configurations by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.base import Config, nearest, require_positive
from configs.cache import CacheConfig
from configs.errors import ConfigError

LINEARS_CHOICES = ("auto", "default", "onednn", "gemv")
COMPILE_CHOICES = ("off", "inductor", "aot_eager", "eager")
BUDGET_CHOICES = ("offload", "slide", "error")
FALLBACKS = ("release", "chunk", "offload", "quantize", "split")
_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class EngineConfig(Config):
    """Options of a `Generator`.

    cache: used when a call names none: a backend's name, or its `CacheConfig`, in a dict or JSON an object like
        {"name": "static", "max_cache_len": 4096}; None is the model's own setting, or else "dynamic".
    prefill_chunk_tokens: the prompt is read in pieces of at most this many tokens; None reads it at once.
    compile: "off", or the `torch.compile` backend that turns the decode step of a fixed-size cache into one graph.
    linears: which matrix product float32 linear layers on a CPU take: "default", torch's own; "onednn"; "auto": for
        each number of rows and size of the matrix the fastest, if by a tenth faster than torch's own, as measured once
        per machine (1 s; kept in `$KVENGINE_CACHE`, by default the user's cache folder); or "gemv": single rows in a
        kernel that is compiled when it is first needed (which takes a C++ compiler, about 20 seconds, once per
        machine), others as "onednn". They differ by rounding. `Stats.linears` says what was taken.
    on_oom: what is tried, in this order, when memory is out in the middle of a run, before it gives up with
        `engine.OutOfMemory`. "release": drop compiled graphs and idle memory. "chunk": read the prompt in ever smaller
        pieces. "offload": move the live cache to host memory, on a machine that computes there to disk. "quantize":
        move it there in few bits, the only one that changes the text. "split": compute the rows of some prompts after
        those of others, in ever smaller parts.
    max_cache_bytes: what the cache of a call may take of the device's memory; None is no limit.
    over_budget: what is done before it takes more. "offload": as on_oom does. "slide": only the last tokens that have
        room stay, which changes the text. "error": `engine.OutOfMemory` with what was generated so far.
    dtype, device_map: how a model given as a path is loaded (`from_pretrained`'s words).
    trust_remote_code: whether Python code that a model's repository brings may run while the model is loaded. Without
        it such a repository is an `InputError`: nothing is asked on standard input.
    """

    cache: str | CacheConfig | None = None
    prefill_chunk_tokens: int | None = None
    compile: str = "off"
    linears: str = "auto"
    on_oom: tuple | list = ("release", "chunk", "offload", "split")
    max_cache_bytes: int | None = None
    over_budget: str = "offload"
    dtype: str = "auto"
    device_map: str = "auto"
    trust_remote_code: bool = False

    def validate(self) -> None:
        positive = {"prefill_chunk_tokens": self.prefill_chunk_tokens, "max_cache_bytes": self.max_cache_bytes}
        require_positive("EngineConfig", **positive)
        if self.compile not in COMPILE_CHOICES:
            raise ConfigError(f"EngineConfig: compile={self.compile!r}, but it is one of {', '.join(COMPILE_CHOICES)}")
        if self.linears not in LINEARS_CHOICES:
            raise ConfigError(f"EngineConfig: linears={self.linears!r}, but it is one of {', '.join(LINEARS_CHOICES)}")
        if self.over_budget not in BUDGET_CHOICES:
            raise ConfigError(
                f"EngineConfig: over_budget={self.over_budget!r}, but it is one of {', '.join(BUDGET_CHOICES)}"
            )
        object.__setattr__(self, "on_oom", checked_fallbacks(self.on_oom))


def checked_fallbacks(fallbacks: Any) -> tuple[str, ...]:
    """What `on_oom` says, as a tuple. Raises `ConfigError` for what is no fallback, and for one that is there twice."""
    if isinstance(fallbacks, str) or not isinstance(fallbacks, (tuple, list)):
        raise ConfigError(
            f"on_oom={fallbacks!r}, but it is a list of fallbacks, such as ['offload'], or [] to give up at once"
        )
    for fallback in fallbacks:
        if fallback not in FALLBACKS:
            raise ConfigError(f"on_oom has {fallback!r}; {nearest(str(fallback), list(FALLBACKS))}")
        if list(fallbacks).count(fallback) > 1:
            raise ConfigError(f"on_oom has {fallback!r} twice: each fallback has one place in the order")
    return tuple(fallbacks)


def presets() -> list[str]:
    """Names of the ready configurations."""
    return sorted(file.stem for file in _PRESETS.glob("*.json"))


def preset(name: str) -> EngineConfig:
    """The ready configuration of that name. Raises `ConfigError` with the nearest names."""
    if name not in presets():
        raise ConfigError(f"there is no preset named {name!r}; {nearest(name, presets())}")
    return EngineConfig.from_json_file(_PRESETS / f"{name}.json")
