"""What a generation really takes, in a process of its own: prints the plan's bytes and the most that was resident.

python peak.py SHAPE CACHE PROMPT_TOKENS CHUNK_TOKENS
"""

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from common import SHAPES, llama
from memory import forget_peak, memory_bytes

import engine

shape, cache, prompt, chunk = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) or None
NEW = 16


def run(model, tokens):
    ids = torch.randint(3, 500, (1, tokens))
    # torch's own products: they are what the plan is compared with.
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk, linears="default"))
    return generator.generate(ids, cache=cache, max_new_tokens=NEW)


torch.set_num_threads(1)
run(llama(**SHAPES["tiny"]), 200)  # loads libraries
gc.collect()
before = memory_bytes("cpu", peak=False)
model = llama(**SHAPES[shape])
gc.collect()
forget_peak("cpu")
run(model, prompt)
measured = memory_bytes("cpu", peak=True) - before
found = engine.plan(model, cache=cache, prompt_tokens=prompt, max_new_tokens=NEW, prefill_chunk_tokens=chunk)
print(found.weight_bytes + sum(found.backends[0].need_bytes.values()), measured)
