"""How the keys of a layer are rotated by their position, read from the model's configuration and its code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from caches.errors import UnsupportedLayerError


@dataclass(frozen=True)
class RopeRotation:
    """Pairs of a key's numbers turn by `frequencies` [pairs], in radians per position; the numbers after them stay.

    interleaved: pairs are neighbours; else the first half is paired with the second.
    """

    frequencies: tuple[float, ...] = ()
    interleaved: bool = False

    def rotated(self, keys: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Keys [rows, heads, columns, head_dim] as they would be `delta` [rows, steps] positions later.

        Returns [rows, heads, steps * columns, head_dim]. Only the angle changes: variants that also scale keys have
        done so already.
        """
        pairs, wide = len(self.frequencies), torch.promote_types(keys.dtype, torch.float32)
        # A large delta times a frequency has lost its last digits in float32.
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=keys.device)
        angles = delta.to(keys.device, torch.float64)[:, None, :, None, None] * frequencies
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        keys = keys[:, :, None].expand(-1, -1, delta.shape[1], -1, -1)
        rotated, rest = keys[..., : 2 * pairs].to(wide), keys[..., 2 * pairs :]
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else rotated.chunk(2, dim=-1)
        parts = first * cos - second * sin, second * cos + first * sin
        rotated = torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)
        return torch.cat([rotated.to(keys.dtype), rest], dim=-1).flatten(2, 3)


UNROTATED = RopeRotation()

# Models that rotate the keys of their windows only, and those where it is so if there are windows at all.
_WINDOWS_ONLY = {"afmoe", "cohere2", "cohere2_moe", "flint"}
_WINDOWS_ONLY_IF_ANY = {"exaone4", "exaone4_5_text", "exaone_moe", "kolibri1"}
# Models that rotate keys only where their configuration asks for it.
_IF_ASKED_FOR: dict[str, Callable[[Any], bool]] = {
    "granitemoehybrid": lambda config: config.position_embedding_type == "rope",
    "zamba2": lambda config: bool(config.use_mem_rope),
}
_DEPENDS_ON_LENGTH = {"dynamic", "longrope"}


def read_rope(config: Any, index: int, layer_type: str) -> RopeRotation:
    """How layer `index` of the decoder that `config` describes turns its keys.

    Raises `UnsupportedLayerError` where that is no turn by the position, or cannot be known.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        _refuse(index, layer_type, "are made of a latent that only in part knows of the position")
    if getattr(config, "alibi", False):
        _refuse(index, layer_type, "know nothing of their position: ALiBi counts distances in the attention")
    if _is_unrotated(config, index, layer_type):
        return UNROTATED
    module = _modeling_module(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type) or parameters
    kind = parameters.get("rope_type", "default")
    if kind in _DEPENDS_ON_LENGTH:
        _refuse(index, layer_type, f"turn by angles that depend on how long the text is (rope_type={kind!r})")
    if "mrope_section" in parameters:
        _refuse(index, layer_type, "turn by positions in several dimensions")
    if "llama_4_scaling_beta" in parameters:
        _refuse(index, layer_type, "meet queries that grow with the position, however near both are")
    frequencies = _frequencies(module, config, layer_type)
    if frequencies is None:
        _refuse(index, layer_type, f"do not turn with the position, as far as the code of {config.model_type!r} tells")
    backwards, interleaved = _direction(module)
    return RopeRotation(tuple(-one for one in frequencies) if backwards else frequencies, interleaved)


def _refuse(index: int, layer_type: str, why: str) -> NoReturn:
    raise UnsupportedLayerError(
        f"cache='sink' moves its first tokens along with the window by turning their keys, but the keys of layer "
        f"{index} ({layer_type}) {why}. Use cache='sliding_window' with a window_length, or cache='dynamic'"
    )


def _is_unrotated(config: Any, index: int, layer_type: str) -> bool:
    """Whether the keys of a layer know nothing of their position, in a model that rotates those of others."""
    rotated = getattr(config, "no_rope_layers", None)  # 1 where it does
    if rotated:
        return not rotated[index]
    if config.model_type in _IF_ASKED_FOR and _IF_ASKED_FOR[config.model_type](config) is False:
        return True
    windows_only = config.model_type in _WINDOWS_ONLY or (
        config.model_type in _WINDOWS_ONLY_IF_ANY and getattr(config, "sliding_window", None) is not None
    )
    return windows_only and layer_type == "full_attention"


def _modeling_module(config: Any) -> Any:
    """The module of transformers that has the model's code; None for code from elsewhere."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return sys.modules[(found[0] if isinstance(found, tuple) else found).__module__]
    return None


def _frequencies(module: Any, config: Any, layer_type: str) -> tuple[float, ...] | None:
    """Those of the model's own rotation embedding, which may have some for each type of layer."""
    for name, kind in vars(module).items() if module is not None else ():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or not isinstance(kind, type):
            continue
        if "config" not in inspect.signature(kind).parameters:
            continue
        with torch.device("cpu"):
            embedding = kind(config)
        for buffer in (f"{layer_type}_inv_freq", "inv_freq"):
            if isinstance(found := getattr(embedding, buffer, None), torch.Tensor):
                return tuple(found.tolist())
    return None


def _direction(module: Any) -> tuple[bool, bool]:
    """Whether pairs turn the other way round, and whether they are neighbours."""
    rotate = getattr(module, "rotate_half", None) or getattr(module, "rotate_every_two", None)
    if rotate is None:  # then pairs are complex numbers, whose parts are neighbours
        return False, hasattr(module, "apply_rotary_emb")
    quarter = rotate(torch.arange(1.0, 5.0)).tolist()
    return quarter[0] > 0, abs(quarter[0]) == 2
