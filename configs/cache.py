"""One frozen dataclass per cache family; its fields are the options of that family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from configs.base import Config, nearest, require_positive
from configs.errors import ConfigError
from configs.plugins import check_name, load_plugins

CACHE_PLUGINS = "kvengine.caches"  # the group of entry points
C = TypeVar("C", bound="CacheConfig")


@dataclass(frozen=True)
class CacheConfig(Config):
    """Base of the cache configurations. `name` is the backend's name in the registry and travels with the options.

    `CacheConfig.from_dict` and `from_json_file` build the subclass that has the name, yours too once it is defined. A
    name that another class has is a `ConfigError`, unless the class is defined with `replace=True`, as in
    `class Mine(CacheConfig, replace=True)`; the same class may be defined again.
    """

    name: ClassVar[str]
    needs_size: ClassVar[bool] = False
    """Whether it has to be told, as max_cache_len, how many tokens it will hold."""
    _by_name: ClassVar[dict[str, type[CacheConfig]]] = {}

    def __init_subclass__(cls, replace: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" not in vars(cls):
            return
        if cls.name in CacheConfig._by_name:
            holder = CacheConfig._by_name[cls.name]
            check_name(f"a cache configuration named {cls.name!r}", [holder], [cls], replace)
        CacheConfig._by_name[cls.name] = cls

    @classmethod
    def names(cls) -> list[str]:
        """The names that have a configuration, those of plug-ins too."""
        load_plugins(CACHE_PLUGINS)
        return list(CacheConfig._by_name)

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any], **overrides: Any) -> C:
        """As `Config.from_dict`. The key "name" picks the class; a class that has one does without the key."""
        values = {**data, **overrides}
        own = getattr(cls, "name", None)
        name = values.pop("name", own)
        if name != own:
            if isinstance(name, str) and name not in cls._by_name:
                load_plugins(CACHE_PLUGINS)
            kind = cls._by_name.get(name) if isinstance(name, str) else None
            if kind is None:
                raise ConfigError(f"there is no cache configuration named {name!r}; {nearest(str(name), cls.names())}")
            if not issubclass(kind, cls):
                raise ConfigError(f"{cls.__name__} is for the cache {own!r}, not for {name!r}")
            return kind.from_dict(values)
        if own is None:
            raise ConfigError(f'a cache configuration needs its "name"; known: {", ".join(cls.names())}')
        return super().from_dict(values)

    def to_dict(self, use_diff: bool = False) -> dict[str, Any]:
        """What `from_dict` takes, the name included. use_diff: else only what differs from the defaults."""
        return {"name": self.name} | super().to_dict(use_diff)


@dataclass(frozen=True)
class PlacedCacheConfig(CacheConfig):
    """Base of the caches that keep tensors.

    max_batch_size: rows there is room for; None for any number, of a fixed cache those of the first step.
    device: where the model's keys are expected to be. Tensors are made where each layer computes; a step that comes
        from elsewhere is refused.
    dtype: the data type that the model's keys are expected to have, such as "bfloat16".
    layer_device_map: where those of some layers are expected to be, by layer number.
    """

    max_batch_size: int | None = None
    device: str | None = None
    dtype: str | None = None
    layer_device_map: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer_device_map, dict):  # numbers are names in JSON
            by_name = {str(layer): str(device) for layer, device in self.layer_device_map.items()}
            object.__setattr__(self, "layer_device_map", by_name)
        super().__post_init__()

    def validate(self) -> None:
        require_positive(type(self).__name__, max_batch_size=self.max_batch_size)


@dataclass(frozen=True)
class DynamicCacheConfig(PlacedCacheConfig):
    """A cache that makes room as tokens come."""

    name: ClassVar[str] = "dynamic"


@dataclass(frozen=True)
class StaticCacheConfig(PlacedCacheConfig):
    """A cache of fixed size whose tensors never move.

    max_cache_len: tokens it can hold per row; None means prompt + new tokens of the first call that uses it.
    """

    name: ClassVar[str] = "static"
    needs_size: ClassVar[bool] = True
    max_cache_len: int | None = None

    def validate(self) -> None:
        super().validate()
        require_positive(type(self).__name__, max_cache_len=self.max_cache_len)


@dataclass(frozen=True)
class HybridCacheConfig(StaticCacheConfig):
    """A static cache for models of which some layers look back at a window only."""

    name: ClassVar[str] = "hybrid"


@dataclass(frozen=True)
class SlidingWindowCacheConfig(PlacedCacheConfig):
    """Only the last tokens: the model's own window, or one imposed on its full attention.

    window_length: columns a token can look at, itself included; None is the model's own window.
    max_cache_len: tokens per row, where fewer than a window will come; None has room for the window.
    """

    name: ClassVar[str] = "sliding_window"
    window_length: int | None = None
    max_cache_len: int | None = None

    def validate(self) -> None:
        super().validate()
        sizes = {"window_length": self.window_length, "max_cache_len": self.max_cache_len}
        require_positive(type(self).__name__, **sizes)


def check_residency(residency: str, folder: str | None, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless it is one of those known, and a folder is given for "disk" only."""
    if residency not in known:
        raise ConfigError(f"residency={residency!r}, but it has to be {' or '.join(map(repr, known))}")
    if folder is not None and residency != "disk":
        raise ConfigError(f"folder={folder!r} is for residency='disk', but this is {residency!r}")


@dataclass(frozen=True)
class OffloadedCacheConfig(PlacedCacheConfig):
    """A cache of which the device only has the layers at work; it makes room as tokens come.

    residency: where the others are: in host memory, or on disk, in a file in `folder` that leaves nothing behind.
    folder: for files on disk; None is the system's folder for temporary files, or /var/tmp where that is in memory.
    offload_only_non_sliding: whether layers that look back at a window stay on the device.
    """

    name: ClassVar[str] = "offloaded"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {"residency": ("host", "disk")}
    residency: str = "host"
    folder: str | None = None
    offload_only_non_sliding: bool = False

    def validate(self) -> None:
        super().validate()
        check_residency(self.residency, self.folder, self.choices["residency"])


@dataclass(frozen=True)
class OffloadedStaticCacheConfig(OffloadedCacheConfig):
    """`OffloadedCacheConfig` with a fixed size.

    max_cache_len: tokens it can hold per row; None means prompt + new tokens of the first call that uses it.
    """

    name: ClassVar[str] = "offloaded_static"
    needs_size: ClassVar[bool] = True
    max_cache_len: int | None = None
    offload_only_non_sliding: bool = True

    def validate(self) -> None:
        super().validate()
        require_positive(type(self).__name__, max_cache_len=self.max_cache_len)


@dataclass(frozen=True)
class SinkCacheConfig(PlacedCacheConfig):
    """The first tokens and the last: text without end, in constant memory (StreamingLLM, arXiv 2309.17453).

    window_length: tokens that a token looks at once there are as many, itself included. It has to be given.
    num_sink_tokens: how many of them are a row's first ones.
    """

    name: ClassVar[str] = "sink"
    absent: ClassVar[dict[str, str]] = {
        "residency": "its window, of constant size, stays where layers compute; what cache='quantized_sink' encodes "
        "can be elsewhere"
    }
    window_length: int | None = None
    num_sink_tokens: int = 4

    def validate(self) -> None:
        super().validate()
        require_positive(type(self).__name__, window_length=self.window_length)
        if self.num_sink_tokens < 0:
            raise ConfigError(f"num_sink_tokens={self.num_sink_tokens}, but there are 0 or more of them")
        if self.window_length is not None and self.window_length <= self.num_sink_tokens:
            raise ConfigError(
                f"window_length={self.window_length} is a window smaller than the sinks: num_sink_tokens="
                f"{self.num_sink_tokens} of them and the token being fed have to fit in: choose "
                f"window_length={self.num_sink_tokens + 1} or more"
            )


@dataclass(frozen=True)
class MambaCacheConfig(PlacedCacheConfig):
    """The states of a model without attention."""

    name: ClassVar[str] = "mamba"


@dataclass(frozen=True)
class EncoderDecoderCacheConfig(CacheConfig):
    """The two caches of an encoder-decoder model, each a backend's name or its configuration.

    self_cache: for the decoder's own tokens.
    cross_cache: for the encoder's, which are written once; None is "static" beside a cache whose tensors never move,
        else "dynamic".
    """

    name: ClassVar[str] = "encoder_decoder"
    self_cache: str | CacheConfig = "dynamic"
    cross_cache: str | CacheConfig | None = None


@dataclass(frozen=True)
class NoCacheConfig(CacheConfig):
    """No cache: every step computes the whole sequence again. It has no options."""

    name: ClassVar[str] = "none"
