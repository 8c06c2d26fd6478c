"""The time of a decode step, and the least time that reading its weights and its cache takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import InputError
from engine.generator import Generator
from engine.model.model_sizes import vocabulary_of
from engine.parallel.tensor_parallel import weight_bytes
from engine.prompt import without_padding

_SUM_BYTES = {"cpu": 2**28}  # of the tensor that is summed; larger than a processor's caches
_RUNS = 3


@dataclass(frozen=True)
class StepTime:
    """A greedy decode step of one row.

    weight_bytes: of the weights that it reads: all but embeddings that are only looked up. Where a model picks experts,
    all of them count. cache_bytes: of the cache at the end. bandwidth: bytes per second. ms, least_ms, most_ms: per
    token, median and range of the runs.
    """

    weight_bytes: int
    cache_bytes: int
    bandwidth: float
    ms: float
    least_ms: float
    most_ms: float

    @property
    def floor_ms(self) -> float:
        """Reading weights and cache once at the measured bandwidth."""
        return 1000 * (self.weight_bytes + self.cache_bytes) / self.bandwidth

    @property
    def share(self) -> float:
        """Of the bandwidth that the median step uses: 1 is the floor."""
        return self.floor_ms / self.ms


def bandwidth(device: str = "cpu", seconds: float = 1.0) -> float:
    """Bytes per second that summing a large tensor reads at best within that time: other machines on the same memory
    come and go, and a floor above what a peer takes would be none."""
    data = torch.ones(_SUM_BYTES.get(device, 2**32) // 4, device=device)
    best, end = float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - begun)
    return data.nbytes / best


def step_time(
    generator: Generator,
    prompt_tokens: int,
    new_tokens: int,
    doing: Callable[[str], None] = lambda work: None,
    **cache: object,
) -> StepTime:
    """Measure steps behind a prompt of random tokens. cache: `cache` and `cache_config`, as of `generate`. doing: is
    called with what is measured next. Raises `InputError` for a model with an encoder."""
    model = generator.model
    if model.config.is_encoder_decoder:
        raise InputError(f"{type(model).__name__} has an encoder, whose work is no step: measure models without one")
    words = vocabulary_of(model) or model.get_input_embeddings().num_embeddings
    ids = torch.randint(words, (1, prompt_tokens), generator=torch.Generator().manual_seed(0), device="cpu")
    parameters: dict[str, Any] = {"eos_token_id": [], "do_sample": False, "max_new_tokens": new_tokens} | cache
    doing("measuring the bandwidth of memory")
    rate = bandwidth(model.device.type)
    doing("warming up")
    if generator.config.compile != "off":
        generator.warmup(without_padding(ids), **parameters)
    times, cache_bytes = [], 0
    for run in range(_RUNS + 1):
        out = generator.generate(without_padding(ids), **parameters)
        assert out.stats.decode_tokens_per_s is not None
        cache_bytes = out.stats.cache_bytes
        if run > 0:  # the first one is the warm-up
            times.append(1000 / out.stats.decode_tokens_per_s)
        doing(f"measuring steps, run {run + 1} of {_RUNS}")
    return StepTime(read_bytes(model), cache_bytes, rate, statistics.median(times), min(times), max(times))


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a step reads."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_looked_up = isinstance(table, nn.Embedding) and getattr(head, "weight", None) is not table.weight
    return weight_bytes(model) - (table.weight.nbytes if is_looked_up else 0)
