"""What a prompt costs in pages that the system has to hand out again."""

import os
import platform
import subprocess
import sys

import pytest
from places import ROOT

PAGES = """
import resource
import torch
import engine

generator = engine.Generator(engine.SHIPPED_MODEL)
ids = torch.arange(700)[None]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    generator.generate(ids, max_new_tokens=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages(**environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", PAGES]
    done = subprocess.run(command, cwd=ROOT, env=own | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_prompt_takes_the_memory_that_the_last_one_freed_unless_the_environment_says_otherwise():
    assert pages() < 500 < 2000 < pages(MALLOC_TRIM_THRESHOLD_="131072")
