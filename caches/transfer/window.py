"""A window imposed on a live cache: only its last tokens go on."""

from __future__ import annotations

from caches.core.layer import Layer
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.protocol import check_has_layers_of_ours
from caches.registry import recipe
from configs import SlidingWindowCacheConfig


def apply_window(cache: Cache | EncoderDecoder, window_length: int) -> Cache:
    """A `sliding_window` cache that holds what of `cache` is in the window of `window_length` tokens. `cache` stays.

    Raises `UnsupportedLayerError` where no window can be imposed on the layers, `StepError` where tokens in the window
    were evicted.
    """
    check_has_layers_of_ours(cache)
    if not isinstance(cache, Cache):
        raise StepError(f"a window cannot be imposed on a {cache.name} cache of an encoder-decoder model")
    options = SlidingWindowCacheConfig(window_length=window_length, max_batch_size=cache.max_rows)
    empty = recipe(options.name).make(cache.specs, options)
    assert isinstance(empty, Cache)
    if cache.view.imposes_windows or cache.is_quantized:
        raise UnsupportedLayerError(f"the tokens of a {cache.name} cache cannot go on in another window")
    cache.crop(0)  # commits the step of another loop
    if cache.batch_size == -1:
        return empty
    contents, sizes = [], []
    for target, source in zip(empty.layers, cache.layers, strict=True):
        content = source.dense_state()
        tokens = target.timeline.retention.surviving(cache.total_tokens)
        sizes.append(tokens if "keys" in content else None)
        for name in [name for name in content if isinstance(source, Layer) and name in source.stores]:
            if content[name].shape[-2] < tokens:
                available = content[name].shape[-2]
                raise StepError(f"a window of {window_length} tokens needs {tokens} tokens, and {available} are there")
            content[name] = content[name][..., content[name].shape[-2] - tokens :, :]
        contents.append(content)
    empty.stack.load_dense(cache.total_tokens, cache.batch_size, sizes, contents)
    empty.log = cache.log
    return empty
