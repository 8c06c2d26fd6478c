"""How a `Generator` works, apart from what it generates; ready configurations by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.base import Config, nearest, require_positive
from configs.cache import CacheConfig
from configs.errors import ConfigError

LINEARS_CHOICES = ("auto", "default", "onednn")
COMPILE_CHOICES = ("off", "inductor", "aot_eager", "eager")
_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class EngineConfig(Config):
    """Options of a `Generator`.

    cache: used when a call names none: a backend's name, or its `CacheConfig`, in a dict or JSON an object like
        {"name": "static", "max_cache_len": 4096}; None is the model's own setting, or else "dynamic".
    prefill_chunk_tokens: the prompt is read in pieces of at most this many tokens; None reads it at once.
    compile: "off", or the `torch.compile` backend that turns the decode step of a fixed-size cache into one graph.
    linears: how float32 linear layers on a CPU compute: "default" as torch picks, "onednn", or "auto": whichever of the
        two is faster on this machine. They differ by rounding.
    dtype, device_map: how a model given as a path is loaded (`from_pretrained`'s words).
    """

    cache: str | CacheConfig | None = None
    prefill_chunk_tokens: int | None = None
    compile: str = "off"
    linears: str = "auto"
    dtype: str = "auto"
    device_map: str = "auto"

    def validate(self) -> None:
        require_positive("EngineConfig", prefill_chunk_tokens=self.prefill_chunk_tokens)
        if self.compile not in COMPILE_CHOICES:
            raise ConfigError(f"EngineConfig: compile={self.compile!r}, but it is one of {', '.join(COMPILE_CHOICES)}")
        if self.linears not in LINEARS_CHOICES:
            raise ConfigError(f"EngineConfig: linears={self.linears!r}, but it is one of {', '.join(LINEARS_CHOICES)}")


def presets() -> list[str]:
    """Names of the ready configurations."""
    return sorted(file.stem for file in _PRESETS.glob("*.json"))


def preset(name: str) -> EngineConfig:
    """The ready configuration of that name. Raises `ConfigError` with the nearest names."""
    if name not in presets():
        raise ConfigError(f"there is no preset named {name!r}; {nearest(name, presets())}")
    return EngineConfig.from_json_file(_PRESETS / f"{name}.json")
