"""Caches on disk, and how many files a process has open."""

import os

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
