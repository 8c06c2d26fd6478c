"""Loads one rank's part of a model: transformers splits the weights by the model's own plan (`tp_plan`)."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

from engine.errors import OptionError


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
        if isinstance(heads, int) and heads % tp:
            divisors = [number for number in range(2, heads + 1) if heads % number == 0]
            numbers = f"tp={' or '.join(map(str, divisors))} can" if divisors else "no number of ranks can"
            raise OptionError(f"tp={tp} cannot divide the {heads} {title} of {config.model_type}: {numbers}")
