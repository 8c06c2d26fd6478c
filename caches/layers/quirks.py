"""What is so of some families of models, and neither their configurations say nor a trial of the model shows.

No other module names a family. A row has transformers' name of it, `model_type`, and what its code there does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _all(config: PreTrainedConfig, layer_type: str) -> bool:
    return True


def _windows(config: PreTrainedConfig, layer_type: str) -> bool:
    """Layers with a sliding window."""
    return layer_type != "full_attention"


def _windows_if_any(config: PreTrainedConfig, layer_type: str) -> bool:
    """Layers with a sliding window; all of a model that has none."""
    return getattr(config, "sliding_window", None) is None or _windows(config, layer_type)


@dataclass(frozen=True)
class Quirks:
    """Facts of a family; the defaults are those of nearly all.

    rotated: of the decoder's configuration and a layer type, whether such layers rotate their keys (RoPE).
    index_has_positions: the cache layers of its indexed layers have the positions of all tokens too.
    has_own_cache: with use_cache=True its forward takes no class of caches but its own, with False any; its own class
    has states that are in none of its layers.
    generates_alike: its own `generate` comes down to the usual one for everything but what it refuses.
    read_layers: names of linear layers whose weights the code of other modules reads.
    """

    rotated: Callable[[Any, str], bool] = _all
    index_has_positions: bool = False
    has_own_cache: bool = False
    generates_alike: bool = False
    read_layers: tuple[str, ...] = ()


_QUIRKS = {
    # Attention rotates keys `if self.sliding_window is not None`, `if self.is_local_attention`, or
    # `if self.sliding_window is None or self.is_sliding`, where the first is of the whole model.
    "afmoe": Quirks(rotated=_windows),
    "cohere2": Quirks(rotated=_windows),
    "cohere2_moe": Quirks(rotated=_windows),
    "exaone4": Quirks(rotated=_windows_if_any),
    "exaone_moe": Quirks(rotated=_windows),  # a model without a window cannot be made
    "flint": Quirks(rotated=_windows),
    "kolibri1": Quirks(rotated=_windows),  # likewise
    # Models without the option have no rotary embedding, though its class is in their code.
    "granitemoehybrid": Quirks(rotated=lambda config, _: config.position_embedding_type == "rope"),
    "zamba2": Quirks(rotated=lambda config, _: bool(config.use_mem_rope)),
    # The model writes `indexer_position_ids` into the first indexed layer of the cache.
    "qwen4_exp_text": Quirks(index_has_positions=True),
    # `MiniMaxModel.forward` raises for other classes than `MiniMaxCache`, whose `linear_cache` has the states.
    "minimax": Quirks(has_own_cache=True),
    # Its `generate` switches the model's adapter off where there are no sounds.
    "granite_speech": Quirks(generates_alike=True),
    # Its `generate` makes images where generation_mode="image", which is no parameter here.
    "janus": Quirks(generates_alike=True),
    # Its `generate` cuts sounds of more than 30 seconds into pieces, and the encoder refuses them.
    "whisper": Quirks(generates_alike=True),
    # Mixers compute `self.dt_proj.weight @ time_step`.
    "falcon_mamba": Quirks(read_layers=("dt_proj",)),
    "jamba": Quirks(read_layers=("dt_proj",)),
    "mamba": Quirks(read_layers=("dt_proj",)),
    # The router computes with `self.classifier.weight` in float32.
    "longcat_flash": Quirks(read_layers=("classifier",)),
}
_NONE = Quirks()


def quirks_of(config: PreTrainedConfig) -> Quirks:
    """Those of the family that a configuration is of, a model's or that of a part such as the decoder."""
    return _QUIRKS.get(config.model_type, _NONE)


def read_layers() -> set[str]:
    """The names of layers whose weights are read in some family: models from elsewhere have the same mixers."""
    return {name for quirks in _QUIRKS.values() for name in quirks.read_layers}
