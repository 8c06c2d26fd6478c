"""Imports torch and transformers for the commands that need them, silences their messages, and loads models."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

from engine.cli.progress import Work

if TYPE_CHECKING:
    from pathlib import Path

    from configs import EngineConfig
    from engine.generator import Generator


def start_libraries(work: Work, *models: str | None) -> None:
    """Import the libraries. models: paths and hub ids, which are checked first: this takes less time."""
    # Before anything imports tqdm. transformers' own setting does not cover how it reads GGUF files.
    os.environ.setdefault("TQDM_DISABLE", "1")
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


def load_generator(work: Work, path: str | None, config: EngineConfig, adapter: Path | None = None) -> Generator:
    """path: None for the shipped model. adapter: the folder of one for it."""
    from engine.generator import Generator
    from engine.loading.load import SHIPPED_MODEL, load_with_adapter

    work.doing("loading the model")
    source = SHIPPED_MODEL if path is None else path
    if adapter is None:
        return Generator(source, config=config)
    return Generator(*load_with_adapter(source, adapter, config), config)
