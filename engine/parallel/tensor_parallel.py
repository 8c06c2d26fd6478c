"""One rank's part of a model: transformers splits the weights by the model's own plan (`tp_plan`)."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from caches.platform.transformers_api import plan_name
from engine.errors import OptionError
from engine.parallel.ranks import ranks_of

_UNSPLIT = ("replicate", "replicated_with_grad_allreduce")  # styles of modules that every rank has as they are
# Layers that return keys, by their names in transformers' plans. Where one is split, a rank has a part of the heads and
# of the cache; keys that are gathered again, for a norm over all heads, are in the cache of each rank.
_FUSED = "query_key_value"
_KEYS = ("k_proj", "qkv_proj", _FUSED)
_LATENT = "kv_b_proj"  # makes keys of the cache's latent ones, which each rank has


def arguments_of_part(config: PreTrainedConfig, tp: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` for one of `tp` ranks. Raises `OptionError` where the model cannot be split so."""
    from transformers.distributed import DistributedConfig

    check_divides(config, tp)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != tp:
        raise OptionError(
            f"tp={tp} needs {tp} processes, and this is one of {world}: start them with "
            f"torchrun --nproc-per-node {tp} -m engine generate --tp {tp} ..."
        )
    return {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}


def check_divides(config: PreTrainedConfig, tp: int) -> None:
    """Raise `OptionError` unless this model's layers can be split into `tp` equal parts."""
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan:
        raise OptionError(
            f"tp={tp}: transformers has no plan how to split {config.model_type} (base_model_tp_plan). device_map="
            "'balanced' puts whole layers on several devices of one process"
        )
    for name, title, layers in (
        ("num_key_value_heads", "key-value heads", _KEYS),
        ("num_attention_heads", "attention heads", (*_KEYS, _LATENT)),
    ):
        sizes = _sizes(text, name) if _splits(text, layers) else []
        common = math.gcd(*sizes)
        if common % tp:
            divisors = [divisor for divisor in range(2, common + 1) if common % divisor == 0]
            able = f"tp={' or '.join(map(str, divisors))} can" if divisors else "no number of ranks can"
            heads = " and ".join(map(str, sizes))
            raise OptionError(f"tp={tp} cannot divide the {heads} {title} of {config.model_type}: {able}")


def _splits(text: PreTrainedConfig, layers: tuple[str, ...], style: str = "colwise") -> bool:
    """Whether a rank computes with a part of what these layers return or, of style "rowwise", of what they take."""
    plan = text.base_model_tp_plan
    return any(name.rpartition(".")[2] in layers and plan[name] == style for name in plan)


def _sizes(text: PreTrainedConfig, name: str) -> list[int]:
    """All sizes of this name that layers have."""
    sizes = [getattr(layer, name, None) for layer in text.per_layer_config]
    return sorted({size for size in sizes if isinstance(size, int)})


def part_of(config: PreTrainedConfig, tp: int) -> PreTrainedConfig:
    """The configuration of a model whose layers are as large as the largest part of a rank. Raises `OptionError`."""
    check_divides(config, tp)
    rank_config = copy.deepcopy(config)
    text = rank_config.get_text_config(decoder=True)
    if _splits(text, (_FUSED,)):
        # The width of these heads follows from hidden_size, which in truth every rank has in full. To make up for it,
        # feed-forward layers stay as they are, so the working memory is not too small where they are 4 times as wide.
        _divide(text, ("hidden_size", "num_attention_heads"), tp)
        return rank_config
    names = []
    if _splits(text, _KEYS):
        if not _sizes(text, "head_dim"):
            text.head_dim = text.hidden_size // text.num_attention_heads
        names += ["num_attention_heads", "num_key_value_heads"]
    if _splits(text, ("down_proj",), "rowwise"):
        names.append("intermediate_size")
    _divide(text, names, tp)
    return rank_config


def _divide(text: PreTrainedConfig, names: Sequence[str], tp: int) -> None:
    """Divide the sizes of these names, also those of layers that differ from the others."""
    of_layers = text.to_dict().get("per_layer_config")
    if of_layers:
        text.per_layer_config = None  # as long as it is set, what layers differ in cannot be read
    for name in names:
        if (size := getattr(text, name, None)) is not None:
            setattr(text, name, _divided(size, tp))
    if of_layers:
        text.per_layer_config = {
            layer: {name: _divided(size, tp) if name in names else size for name, size in sizes.items()}
            for layer, sizes in of_layers.items()
        }


def _divided(size: int | list[int], tp: int) -> int | list[int]:
    return -(-size // tp) if isinstance(size, int) else [-(-entry // tp) for entry in size]


def config_of_rank(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a loaded model's layers, as large as they are in this process."""
    ranks = ranks_of(model).size
    return model.config if ranks == 1 else part_of(model.config, ranks)


def weight_bytes(model: PreTrainedModel, tp: int = 1) -> int:
    """Bytes of the parameters and buffers of one of `tp` ranks. model: the whole one."""
    split = {name for name, style in model.tp_plan.items() if style not in _UNSPLIT}
    named = dict([*model.named_parameters(), *model.named_buffers()])  # tied ones count once
    return sum(
        tensor.nbytes // (tp if plan_name(name) in split or plan_name(name.rpartition(".")[0]) in split else 1)
        for name, tensor in named.items()
    )
