"""How the keys of a layer are rotated by their position, read from the model's configuration and its code."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from caches.errors import UnsupportedLayerError
from caches.layers.quirks import quirks_of

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class RopeRotation:
    """The rotary position embedding (RoPE) of one layer's keys.

    frequencies: [pairs], in radians per position; channels after the first 2 * pairs are not rotated.
    interleaved: a pair is two neighbouring channels; else channel i is paired with channel i + pairs.
    """

    frequencies: tuple[float, ...] = ()
    interleaved: bool = False

    def rotated(self, keys: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Keys [rows, heads, slots, head_dim] rotated by `delta` [rows, steps] further positions.

        Returns [rows, heads, steps * slots, head_dim]. Only angles change: keys are cached after any scaling.
        """
        pairs, wide = len(self.frequencies), torch.promote_types(keys.dtype, torch.float32)
        # float64, which MPS lacks: in float32 a large delta times a frequency loses its last digits.
        device = torch.device("cpu") if keys.device.type == "mps" else keys.device
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=device)
        angles = delta.to(device, torch.float64)[:, None, :, None, None] * frequencies
        cos, sin = angles.cos().to(keys.device, wide), angles.sin().to(keys.device, wide)
        keys = keys[:, :, None].expand(-1, -1, delta.shape[1], -1, -1)
        rotated, unrotated = keys[..., : 2 * pairs].to(wide), keys[..., 2 * pairs :]
        x, y = rotated.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else rotated.chunk(2, dim=-1)
        coordinates = x * cos - y * sin, y * cos + x * sin
        rotated = torch.stack(coordinates, dim=-1).flatten(-2) if self.interleaved else torch.cat(coordinates, dim=-1)
        return torch.cat([rotated.to(keys.dtype), unrotated], dim=-1).flatten(2, 3)


UNROTATED = RopeRotation()

_DEPENDS_ON_LENGTH = {"dynamic", "longrope"}


def read_rope(config: PreTrainedConfig, index: int, layer_type: str) -> RopeRotation:
    """The rotation of the keys of decoder layer `index`. config: the decoder's `PreTrainedConfig`.

    Raises `UnsupportedLayerError` if the keys are not rotated by their position alone, or the rotation is unknown.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        _refuse(index, layer_type, "come from a latent (MLA, kv_lora_rank), and only part of each key carries RoPE")
    if getattr(config, "alibi", False):
        _refuse(index, layer_type, "carry no position: ALiBi adds distances to the attention scores")
    if _is_unrotated(config, index, layer_type):
        return UNROTATED
    module = _modeling_module(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type) or parameters
    rope = parameters.get("rope_type", "default")
    if rope in _DEPENDS_ON_LENGTH:
        _refuse(index, layer_type, f"are rotated by angles that depend on the length of the text (rope_type={rope!r})")
    if "mrope_section" in parameters:
        _refuse(index, layer_type, "are rotated by positions in several dimensions (mrope_section)")
    if "llama_4_scaling_beta" in parameters:
        _refuse(index, layer_type, "meet queries that are scaled by their position (llama_4_scaling_beta)")
    frequencies = _frequencies(module, config, layer_type)
    if frequencies is None:
        _refuse(index, layer_type, f"have no rotation that the code of {config.model_type!r} shows")
    backwards, interleaved = _direction(module)
    return RopeRotation(tuple(-frequency for frequency in frequencies) if backwards else frequencies, interleaved)


def _refuse(index: int, layer_type: str, reason: str) -> NoReturn:
    raise UnsupportedLayerError(
        f"cache='sink' re-rotates the keys of the first tokens as the window moves, but the keys of layer "
        f"{index} ({layer_type}) {reason}. Use cache='sliding_window' with a window_length, or cache='dynamic'"
    )


def _is_unrotated(config: PreTrainedConfig, index: int, layer_type: str) -> bool:
    """Whether the keys of a layer have no RoPE, in a model that rotates the keys of other layers."""
    rotated = getattr(config, "no_rope_layers", None)  # despite its name: 1 for layers with RoPE
    if rotated:
        return not rotated[index]
    return not quirks_of(config).rotated(config, layer_type)


def _modeling_module(config: PreTrainedConfig) -> ModuleType | None:
    """transformers' module with the model's code; None if the code is not part of transformers."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if type(config) in mapping:
            model_class = mapping[type(config)]
            return sys.modules[(model_class[0] if isinstance(model_class, tuple) else model_class).__module__]
    return None


def _frequencies(module: ModuleType | None, config: PreTrainedConfig, layer_type: str) -> tuple[float, ...] | None:
    """The frequencies of the model's own rotary embedding, which may have a set per layer type; None if not found."""
    for name, embedding_class in vars(module).items() if module is not None else ():
        if not name.endswith("RotaryEmbedding") or "Vision" in name or not isinstance(embedding_class, type):
            continue
        if "config" not in inspect.signature(embedding_class).parameters:
            continue
        with torch.device("cpu"):
            embedding = embedding_class(config)
        for buffer in (f"{layer_type}_inv_freq", "inv_freq"):
            if isinstance(frequencies := getattr(embedding, buffer, None), torch.Tensor):
                return tuple(frequencies.tolist())
    return None


def _direction(module: ModuleType | None) -> tuple[bool, bool]:
    """(backwards, interleaved) of the model's rotation, found by applying its `rotate_half` to [1, 2, 3, 4]."""
    rotate = getattr(module, "rotate_half", None) or getattr(module, "rotate_every_two", None)
    if rotate is None:  # models with `apply_rotary_emb` multiply complex numbers, whose parts are neighbours
        return False, hasattr(module, "apply_rotary_emb")
    rotated = rotate(torch.arange(1.0, 5.0, device="cpu")).tolist()
    return rotated[0] > 0, abs(rotated[0]) == 2
