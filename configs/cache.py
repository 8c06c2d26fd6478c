"""The configuration of each cache backend: a frozen dataclass whose fields are the backend's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from configs.base import Config, nearest, require_positive
from configs.errors import ConfigError
from configs.plugins import check_name, load_plugins

CACHE_PLUGINS = "kvengine.caches"  # the group of entry points
_BITS = ("nbits", "nbits_key", "nbits_value")
_COUNTS = ("max_batch_size", "max_cache_len", "window_length", "q_group_size", *_BITS)  # options that are at least 1
C = TypeVar("C", bound="CacheConfig")


@dataclass(frozen=True)
class CacheConfig(Config):
    """Base of the cache configurations.

    `name` is the backend's name in the registry; `to_dict` includes it. `CacheConfig.from_dict` and `from_json_file`
    build the subclass with that name, your own subclasses included. Defining a second class with the same name raises
    `ConfigError`, unless it is `class Mine(CacheConfig, replace=True)`. The same class may be defined again.
    """

    name: ClassVar[str]
    needs_size: ClassVar[bool] = False
    """Whether the backend needs max_cache_len, the number of tokens per row."""
    keeps_nothing: ClassVar[bool] = False
    """Whether every step computes the whole text again."""
    offloaded_as: ClassVar[str | None] = None
    """The backend that holds the same outside of the device; None where there is none."""
    windowed_as: ClassVar[str | None] = None
    """The backend that goes on with the last tokens alone; None where there is none."""
    _by_name: ClassVar[dict[str, type[CacheConfig]]] = {}

    def __init_subclass__(cls, replace: bool = False, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        if "name" not in vars(cls):
            return
        if cls.name in CacheConfig._by_name:
            registered = CacheConfig._by_name[cls.name]
            check_name(f"a cache configuration named {cls.name!r}", [registered], [cls], replace)
        CacheConfig._by_name[cls.name] = cls

    @classmethod
    def names(cls) -> list[str]:
        """The names of all cache configurations, those of plug-ins included."""
        load_plugins(CACHE_PLUGINS)
        return list(CacheConfig._by_name)

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, object], **overrides: object) -> C:
        """As `Config.from_dict`. The key "name" selects the class; classes with a name do not need the key."""
        values = {**data, **overrides}
        own_name = getattr(cls, "name", None)
        name = values.pop("name", own_name)
        if name != own_name:
            if isinstance(name, str) and name not in cls._by_name:
                load_plugins(CACHE_PLUGINS)
            config_class = cls._by_name.get(name) if isinstance(name, str) else None
            if config_class is None:
                raise ConfigError(f"there is no cache configuration named {name!r}; {nearest(str(name), cls.names())}")
            if not issubclass(config_class, cls):
                raise ConfigError(f"{cls.__name__} is for the cache {own_name!r}, not for {name!r}")
            return config_class.from_dict(values)
        if own_name is None:
            raise ConfigError(f'a cache configuration needs its "name"; known: {", ".join(cls.names())}')
        return super().from_dict(values)

    def to_dict(self, use_diff: bool = False) -> dict[str, Any]:
        """The dict that `from_dict` takes, with "name". use_diff: only values that differ from the defaults."""
        return {"name": self.name} | super().to_dict(use_diff)

    @property
    def parts(self) -> list[CacheConfig]:
        """The configurations of the caches that are made with it: this one, where it is no pair."""
        return [self]

    @property
    def changes_text(self) -> str | None:
        """Why a text can be another one than with all keys and values in full; None where it cannot."""
        return None

    @property
    def harms_text(self) -> str | None:
        """Why texts get much worse, and what to choose instead: a warning. None where they do not."""
        return None

    def offloaded(self, residency: str) -> CacheConfig | None:
        """The configuration with the same options whose cache is in `residency`, "host" or "disk"; None where there is
        none, or this one is there already."""
        if getattr(self, "residency", "device") in (residency, "disk"):
            return None
        return self._changed(self.offloaded_as, residency=residency)

    def without_kernels(self) -> CacheConfig:
        """The configuration of the same cache where the kernels for CPUs cannot compute."""
        return self

    def windowed(self, window_length: int) -> CacheConfig | None:
        """The configuration of a cache of the last tokens alone; None where there is none."""
        return self._changed(self.windowed_as, window_length=window_length)

    def _changed(self, name: str | None, **changes: object) -> CacheConfig | None:
        """The configuration of the backend `name` with the options that both have, but for sizes, and `changes`."""
        if name is None:
            return None
        chosen = config_of(name)
        shared = {option for option in self.option_names() if option in chosen.option_names()} - {"max_cache_len"}
        return chosen.from_dict({option: getattr(self, option) for option in shared} | changes)


def config_of(name: str) -> type[CacheConfig]:
    """The configuration class of the backend `name`. Raises `ConfigError`."""
    return type(CacheConfig.from_dict({"name": name}))


@dataclass(frozen=True)
class PlacedCacheConfig(CacheConfig):
    """Base of the configurations of caches that keep tensors.

    max_batch_size: the most rows; None is no limit, and for caches of fixed size the rows of the first step.
    device: the device on which the model's keys are expected; a step with keys on another one is refused. The cache
        allocates its tensors on the device of each layer in any case.
    dtype: the data type that the model's keys are expected to have, such as "bfloat16".
    layer_device_map: the expected devices of single layers, by layer number.
    """

    offloaded_as: ClassVar[str | None] = "offloaded"
    windowed_as: ClassVar[str | None] = "sliding_window"
    max_batch_size: int | None = None
    device: str | None = None
    dtype: str | None = None
    layer_device_map: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer_device_map, dict):  # JSON has no integer keys
            by_name = {str(layer): str(device) for layer, device in self.layer_device_map.items()}
            object.__setattr__(self, "layer_device_map", by_name)
        super().__post_init__()

    def validate(self) -> None:
        require_positive(type(self).__name__, **{name: getattr(self, name, None) for name in _COUNTS})


@dataclass(frozen=True)
class DynamicCacheConfig(PlacedCacheConfig):
    """A cache that grows with the text."""

    name: ClassVar[str] = "dynamic"
    absent: ClassVar[dict[str, str]] = {"max_cache_len": "a dynamic cache grows: for a fixed size use cache='static'"}


@dataclass(frozen=True)
class StaticCacheConfig(PlacedCacheConfig):
    """A cache of fixed size, whose tensors keep their addresses.

    max_cache_len: tokens per row; None is prompt + new tokens of the first call that uses it.
    """

    name: ClassVar[str] = "static"
    needs_size: ClassVar[bool] = True
    max_cache_len: int | None = None


@dataclass(frozen=True)
class HybridCacheConfig(StaticCacheConfig):
    """A static cache for models that have layers with sliding windows."""

    name: ClassVar[str] = "hybrid"


@dataclass(frozen=True)
class SlidingWindowCacheConfig(PlacedCacheConfig):
    """A cache of the last tokens: the model's own window, or one that is imposed on its full attention.

    window_length: tokens that a token attends to, itself included; None is the model's own window.
    max_cache_len: tokens per row, if there will be fewer than a window; None is room for the window.
    """

    name: ClassVar[str] = "sliding_window"
    windowed_as: ClassVar[str | None] = None
    window_length: int | None = None
    max_cache_len: int | None = None

    @property
    def changes_text(self) -> str | None:
        return None if self.window_length is None else f"a token attends to the last {self.window_length} alone"

    def offloaded(self, residency: str) -> CacheConfig | None:
        return super().offloaded(residency) if self.window_length is None else None


def check_residency(residency: str, folder: str | None, residencies: Collection[str]) -> None:
    """Raise `ConfigError` unless `residency` is one of `residencies` and `folder` is given only for "disk"."""
    if residency not in residencies:
        raise ConfigError(f"residency={residency!r}, but it has to be {' or '.join(map(repr, residencies))}")
    if folder is not None and residency != "disk":
        raise ConfigError(f"folder={folder!r} is for residency='disk', but this is {residency!r}")


@dataclass(frozen=True)
class OffloadedCacheConfig(PlacedCacheConfig):
    """A growing cache outside of the device; the device has only the layers that are being computed.

    residency: "host": in host memory; "disk": in a temporary file in `folder`.
    folder: the folder for the file; None is the system's folder for temporary files, or /var/tmp if that is in memory.
    offload_only_non_sliding: whether layers with sliding windows stay on the device.
    """

    name: ClassVar[str] = "offloaded"
    windowed_as: ClassVar[str | None] = None
    choices: ClassVar[dict[str, Collection[Any]]] = {"residency": ("host", "disk")}
    residency: str = "host"
    folder: str | None = None
    offload_only_non_sliding: bool = False

    def validate(self) -> None:
        super().validate()
        check_residency(self.residency, self.folder, self.choices["residency"])


@dataclass(frozen=True)
class OffloadedStaticCacheConfig(OffloadedCacheConfig):
    """`OffloadedCacheConfig` with a fixed size.

    max_cache_len: tokens per row; None is prompt + new tokens of the first call that uses it.
    """

    name: ClassVar[str] = "offloaded_static"
    needs_size: ClassVar[bool] = True
    max_cache_len: int | None = None
    offload_only_non_sliding: bool = True


@dataclass(frozen=True)
class SinkCacheConfig(PlacedCacheConfig):
    """A cache of the first and the last tokens: endless text in constant memory (StreamingLLM, arXiv 2309.17453).

    window_length: tokens that a token attends to at most, itself and the sinks included. It has to be given.
    num_sink_tokens: the number of sinks, the first tokens of each row.
    """

    name: ClassVar[str] = "sink"
    offloaded_as: ClassVar[str | None] = None
    windowed_as: ClassVar[str | None] = None
    absent: ClassVar[dict[str, str]] = {
        "residency": "its window has a constant size and stays on the device; cache='quantized_sink' can keep its "
        "codes in host memory or on disk"
    }
    window_length: int | None = None
    num_sink_tokens: int = 4

    @property
    def changes_text(self) -> str | None:
        window = f"a token attends to the first {self.num_sink_tokens} and the last, {self.window_length} in all"
        return " and ".join(filter(None, (window, super().changes_text)))

    def validate(self) -> None:
        super().validate()
        if self.num_sink_tokens < 0:
            raise ConfigError(f"num_sink_tokens={self.num_sink_tokens}, but it has to be 0 or more")
        if self.window_length is not None and self.window_length <= self.num_sink_tokens:
            raise ConfigError(
                f"window_length={self.window_length} is a window smaller than the sinks: num_sink_tokens="
                f"{self.num_sink_tokens} and the current token have to fit in: choose "
                f"window_length={self.num_sink_tokens + 1} or more"
            )


@dataclass(frozen=True)
class MambaCacheConfig(PlacedCacheConfig):
    """A cache of conv and recurrent states, for models without attention."""

    name: ClassVar[str] = "mamba"
    offloaded_as: ClassVar[str | None] = None
    windowed_as: ClassVar[str | None] = None


@dataclass(frozen=True)
class EncoderDecoderCacheConfig(CacheConfig):
    """The two caches of an encoder-decoder model, each the name of a backend or its configuration.

    self_cache: for the decoder's tokens.
    cross_cache: for the encoder's tokens, which are written once; None is "static" if the self cache is of fixed size,
        else "dynamic"; if it is in host memory or on disk, "offloaded_static" or "offloaded" in the same place.
    """

    name: ClassVar[str] = "encoder_decoder"
    self_cache: str | CacheConfig = "dynamic"
    cross_cache: str | CacheConfig | None = None

    @property
    def parts(self) -> list[CacheConfig]:
        """The configurations of both caches; of the self cache alone where the other follows from it."""
        chosen = [config for config in (self.self_cache, self.cross_cache) if config is not None]
        return [config_of(config)() if isinstance(config, str) else config for config in chosen]

    @property
    def changes_text(self) -> str | None:
        return next(filter(None, (config.changes_text for config in self.parts)), None)

    @property
    def harms_text(self) -> str | None:
        return next(filter(None, (config.harms_text for config in self.parts)), None)

    def offloaded(self, residency: str) -> CacheConfig | None:
        main, *cross = (config.offloaded(residency) for config in self.parts)
        if main is None:
            return None
        return dataclasses.replace(self, self_cache=main, cross_cache=(cross[0] or self.cross_cache) if cross else None)


@dataclass(frozen=True)
class NoCacheConfig(CacheConfig):
    """No cache: every step computes the whole sequence again. There are no options."""

    name: ClassVar[str] = "none"
    keeps_nothing: ClassVar[bool] = True


DEFAULT_CACHE = DynamicCacheConfig.name
COMPILED_CACHE = StaticCacheConfig.name  # of a step in one graph: its tensors keep their addresses
NO_CACHE = NoCacheConfig.name
