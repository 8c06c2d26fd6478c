"""Imports torch and transformers for the commands that need them, silences their messages, and loads models."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

from engine.cli.progress import Work

if TYPE_CHECKING:
    from pathlib import Path

    from configs import EngineConfig
    from engine.generator import Generator


def start_libraries(work: Work, *models: str | None) -> None:
    """Import the libraries. models: paths and hub ids, which are checked first: this takes less time."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # `work` says what is done; read when tqdm is imported
    from engine.loading.location import locate

    work.doing("looking for the model")
    for model in models:
        if model is not None:
            locate(model)
    work.doing("starting torch and transformers")
    if "caches" not in sys.modules:
        import caches  # noqa: F401 - imports them faster than a plain import

        gc.freeze()  # the imported objects stay until the end: collections need not visit them
    import huggingface_hub.utils
    import transformers.utils

    # The engine raises or logs what these warnings say.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()


def load_generator(
    work: Work,
    path: str | None,
    config: EngineConfig,
    adapter: Path | None = None,
    reads_images: bool = False,
) -> Generator:
    """path: None for the shipped model. adapter: the folder of one for it."""
    from engine.generator import Generator
    from engine.loading.load import SHIPPED_MODEL, load, load_with_adapter

    work.doing("loading the model")
    source = SHIPPED_MODEL if path is None else path
    if adapter is not None:
        return Generator(*load_with_adapter(source, adapter, config, reads_images), config)
    if reads_images:
        return Generator(*load(source, None, config, reads_images=True), config)
    return Generator(source, config=config)


def load_processor(work: Work, path: str | None, config: EngineConfig) -> Any:
    """What makes inputs of texts and images. path: None for the shipped model."""
    from engine.loading.images import load_processor
    from engine.loading.load import SHIPPED_MODEL

    work.doing("loading the processor")
    return load_processor(SHIPPED_MODEL if path is None else path, config.trust_remote_code)
