"""C++ that is compiled when it is first needed."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from configs import ConfigError

# As fast as with -ffast-math, but numbers that are not finite stay so, and no other code computes differently.
_FLAGS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")


@functools.cache
def compiled(source: Path, option: str) -> Any:
    """The functions of a C++ file, compiled once per machine and release of torch.

    Raises `ConfigError` where that is not possible, which names the option that asks for it.
    """
    from torch.utils import cpp_extension  # which is slow to import

    # torch's own threads. Elsewhere compilers have no OpenMP, and one thread does the work.
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    try:
        name = f"kvengine_{source.stem}"
        return cpp_extension.load(name, [str(source)], extra_cflags=[*_FLAGS, *threads], extra_ldflags=threads)
    except Exception as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{option} needs a C++ compiler and ninja, to compile its kernels once: {why[0]}. Install them (for "
            "example the packages g++ and ninja), or leave it out"
        ) from error
