"""Start-up of what takes seconds, only where a command needs it, and without its talk."""

from __future__ import annotations

from engine.cli.progress import Work


def start_libraries(work: Work) -> None:
    work.doing("starting torch and transformers")
    import huggingface_hub.utils
    import transformers.utils

    # What they warn of is refused here, or said in our own words.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    huggingface_hub.utils.disable_progress_bars()
