"""Which freed pages a process that has generated keeps, and when it gives them back."""

import json
import os
import platform
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

PAGES = """
import ctypes, json, resource
import psutil, torch
import engine
from engine.memory.free_memory import find_free

SIZE, BLOCKS = 100_000, 500  # 50 MB, in blocks that glibc takes from the heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
generator = engine.Generator(engine.SHIPPED_MODEL)
generator.generate(torch.arange(20)[None], max_new_tokens=1)


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in reversed(blocks):
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def given_back(work):
    faults()
    before = psutil.Process().memory_info().rss
    work()
    return before - psutil.Process().memory_info().rss


found = {"faults": [faults() for _ in range(3)][-1]}
found["release"] = given_back(generator.release)
found["find_free"] = given_back(lambda: find_free(torch.device("cpu")))
print(json.dumps(found))
"""


def measured(**environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PAGES]
    done = subprocess.run(command, cwd=ROOT, env=own | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_freed_memory_is_used_again_until_it_is_given_back():
    found = measured()
    assert found["faults"] < 500
    assert min(found["release"], found["find_free"]) > 2**25


@pytest.mark.slow
@pytest.mark.parametrize("environment", [
    {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
], ids=lambda environment: next(iter(environment)))  # fmt: skip
def test_what_the_environment_says_stays(environment):
    assert measured(**environment)["faults"] > 5000
