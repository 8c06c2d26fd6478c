"""`engine bench`: the time of a decode step beside its lower bound, and what is lossy beside the model in full."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import options, output, values
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.errors import OptionError
from engine.tables import duration, facts, terminal_width

if TYPE_CHECKING:
    from engine.measuring.decoding import StepTime
    from engine.measuring.quality import Divergence

_TOKENS = 1024  # of a text, at most


@options.takes({None: options.BENCH})
def bench(
    path: str | None,
    model: str | None,
    prompt_tokens: int,
    max_new_tokens: int,
    threads: int | None,
    quality: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Measure a model here: the lower bound of a decode step, its time, and on request the quality of what is lossy."""
    model = values.one_model(path, model)
    config = values.engine_config(None, asked)
    cache = {
        "cache": asked["cache"],
        "cache_config": values.assignments(asked["cache_option"], "--cache-option") or None,
    }
    text = None if quality is None else values.prompts([], [quality])[0]
    with Work() as work:
        start_libraries(work, model)
        import torch

        from engine.measuring.decoding import step_time

        if threads is not None:
            torch.set_num_threads(threads)
        divergence = None if text is None else _divergence(work, model, config, cache, text)
        generator = load_generator(work, model, config)
        step = step_time(generator, prompt_tokens, max_new_tokens, work.doing, **cache)
    report = {
        "threads": torch.get_num_threads(),
        "step": asdict(step) | {"floor_ms": step.floor_ms, "share": step.share},
        "quality": None
        if divergence is None
        else asdict(divergence[0]) | {"full_perplexity": divergence[1].perplexity},
    }
    if as_json:
        output.say_json(report)
    else:
        output.say(facts(_rows(step, divergence, prompt_tokens + max_new_tokens), terminal_width(100)))


def _divergence(
    work: Work, model: str | None, config: Any, cache: dict[str, Any], text: str
) -> tuple[Divergence, Divergence]:
    """Of the model with this configuration and cache, and of the model in full."""
    import torch

    from configs import EngineConfig
    from engine.measuring.quality import SKIPPED, Reference, engine_reader
    from engine.scoring import read_texts

    full = load_generator(work, model, EngineConfig(dtype=config.dtype, device_map=config.device_map, weights="full"))

    ids = torch.tensor([read_texts(text, full.tokenizer)[0][:_TOKENS]], device="cpu")
    if ids.shape[1] < 2 * SKIPPED:
        raise OptionError(
            f"--quality: the text has {ids.shape[1]} tokens, and those after the first {SKIPPED} are compared: give a "
            f"text of {2 * SKIPPED} or more"
        )
    work.doing("reading the text with the model in full")
    reference = Reference(ids, engine_reader(full.generate))
    lossy = full
    if (config.weights, config.activations) != ("full", "full"):
        del full, lossy  # before the other one needs memory
        lossy = load_generator(work, model, config)
    work.doing("reading the text again")
    return reference.compare(engine_reader(partial(lossy.generate, **cache))), reference.full


def _rows(step: StepTime, divergence: tuple[Divergence, Divergence] | None, tokens: int) -> list[tuple[str, str]]:
    typical, least, most = (duration(ms / 1000) for ms in (step.ms, step.least_ms, step.most_ms))
    rows = [
        ("weights", f"{step.weight_bytes / 1e6:,.1f} MB that a step reads"),
        ("cache", f"{step.cache_bytes / 1e6:,.1f} MB after {tokens:,} tokens"),
        ("bandwidth", f"{step.bandwidth / 1e9:.1f} GB/s"),
        ("lower bound", f"{duration(step.floor_ms / 1000)} per token: reading both once"),
        ("measured", f"{typical} per token ({least} to {most}), {step.share:.0%} of the bandwidth"),
    ]  # fmt: skip
    if divergence is not None:
        lossy, full = divergence
        rows += [
            ("perplexity", f"{lossy.perplexity:.3f}, in full {full.perplexity:.3f} ({lossy.tokens:,} tokens)"),
            ("divergence", f"KL {lossy.kl:.5f} nats per token"),
            ("same top token", f"{lossy.same_top:.1%}"),
        ]
    return rows
