"""The configurations of quantized caches, and what each codec supports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from configs.base import nearest
from configs.cache import CacheConfig, PlacedCacheConfig, SinkCacheConfig, check_residency
from configs.errors import ConfigError


@dataclass(frozen=True)
class CodecFacts:
    """What a codec supports.

    bits: the numbers of bits per code; the first is the default. axes: by the library's axis, whether groups are per
    channel (else per token); the first is the default; empty if fixed. package: the module that it imports; None if it
    needs only torch. distribution: the package's name for pip. group: elements per group by default. per_channel: of
    "keys" and "values", those with groups per channel, if axes are fixed. has_kernels: whether codes are whole numbers,
    which kernels multiply with.
    """

    bits: tuple[int, ...]
    axes: dict[int, bool]
    package: str | None = None
    distribution: str | None = None
    group: int = 64
    per_channel: tuple[str, ...] = ()
    has_kernels: bool = True


CODECS = {
    "quanto": CodecFacts((4, 2), {0: False, -1: True}, "optimum.quanto", "optimum-quanto"),
    "hqq": CodecFacts((4, 1, 2, 3, 8), {1: False, 0: True}, "hqq", "hqq"),
    "fp8": CodecFacts((8,), {}, has_kernels=False),
    "kivi": CodecFacts((4, 2, 3, 8), {}, group=32, per_channel=("keys",)),
}
"""By backend."""
_ALL_BITS = tuple(sorted({bits for facts in CODECS.values() for bits in facts.bits}))
_LEAST_BITS = 3  # of keys in groups per token: a few channels are far larger than the others, and set the scale


@dataclass(frozen=True)
class QuantizedCacheConfig(PlacedCacheConfig):
    """A cache of keys and values in few bits, with the most recent tokens in full precision.

    backend: the codec, by the name of its library.
    nbits: bits per element; None is 4, for fp8 8.
    nbits_key, nbits_value: bits per element of keys, of values; None is nbits. Keys lose more than values.
    axis_key, axis_value: the grouping, by the axis that the library uses. Per token (neighbouring channels of one
        token), the default: 0 for quanto, 1 for hqq. Per channel (one channel of q_group_size tokens): -1 for quanto, 0
        for hqq. Fixed for fp8 and kivi.
    q_group_size: elements that share a scale; None is 64, for kivi 32. If it does not divide the size of a head, the
        next smaller divisor.
    rotate: whether keys and values are rotated before they are encoded, and back when they are read, so that no channel
        is far larger than the others of its group. Only for groups per token. None: there, but for fp8, whose steps
        are smaller for smaller elements.
    residual_length: the number of most recent tokens in full precision.
    compute_dtype: the data type of scales and of the arithmetic of decoding; None is the model's.
    fused: whether attention multiplies with the packed codes, in kernels of the package. None:
        where there are kernels, which is the fastest: on a CPU, but for 3 bits, fp8 and float64. True: refuse the
        rest. Queries and attention weights are rounded to 16 bits, 256 times finer than codes of 8 bits. False:
        codes are unpacked first.
    residency: "device": the codes are on the device; "host": in host memory; "disk": in a temporary file in `folder`.
    folder: the folder for the file; None is the system's folder for temporary files, or /var/tmp if that is in memory.
    """

    name: ClassVar[str] = "quantized"
    offloaded_as: ClassVar[str | None] = "offloaded_quantized"
    windowed_as: ClassVar[str | None] = None
    choices: ClassVar[dict[str, Collection[Any]]] = {
        "backend": CODECS,  # itself: those that are registered later too
        **dict.fromkeys(("nbits", "nbits_key", "nbits_value"), _ALL_BITS),
        "axis_key": (0, 1, -1),
        "axis_value": (0, 1, -1),
        "compute_dtype": ("float16", "bfloat16", "float32", "float64"),
        "residency": ("device", "host", "disk"),
    }
    absent: ClassVar[dict[str, str]] = {"max_cache_len": "the cache grows block by block and has no fixed size"}
    backend: str = "quanto"
    nbits: int | None = None
    nbits_key: int | None = None
    nbits_value: int | None = None
    axis_key: int | None = None
    axis_value: int | None = None
    q_group_size: int | None = None
    rotate: bool | None = None
    residual_length: int = 128
    compute_dtype: str | None = None
    fused: bool | None = None
    residency: str = "device"
    folder: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", self.backend.lower())  # transformers writes "HQQ" too
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        if self.backend not in CODECS:
            raise ConfigError(f"there is no codec named {self.backend!r}; {nearest(self.backend, list(CODECS))}")
        facts = CODECS[self.backend]
        for bits in (self.nbits, self.nbits_key, self.nbits_value):
            if bits is not None and bits not in facts.bits:
                supported = ", ".join(map(str, sorted(facts.bits)))
                raise ConfigError(
                    f"backend={self.backend!r} does not support {bits} bits, only {supported}: choose one of them, or "
                    "another backend"
                )
        for name, axis in (("axis_key", self.axis_key), ("axis_value", self.axis_value)):
            if axis is not None and not facts.axes:
                raise ConfigError(f"{name}={axis}, but the groups of backend={self.backend!r} are fixed: leave it out")
            if axis is not None and axis not in facts.axes:
                axes = ", ".join(map(str, sorted(facts.axes)))
                raise ConfigError(f"{name}={axis}, but backend={self.backend!r} has the axes {axes}")
        if self.rotate and (self.is_per_channel("keys") or self.is_per_channel("values")):
            raise ConfigError(
                f"rotate=True, but backend={self.backend!r} has groups per channel. There a channel that is larger "
                "than the others has scales of its own, and rotation would spread it over all of them: leave rotate "
                "out, or choose groups per token, as in backend='quanto'"
            )
        if self.residual_length < 0:
            raise ConfigError(f"residual_length={self.residual_length}, but it has to be 0 or more")
        check_residency(self.residency, self.folder, self.choices["residency"])
        if self.compute_dtype not in (None, *self.choices["compute_dtype"]):
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} is no floating-point type to decode in")
        if self.fused and not self.has_kernels:
            raise ConfigError(
                f"fused=True, but there is no kernel for backend={self.backend!r} with {self._bits_in_words} and "
                f"compute_dtype={self.compute_dtype}: use 1, 2, 4 or 8 bits of quanto, hqq or kivi, and leave "
                "compute_dtype out or at float32"
            )

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels for attention over codes of this kind on a CPU. They decode in float32."""
        few = {self.bits_of("keys"), self.bits_of("values")}
        return CODECS[self.backend].has_kernels and 3 not in few and self.compute_dtype in (None, "float32")

    def bits_of(self, name: str) -> int:
        """Bits per element of `name`, "keys" or "values"."""
        bits = self.nbits_key if name == "keys" else self.nbits_value
        bits = self.nbits if bits is None else bits
        return CODECS[self.backend].bits[0] if bits is None else bits

    @property
    def rotates(self) -> bool:
        """Whether keys and values are rotated before they are encoded."""
        if self.rotate is not None:
            return self.rotate
        return CODECS[self.backend].has_kernels and not (self.is_per_channel("keys") or self.is_per_channel("values"))

    @property
    def _bits_in_words(self) -> str:
        keys, values = self.bits_of("keys"), self.bits_of("values")
        return f"{keys} bits" if keys == values else f"{keys} bits of keys and {values} of values"

    @property
    def group(self) -> int:
        """Elements that share a scale, at most."""
        return CODECS[self.backend].group if self.q_group_size is None else self.q_group_size

    @property
    def block(self) -> int:
        """Tokens that are quantized together."""
        if self.is_per_channel("keys") or self.is_per_channel("values"):
            return self.group
        return max(1, min(64, self.residual_length))

    def is_per_channel(self, name: str) -> bool:
        """Whether a group of `name`, "keys" or "values", is one channel of a block of tokens."""
        facts, axis = CODECS[self.backend], self.axis_key if name == "keys" else self.axis_value
        if not facts.axes:
            return name in facts.per_channel
        return next(iter(facts.axes.values())) if axis is None else facts.axes[axis]

    def without_kernels(self) -> CacheConfig:
        return self if self.fused is not None else replace(self, fused=False)

    @property
    def changes_text(self) -> str | None:
        return f"keys and values are rounded to {self._bits_in_words}"

    @property
    def harms_text(self) -> str | None:
        if self.bits_of("keys") >= _LEAST_BITS or self.is_per_channel("keys"):
            return None
        return (
            f"cache={self.name!r} keeps keys in {self.bits_of('keys')} bits and groups per token "
            f"(backend={self.backend!r}), which spoils texts: with 2 bits the perplexity of SmolLM2-135M-Instruct "
            "rises by 63 %, and by 23 % with backend='kivi', whose groups of keys are per channel. Choose kivi, or "
            "more bits for keys (nbits_key)"
        )


@dataclass(frozen=True)
class OffloadedQuantizedCacheConfig(QuantizedCacheConfig):
    """`QuantizedCacheConfig` with the codes in host memory or on disk; they are fetched layer by layer."""

    name: ClassVar[str] = "offloaded_quantized"
    residency: str = "host"


@dataclass(frozen=True)
class QuantizedSinkCacheConfig(SinkCacheConfig, QuantizedCacheConfig):
    """`SinkCacheConfig` with a quantized window, which has to be longer than the tokens in full precision."""

    name: ClassVar[str] = "quantized_sink"

    def validate(self) -> None:
        super().validate()
        unquantized = max(self.residual_length, self.block)
        if self.window_length is not None and self.window_length - 1 <= unquantized:
            raise ConfigError(
                f"window_length={self.window_length}, but up to {unquantized} tokens stay in full precision: nothing "
                "would be quantized: give a wider window or a smaller residual_length, or use cache='sink'"
            )
