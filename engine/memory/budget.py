"""`Budget`: a limit on the device memory of the cache, kept by acting before the cache would exceed it."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from caches import CacheError, CapacityError
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.out_of_memory import Exhausted
from caches.protocol import can_predict
from configs import CacheConfig, ConfigError
from engine.decoding.feeder import Feeder
from engine.errors import InputError
from engine.memory.cache_size import beginning_of
from engine.memory.dry_run import DryRun
from engine.memory.model_footprint import inspect_model
from engine.parallel.tensor_parallel import config_of_rank
from engine.request.run_shape import RunShape
from engine.result import Fallback

_logger = logging.getLogger("engine")


class Budget:
    """most: bytes on the device, None without limit. action: `over_budget`. taken: the list to which it is added."""

    def __init__(self, max_bytes: int | None, action: str, fallbacks: list[Fallback]):
        self._most, self._action, self._taken, self._has_acted = max_bytes, action, fallbacks, False
        self._chosen: tuple[CacheConfig, RunShape, PreTrainedModel] | None = None

    def fitted(self, config: CacheConfig, run_shape: RunShape, model: PreTrainedModel) -> CacheConfig:
        """`config`, or that of a smaller cache if it exceeds the limit. Raises `CapacityError` if none fits."""
        self._chosen = config, run_shape, model
        if self._most is None or config.keeps_nothing:
            return config
        begin_shape = beginning_of(run_shape)
        try:
            needed = _device_bytes(config, begin_shape, model)
        except InputError as error:  # the run itself shows what the cache takes
            _logger.info("max_cache_bytes is checked while the run goes on: %s", error)
            return config
        if needed <= self._most:
            return config
        message = (
            f"the {config.name} cache needs {needed:,} bytes for {begin_shape.rows} rows of {begin_shape.kept} tokens, "
            f"and max_cache_bytes={self._most:,}"
        )
        if self._action == "error":
            raise CapacityError(f"{message}: ask for fewer tokens or rows, raise it, or set over_budget='offload'")
        smaller = self._other(config, prompt_device(model).type, needed / begin_shape.kept)
        if smaller is None:
            raise CapacityError(f"{message}; over_budget={self._action!r} has no remedy for it: choose another cache")
        self._has_acted = True
        self._chosen = smaller, run_shape, model
        description = f"the run begins with {smaller.name}, {smaller.to_dict(use_diff=True)}"
        self._taken.append(Fallback(self._action, description, 0, 0, 0))
        _logger.warning("%s; %s", message, description)
        return smaller

    def planned_bytes(self) -> int:
        """Bytes on the device that the cache takes at most, as planned; 0 for one that was given, or without a plan."""
        if self._chosen is None or self._chosen[0].keeps_nothing:
            return 0
        try:
            return _device_bytes(*self._chosen)
        except (InputError, CapacityError):
            return 0

    def _other(self, config: CacheConfig, device: str, bytes_per_token: float) -> CacheConfig | None:
        """The configuration that takes less device memory than `config`; None where there is none."""
        assert self._most is not None
        if self._action == "slide":
            window = int(self._most / bytes_per_token / _WINDOW_ROOM)
            return config.windowed(window) if window else None
        return config.offloaded("disk" if device == "cpu" else "host")

    def keep(self, feeder: Feeder, tokens: int) -> None:
        """Called before `tokens` more are fed: act if they would exceed the limit. Raises `Exhausted`."""
        cache = feeder.cache
        if self._most is None or not can_predict(cache) or cache.total_tokens == 0:
            return
        needed = cache.device_bytes + cache.growth(tokens)
        if needed <= self._most:
            return
        message = (
            f"the {cache.name} cache needs {needed:,} bytes for {cache.total_tokens + tokens} tokens per row, and "
            f"max_cache_bytes={self._most:,}"
        )
        if self._action == "error" or self._has_acted:
            raise Exhausted(f"{message}; over_budget={self._action!r}" + (" was not enough" if self._has_acted else ""))
        tokens_before, bytes_before = cache.total_tokens, cache.device_bytes
        try:
            if self._action == "offload":
                description = feeder.executor.offload()
            else:
                window = int(self._most / (bytes_before / tokens_before) / _WINDOW_ROOM)
                feeder.executor.impose_window(window)
                description = f"the cache goes on with a window of {window} tokens, which changes what is generated"
        except (CacheError, ConfigError) as error:
            raise Exhausted(f"{message}; over_budget={self._action!r} is not possible: {error}") from None
        if description is None:
            raise Exhausted(f"{message}; over_budget={self._action!r} is not possible: it is offloaded already")
        self._has_acted = True  # where memory was out instead, a later call can act
        self._taken.append(Fallback(self._action, description, tokens_before, bytes_before, feeder.cache.device_bytes))
        _logger.warning("%s; %s", message, self._taken[-1])


def _device_bytes(config: CacheConfig, run_shape: RunShape, model: PreTrainedModel) -> int:
    """Bytes on the device that computes, at most. Raises `InputError` for a model that cannot be planned."""
    footprint = inspect_model(config_of_rank(model), model.dtype, type(model))
    pinned = prompt_device(model).type != "cpu"
    return DryRun(footprint, config, run_shape, pinned).usage().device_bytes


_WINDOW_ROOM = 1.25  # a window's buffers are somewhat longer than the window
