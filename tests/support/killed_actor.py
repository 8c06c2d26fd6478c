"""An actor of Ray that is killed once."""

from __future__ import annotations

import os
import signal
from typing import Any

from engine.distributed import Predictor


class Killed(Predictor):
    """Whose process is killed in the middle of its second batch, once."""

    def __init__(self, *arguments: Any, marker: str, **options: Any):
        super().__init__(*arguments, **options)
        self._marker, self._batches = marker, 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        self._batches += 1
        if self._batches == 2:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return super().__call__(batch)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)
