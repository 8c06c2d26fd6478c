"""One rank's part of a model: transformers splits the weights by the model's own plan (`tp_plan`)."""

from __future__ import annotations

import copy
import os
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import OptionError
from engine.model.ranks import plan_name, ranks_of

_UNSPLIT = ("replicate", "replicated_with_grad_allreduce")  # styles of modules that every rank has as they are


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
    for name, title in (("num_key_value_heads", "key-value heads"), ("num_attention_heads", "attention heads")):
        heads = getattr(text, name, None)
        if _splits_attention(text) and isinstance(heads, int) and heads % tp:
            divisors = [divisor for divisor in range(2, heads + 1) if heads % divisor == 0]
            able = f"tp={' or '.join(map(str, divisors))} can" if divisors else "no number of ranks can"
            raise OptionError(f"tp={tp} cannot divide the {heads} {title} of {config.model_type}: {able}")


def _splits_attention(text: PreTrainedConfig) -> bool:
    return any(name.endswith("k_proj") for name in text.base_model_tp_plan)


def part_of(config: PreTrainedConfig, tp: int) -> PreTrainedConfig:
    """The configuration of a model whose layers are as large as the part of one of `tp` ranks. Raises `OptionError`."""
    check_divides(config, tp)
    part = copy.deepcopy(config)
    text = part.get_text_config(decoder=True)
    if _splits_attention(text):
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        text.num_attention_heads //= tp
        text.num_key_value_heads //= tp
    if any(name.endswith("down_proj") for name in text.base_model_tp_plan):
        text.intermediate_size //= tp
    return part


def config_of_rank(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of a loaded model's layers, as large as they are in this process."""
    ranks = ranks_of(model).size
    return model.config if ranks == 1 else part_of(model.config, ranks)


def part_bytes(model: PreTrainedModel, tp: int) -> int:
    """Bytes of the parameters and buffers of one of `tp` ranks. model: the whole one, on the meta device."""
    split = {name for name, style in model.tp_plan.items() if style not in _UNSPLIT}
    named = dict([*model.named_parameters(), *model.named_buffers()])  # tied ones count once
    return sum(
        tensor.nbytes // (tp if plan_name(name) in split or plan_name(name.rpartition(".")[0]) in split else 1)
        for name, tensor in named.items()
    )
