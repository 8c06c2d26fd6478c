"""A wheel holds every file that the packages need."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from places import ROOMS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # builds, and starts processes that import torch

SCRIPT = """
import json, engine, caches
from caches.platform.native import Operators
out = engine.generate(engine.SHIPPED_MODEL, "def open(self", max_new_tokens=4, cache="offloaded")
has_kernels = Operators("a test").or_none() is not None
print(json.dumps({"file": caches.__file__, "tokens": out.tokens, "has_kernels": has_kernels}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The only wheel that a copy of the tracked files makes: build folders of the checkout cannot fill gaps."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", made]
    subprocess.run([*pip, source], check=True, cwd=made)
    (built,) = made.glob("*.whl")
    return built


def test_it_has_every_file(wheel):
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert len(wanted) > 150
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("has_kernels", [True, False])
def test_it_generates_in_a_fresh_environment(has_kernels, wheel, tmp_path):
    """With the kernels that the wheel brings, and without any, as from a machine without a compiler. Beside the
    installed libraries, without the checkout: the editable install is a .pth file, which PYTHONPATH does not read."""
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    kernels = list(target.glob("caches/platform/kernels-*.so"))
    assert kernels
    for library in kernels if not has_kernels else []:
        library.unlink()
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    python = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        [python, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(target))
    assert [len(row) for row in found["tokens"]] == [4]
    assert found["has_kernels"] == has_kernels
