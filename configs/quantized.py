"""What the codecs of quantized caches can do, and the options of those caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from configs.base import nearest, require_positive
from configs.cache import PlacedCacheConfig, SinkCacheConfig, check_residency
from configs.errors import ConfigError


@dataclass(frozen=True)
class CodecFacts:
    """What a codec library can do.

    bits: those of a code that it supports, the first is the default. axes: what its axes mean: whether a group is one
    channel of a block of columns, not neighbouring channels of one column; the first is the default. package: the
    module to import, None for torch alone; distribution: its name for pip. group: numbers in a group by default.
    """

    bits: tuple[int, ...]
    axes: dict[int, bool]
    package: str | None = None
    distribution: str | None = None
    group: int = 64


CODECS = {
    "quanto": CodecFacts((4, 2), {0: False, -1: True}, "optimum.quanto", "optimum-quanto"),
    "hqq": CodecFacts((4, 1, 2, 3, 8), {1: False, 0: True}, "hqq", "hqq"),
    "fp8": CodecFacts((8,), {}),
    "kivi": CodecFacts((4, 2, 3, 8), {}, group=32),
}
"""The backends of a quantized cache. fp8 groups neighbouring channels; kivi keys over columns, values over channels."""


@dataclass(frozen=True)
class QuantizedCacheConfig(PlacedCacheConfig):
    """Keys and values in few bits, the most recent ones in full.

    backend: the codec that writes the bits.
    nbits: bits of a number; None is 4, of fp8 8.
    axis_key, axis_value: what a group is, as the library counts axes: of quanto 0 and of hqq 1, the defaults, it is
        neighbouring channels of one token, of quanto -1 and of hqq 0 one channel of q_group_size tokens. fp8 and kivi
        have none to choose.
    q_group_size: numbers that share a scale; None is 64, of kivi 32. Where it does not divide the head's width, the
        largest number below that does.
    residual_length: the most recent tokens that stay in full.
    compute_dtype: the data type of scales and of the arithmetic of decoding; None is the model's.
    fused: whether attention multiplies with the codes as they are, in kernels that are compiled when they are first
        needed, by a C++ compiler: the fastest where it can be, for float32 on a CPU, and not of 3 bits or fp8. What
        they are multiplied with is rounded to 16 bits, thousands of times finer than the codes are.
    residency: where the codes are: on the device, in host memory, or on disk, in a file in `folder`.
    folder: for files on disk; None is the system's folder for temporary files, or /var/tmp where that is in memory.
    """

    name: ClassVar[str] = "quantized"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "backend": tuple(CODECS),
        "nbits": tuple(sorted({bits for facts in CODECS.values() for bits in facts.bits})),
        "axis_key": (0, 1, -1),
        "axis_value": (0, 1, -1),
        "compute_dtype": ("float16", "bfloat16", "float32", "float64"),
        "residency": ("device", "host", "disk"),
    }
    absent: ClassVar[dict[str, str]] = {
        "max_cache_len": "blocks are made as tokens come, so it has no fixed size and needs none"
    }
    backend: str = "quanto"
    nbits: int | None = None
    axis_key: int | None = None
    axis_value: int | None = None
    q_group_size: int | None = None
    residual_length: int = 128
    compute_dtype: str | None = None
    fused: bool = False
    residency: str = "device"
    folder: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", self.backend.lower())  # transformers writes "HQQ" too
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        require_positive(type(self).__name__, q_group_size=self.q_group_size, nbits=self.nbits)
        if self.backend not in CODECS:
            raise ConfigError(f"there is no codec named {self.backend!r}; {nearest(self.backend, list(CODECS))}")
        facts = CODECS[self.backend]
        if self.nbits is not None and self.nbits not in facts.bits:
            raise ConfigError(
                f"backend={self.backend!r} cannot write {self.nbits} bits, only {_either(sorted(facts.bits))}: "
                "choose one of them, or another backend"
            )
        for name, axis in (("axis_key", self.axis_key), ("axis_value", self.axis_value)):
            if axis is not None and not facts.axes:
                raise ConfigError(f"{name}={axis}, but the groups of backend={self.backend!r} are fixed: leave it out")
            if axis is not None and axis not in facts.axes:
                raise ConfigError(
                    f"{name}={axis}, but backend={self.backend!r} has the axes {_either(sorted(facts.axes))}"
                )
        if self.residual_length < 0:
            raise ConfigError(f"residual_length={self.residual_length}, but it counts tokens: 0 or more")
        check_residency(self.residency, self.folder, self.choices["residency"])
        if self.compute_dtype not in (None, *self.choices["compute_dtype"]):
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} is no floating-point type to decode in")
        if self.fused and (self.backend == "fp8" or self.bits == 3 or self.compute_dtype not in (None, "float32")):
            raise ConfigError(
                f"fused=True, but there is no kernel for backend={self.backend!r} with nbits={self.bits} and "
                f"compute_dtype={self.compute_dtype}: use 1, 2, 4 or 8 bits of quanto, hqq or kivi, in float32"
            )

    @property
    def bits(self) -> int:
        return CODECS[self.backend].bits[0] if self.nbits is None else self.nbits

    @property
    def group(self) -> int:
        """Numbers that share a scale, at most."""
        return CODECS[self.backend].group if self.q_group_size is None else self.q_group_size

    @property
    def block(self) -> int:
        """Tokens that are encoded together."""
        if self.groups_over_columns("keys") or self.groups_over_columns("values"):
            return self.group
        return max(1, min(64, self.residual_length))

    def groups_over_columns(self, name: str) -> bool:
        """Whether a group of "keys" or "values" is one channel of a block of tokens."""
        axes, axis = CODECS[self.backend].axes, self.axis_key if name == "keys" else self.axis_value
        if not axes:
            return self.backend == "kivi" and name == "keys"
        return next(iter(axes.values())) if axis is None else axes[axis]


@dataclass(frozen=True)
class OffloadedQuantizedCacheConfig(QuantizedCacheConfig):
    """`QuantizedCacheConfig` of which the device only has the codes of the layers at work."""

    name: ClassVar[str] = "offloaded_quantized"
    residency: str = "host"


@dataclass(frozen=True)
class QuantizedSinkCacheConfig(SinkCacheConfig, QuantizedCacheConfig):
    """`SinkCacheConfig` whose window, longer than what stays in full, is kept as `QuantizedCacheConfig` says."""

    name: ClassVar[str] = "quantized_sink"

    def validate(self) -> None:
        super().validate()
        in_full = max(self.residual_length, self.block)
        if self.window_length is not None and self.window_length - 1 <= in_full:
            raise ConfigError(
                f"window_length={self.window_length}, but up to {in_full} tokens stay in full, so nothing would be "
                "encoded: give a wider window or a smaller residual_length, or use cache='sink'"
            )


def _either(values: list[int]) -> str:
    return ", ".join(map(str, values))
