"""Generates with little more memory than the model takes, in processes of their own. `test_real_limits.py`
runs it:

    python tests/support/starved.py '{"rows": 4, "tokens": 512, "margin_bytes": 100000000,
                                      "options": {"max_new_tokens": 9}}'

One JSON line: what the engine gives without a limit and with one, and what `model.generate` gives with the same limit.
Linux only: it counts what a process has for itself against RLIMIT_DATA, but not the files that it maps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from limits import Limit, in_a_fork
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import engine

SHAPE = dict(vocab_size=2000, hidden_size=256, intermediate_size=256, num_hidden_layers=16, num_attention_heads=8,
             max_position_embeddings=4096)  # fmt: skip


def build(shape: dict[str, int] = SHAPE) -> PreTrainedModel:
    """A Llama that says nearly anything, and never ends by itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape)).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def ours(model: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    try:
        out = engine.generate(model, ids, **options)
    except engine.OutOfMemoryError as stopped:
        return {"died": str(stopped)} | told(stopped.partial)
    return told(out)


def told(out: engine.Generation) -> dict[str, Any]:
    taken = out.stats.fallbacks
    names, seen = [one.name for one in taken], [one.tokens for one in taken]
    return {"tokens": out.tokens, "names": names, "seen": seen, "fallbacks": [str(one) for one in taken]}


def theirs(model: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return {"tokens": out[:, ids.shape[1] :].tolist()}


def main(rows: int, tokens: int, margin_bytes: int, options: dict[str, Any], peer: bool = True) -> None:
    model = build()
    ids = torch.randint(3, 2000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    for cache in ("dynamic", "offloaded"):  # what is loaded or measured once per process
        engine.generate(model, ids[:, :20], cache=cache, max_new_tokens=2)
    model.generate(ids[:, :20], max_new_tokens=2, do_sample=False)
    limit = Limit("VmData", margin_bytes)
    found = {
        "free": in_a_fork(lambda: ours(model, ids, options)),
        "ours": in_a_fork(lambda: ours(model, ids, options), limit),
    }
    if peer:
        shared = {name: value for name, value in options.items() if name != "on_oom"}
        found["theirs"] = in_a_fork(lambda: theirs(model, ids, shared), limit)
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
