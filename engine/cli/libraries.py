"""Imports torch and transformers for the commands that need them, and silences their messages."""

from __future__ import annotations

import gc
import sys

from engine.cli.progress import Work


def start_libraries(work: Work, *models: str | None) -> None:
    """Import the libraries. models: paths and hub ids, which are checked first: this takes less time."""
    from engine.model.location import locate

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
