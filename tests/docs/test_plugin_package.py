"""The package that docs/extend/plug-in-package.md shows: installed offline, used by commands in new processes."""

import os
import shlex
import subprocess
import sys

import pytest
from pages import DOCS, blocks, titled_blocks
from places import ROOT

tomllib = pytest.importorskip("tomllib")
PAGE = DOCS / "extend" / "plug-in-package.md"


@pytest.fixture
def installed(tmp_path):
    """A folder that has what pip would leave of the package: its module, and metadata with the entry points."""
    files = titled_blocks(PAGE)
    project = tomllib.loads(files["pyproject.toml"])
    name, version = project["project"]["name"], project["project"]["version"]
    for module in project["tool"]["setuptools"]["py-modules"]:
        (tmp_path / f"{module}.py").write_text(files[f"{module}.py"])
    metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{key} = {what}\n" for key, what in of.items()) for group, of in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_the_commands_find_it(installed):
    [block] = blocks(PAGE, "bash")
    commands = block.splitlines()
    assert len(commands) == 2
    settings = {
        "env": os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])},
        "cwd": installed,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    started = [subprocess.Popen([sys.executable, "-m", *shlex.split(command)], **settings) for command in commands]
    told = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert not any("cannot be loaded" in stderr for _, stderr in told)
    assert "store_dtype" in told[0][0]
    assert told[1][0].strip()
