"""Checks that a model rotates its keys as its configuration says, by two forwards of a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from caches import Cache, EngineCache, UnsupportedLayerError, build
from caches.layers.model_version import model_version
from caches.platform.accelerate_hooks import prompt_device
from caches.protocol import attention_view
from configs.cache import DEFAULT_CACHE
from engine.model.columns import Columns
from engine.model.model_runner import ForwardOptions, ModelRunner

_TOKENS, _FAR = 4, 1000


@dataclass(frozen=True)
class _Trial:
    """rotated_by: what the model had for that. far: an offset in positions. firsts, laters: each layer's keys of the
    same tokens at position 0 and at the offset."""

    rotated_by: tuple[object, ...]
    far: int
    firsts: list[torch.Tensor | None]
    laters: list[torch.Tensor | None]


_trials: WeakKeyDictionary[PreTrainedModel, _Trial] = WeakKeyDictionary()


def check_rope(runner: ModelRunner, cache: EngineCache) -> None:
    """Raise `UnsupportedLayerError` if keys at a later position are not the keys at position 0, rotated by `cache`."""
    model, view = runner.model, attention_view(cache)
    rotations = view.rotations
    if not rotations:
        return
    version, trial = model_version(model), _trials.get(model)
    rotated_by = version.buffers, version.settings  # frequencies, and what multiplies them
    if trial is None or trial.rotated_by != rotated_by:
        max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _FAR
        far = max(1, min(_FAR, max_positions - _TOKENS))
        trial = _trials[model] = _Trial(rotated_by, far, _keys(runner, 0), _keys(runner, far))
    far = trial.far
    for layer, rotation in rotations.items():
        first_keys, later = trial.firsts[layer], trial.laters[layer]
        assert first_keys is not None
        assert later is not None
        difference = rotation.rotated(first_keys, torch.tensor([[far]], device="cpu")) - later
        error = float(difference.float().norm() / later.float().norm())
        if not error < (0.01 if first_keys.dtype in (torch.float32, torch.float64) else 0.2):
            raise UnsupportedLayerError(
                f"cache={cache.name!r} re-rotates the keys of the first tokens as the window moves, but the keys of "
                f"layer {layer} ({view.specs[layer].layer_type}) of {type(model).__name__} are not rotated as its "
                f"configuration says: {far} positions later they are off by {error:.0%}. {_remedy(model)}"
            )


def _remedy(model: PreTrainedModel) -> str:
    other_caches = "cache='sliding_window' with a window_length, or cache='dynamic'"
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    for dtype in (torch.bfloat16, torch.float16):
        if frequencies and all(torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)) for buffer in frequencies):
            name = str(dtype).removeprefix("torch.")
            return (
                f"Its frequencies are rounded to {name}, as by model.to({dtype}): load the model with dtype={name!r} "
                f"in place of that, which keeps them in float32. Or use {other_caches}"
            )
    return f"Use {other_caches}"


def _keys(runner: ModelRunner, begin: int) -> list[torch.Tensor | None]:
    """The keys of every layer for `_TOKENS` tokens from position `begin` on, [1, kv_heads, tokens, head_dim]."""
    ids = torch.arange(_TOKENS, device=prompt_device(runner.model))[None]
    positions = torch.arange(begin, begin + _TOKENS, device=ids.device)[None]
    cache = build(DEFAULT_CACHE, runner.model.config)
    assert isinstance(cache, Cache)
    with torch.no_grad():
        runner.feed(ids, Columns(torch.ones_like(ids), _TOKENS, positions), cache, options=ForwardOptions(prefill=True))
    cache.commit()
    return [layer.keys for layer in cache.layers]
