"""Start-up of what takes seconds, only where a command needs it, and without its talk."""

from __future__ import annotations

import gc
import sys

from engine.cli.progress import Work


def start_libraries(work: Work, *models: str | None) -> None:
    """models: paths and hub ids, which are looked for first: a wrong one is told at once."""
    from engine.model.location import locate

    work.doing("looking for the model")
    for model in models:
        if model is not None:
            locate(model)
    work.doing("starting torch and transformers")
    if "caches" not in sys.modules:
        import caches  # noqa: F401 - before any other import of them: it takes less time

        gc.freeze()  # all of it stays until the end: neither collections nor the exit have to go through it
    import huggingface_hub.utils
    import transformers.utils

    # What they warn of is refused here, or said in our own words.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
