"""A folder of the user's that is called like one of our packages hides it: that is said, with both places."""

import os
import subprocess
import sys
import types

import pytest
from places import ROOT

import caches
import engine
from kvengine import check_siblings


def hide(folder, name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    return folder / name


@pytest.mark.parametrize("name", ["configs", "caches", "strategies"])
@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded"])
def test_a_hidden_package(name, loaded, tmp_path, monkeypatch):
    theirs = hide(tmp_path, name)
    check_siblings(engine.__file__, name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    if loaded:
        __import__(name)
    with pytest.raises(ImportError, match=rf"{theirs} hides the package '{name}'.*{ROOT / name}.*rename"):
        check_siblings(engine.__file__, name)


def test_nothing_is_hidden():
    check_siblings(engine.__file__, "configs", "caches", "strategies")
    check_siblings(caches.__file__, "configs", "no_such_package")


def test_an_install_of_links_to_files(tmp_path, monkeypatch):
    for name in ("engine", "configs"):
        (tmp_path / "stored" / name).mkdir(parents=True)
        file = hide(tmp_path, name) / "__init__.py"
        file.rename(tmp_path / "stored" / name / "one")
        file.symlink_to(tmp_path / "stored" / name / "one")
    monkeypatch.delitem(sys.modules, "configs")
    monkeypatch.syspath_prepend(tmp_path)
    check_siblings(str(tmp_path / "engine" / "__init__.py"), "configs")


def test_an_install_of_links_to_folders(tmp_path, monkeypatch):
    for name in ("engine", "configs"):
        (tmp_path / f"stored-{name}").mkdir()
        (tmp_path / name).symlink_to(hide(tmp_path / f"stored-{name}", name))
    monkeypatch.delitem(sys.modules, "configs")
    monkeypatch.syspath_prepend(tmp_path)
    check_siblings(str(tmp_path / "engine" / "__init__.py"), "configs")


def test_a_link_to_one_of_the_packages(tmp_path):
    (tmp_path / "engine").symlink_to(ROOT / "engine")
    check_siblings(str(tmp_path / "engine" / "__init__.py"), "configs")


def test_a_module_that_was_made_by_hand(monkeypatch):
    monkeypatch.setitem(sys.modules, "configs", types.ModuleType("configs"))
    monkeypatch.chdir(ROOT)
    with pytest.raises(
        ImportError, match=rf"<module 'configs'> in sys.modules.* hides the package.*{ROOT / 'configs'}"
    ):
        check_siblings(engine.__file__, "configs")


@pytest.mark.slow
@pytest.mark.parametrize(("imported", "name"), [("engine", "configs"), ("engine", "caches"), ("caches", "configs")])
def test_in_a_process_of_its_own(imported, name, tmp_path):
    theirs = hide(tmp_path, name)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import {imported}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: {theirs} hides the package '{name}'" in done.stderr
