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


def test_the_commands_find_it(installed):
    [block] = blocks(PAGE, "bash")
    commands = block.splitlines()
    assert len(commands) == 2
    path = os.pathsep.join([str(ROOT), str(installed)])
    for command, expected in zip(commands, ("store_dtype", "import os"), strict=True):
        words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=os.environ | {"PYTHONPATH": path},
            cwd=installed,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "cannot be loaded" not in done.stderr
        assert done.stdout.strip()
        assert expected in done.stdout or words[1] == "generate"
