"""The lossy caches and weights that `quality.py` compares: a new one is a line of `CACHES` or `WEIGHTS`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common import encoded_bytes_per_token, full_bytes_per_token
from transformers import QuantizedCache

import configs

RESIDUAL = 32  # tokens that stay in full, where a line says nothing else
WINDOWS = (2, 4, 8)  # a window has this share of the text


@dataclass(frozen=True)
class CacheVariant:
    """cache, options: as of `generate`. share: the window is the text's length over this. theirs: transformers' own."""

    options: dict[str, Any] = field(default_factory=dict)
    cache: str = "quantized"
    share: int | None = None
    theirs: bool = False

    def parameters(self, config: Any, length: int) -> dict[str, Any]:
        """`cache` and `cache_config`, as of `generate`, for texts of `length` tokens."""
        if self.theirs:
            return {"cache": QuantizedCache(config=config, **self.options)}
        window = {} if self.share is None else {"window_length": length // self.share}
        return {"cache": self.cache, "cache_config": self.options | window}

    def encoded_bits(self, config: Any) -> float | None:
        """Bits per value of keys and values that are encoded, with scales and offsets, by arithmetic."""
        if self.cache != "quantized":
            return None
        options = configs.QuantizedCacheConfig.from_dict(self.options)
        return 8 * encoded_bytes_per_token(config, 4, options) / full_bytes_per_token(config, 1)


def _codecs() -> dict[str, CacheVariant]:
    """All that can be chosen of every codec, and transformers' quantized cache where it has the same."""
    variants = {}
    for backend, facts in configs.CODECS.items():
        for bits in sorted(facts.bits, reverse=True):
            options = {"backend": backend, "nbits": bits, "residual_length": RESIDUAL}
            name = backend if len(facts.bits) == 1 else f"{backend}, {bits} bit{'s' if bits > 1 else ''}"
            for axis, per_channel in facts.axes.items():
                groups = "per channel" if per_channel else "per token"
                variants[f"{name}, {groups}"] = CacheVariant(options | {"axis_key": axis, "axis_value": axis})
            if not facts.axes:
                variants[name] = CacheVariant(options)
    for name in ("quanto, 4 bits", "quanto, 2 bits", "hqq, 4 bits", "hqq, 2 bits"):
        variants[f"transformers {name}"] = CacheVariant(variants[f"{name}, per token"].options, theirs=True)
    return variants


CACHES: dict[str, CacheVariant] = {
    "dynamic": CacheVariant(cache="dynamic"),
    **_codecs(),
    "kivi, 4 bits, the last 128 in full": CacheVariant({"backend": "kivi", "nbits": 4, "residual_length": 128}),
    "kivi, 2 bits, the last 128 in full": CacheVariant({"backend": "kivi", "nbits": 2, "residual_length": 128}),
    **{f"sliding_window, 1/{share}": CacheVariant(cache="sliding_window", share=share) for share in WINDOWS},
    **{f"sink, 1/{share}": CacheVariant(cache="sink", share=share) for share in WINDOWS},
}
WEIGHTS: dict[str, dict[str, Any]] = {"full": {}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"}}
"""By name options of `EngineConfig`."""
PEER_CACHES = ("F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""llama.cpp's types of keys and values."""
PEER_WEIGHTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_XS")
"""llama.cpp's types of weights, as it mixes them by default."""
