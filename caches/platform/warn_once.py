"""Warnings that a program sees once, however often what they are about happens."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(message: str, logger: str = "engine") -> None:
    logging.getLogger(logger).warning(message)
