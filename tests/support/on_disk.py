"""Caches on disk, how many files a process has open, and limits of the system."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import caches

ON_DISK = {
    "offloaded": {},
    "offloaded_static": {"max_cache_len": 64},
    "quantized": {"residual_length": 4, "backend": "kivi", "q_group_size": 4},
    "offloaded_quantized": {"residual_length": 4},
    "quantized_sink": {"residual_length": 4, "window_length": 80},
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def built(backend, config, folder=None):
    return caches.build(backend, config, residency="disk", folder=folder, **ON_DISK[backend])


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """With a limit of the system, one of `resource.RLIMIT_...`: as if a disk or memory were full beyond it."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
