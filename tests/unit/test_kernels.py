"""Where compiled kernels are kept, and what a compilation leaves behind that does not come to its end."""

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from architectures import tiny_model
from streamers import Columns
from transformers import DynamicCache

import caches
import configs
import engine
from caches.platform import kernel_build, machine
from configs import ConfigError
from engine.compiling import package_process

SOURCE = "int main() {}"
LAYER = dict.fromkeys(("module", "step_call"))
# Writes what it was given to compile, slowly and in two parts, where -o says.
FAKE = """#!/bin/sh
while [ "$1" != -o ]; do case "$1" in *.cpp) from="$1";; esac; shift; done
printf 'half of ' > "$2"; sleep %s; cat "$from" >> "$2"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(kernel_build, "_paths", list)
    return tmp_path


@pytest.fixture
def compiler(folder, monkeypatch):
    def become(seconds):
        path = folder / f"compiler-{seconds}"
        path.write_text(FAKE % seconds)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return path

    return become


def library(folder):
    return kernel_build._library(folder / "one.cpp", "one")


def test_it_is_compiled_once(folder, compiler, monkeypatch):
    compiler(0)
    path = library(folder)
    assert path.read_text() == f"half of {SOURCE}"
    assert path.parent == folder / "cache" / "kernels"
    monkeypatch.setattr(subprocess, "run", lambda *of, **options: pytest.fail("compiled again"))
    assert library(folder) == path


def test_another_processor_source_or_release_has_a_file_of_its_own(folder, compiler, monkeypatch):
    compiler(0)
    found = [library(folder)]
    monkeypatch.setattr(kernel_build, "processor", lambda: "another one, without AVX-512")
    found.append(library(folder))
    monkeypatch.setattr(kernel_build.torch, "__version__", "2.99")
    found.append(library(folder))
    (folder / "one.cpp").write_text(SOURCE + "\n")
    found.append(library(folder))
    monkeypatch.setattr(kernel_build.platform, "libc_ver", lambda: ("glibc", "2.99"))
    found.append(library(folder))
    assert len(set(found)) == 5
    assert "flags" in machine._FIELDS


def test_another_header_has_a_file_of_its_own(folder, compiler):
    compiler(0)
    (folder / "parts").mkdir()
    (folder / "one.cpp").write_text('#include <vector>\n#include "parts/a.h"\n')
    (folder / "parts" / "a.h").write_text('#pragma once\n#include "b.h"  // and "c"\n#include "../one.cpp"\n')
    found = []
    for text in ("int b = 1;\n", "int b = 2;\n"):
        (folder / "parts" / "b.h").write_text(text)
        found.append(library(folder))
    assert len(set(found)) == 2


def test_two_at_once_both_succeed(folder, compiler):
    compiler(0.2)
    with ThreadPoolExecutor() as pool:
        paths = [future.result(timeout=20) for future in [pool.submit(library, folder) for _ in range(2)]]
    assert paths[0] == paths[1]
    assert paths[0].read_text() == f"half of {SOURCE}"
    assert [path.name for path in paths[0].parent.iterdir()] == [paths[0].name]


def test_a_killed_compiler_leaves_nothing(folder, compiler):
    path = compiler(0)
    whole = path.read_text()
    path.write_text(whole.replace("sleep 0", "kill -9 $$"))
    with pytest.raises(subprocess.CalledProcessError):
        library(folder)
    assert not list((folder / "cache" / "kernels").iterdir())
    path.write_text(whole)
    assert library(folder).read_text() == f"half of {SOURCE}"


@pytest.mark.slow
def test_a_killed_compilation_keeps_no_one_waiting(folder, compiler):
    """In a process of its own that is killed in the middle of it."""
    compiler(60)
    code = (
        "import sys, caches.platform.kernel_build as k, pathlib; k._paths = list; "
        "k._library(pathlib.Path(sys.argv[1]), 'one')"
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code, str(folder / "one.cpp")], start_new_session=True)
    halves = folder / "cache" / "kernels"
    deadline = time.monotonic() + 60
    while not (halves.exists() and list(halves.glob(".building-*/*.so"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(halves.glob("*.so"))
    compiler(0)
    begun = time.monotonic()
    assert library(folder).read_text() == f"half of {SOURCE}"
    assert time.monotonic() - begun < 5


def test_a_folder_that_cannot_be_written_is_not_needed(folder, compiler):
    compiler(0)
    (folder / "cache").write_text("a file where the folder should be")
    path = library(folder)
    assert path.read_text() == f"half of {SOURCE}"
    assert folder not in path.parents
    path.unlink()


@pytest.mark.parametrize(("name", "says"), [("false", "exit code 1"), ("no-such-compiler-here", "No such file")])
def test_a_compiler_that_cannot(name, says, folder, monkeypatch):
    monkeypatch.setenv("CXX", name)
    with pytest.raises(ConfigError, match=f"fused=True needs a C\\+\\+ compiler.*{says}.*or leave it out"):
        kernel_build.load_operators(folder / "one.cpp", "fused=True")
    assert not list((folder / "cache" / "kernels").iterdir())


def test_a_damaged_library_is_compiled_once_more(folder, compiler, monkeypatch):
    compiler(0)
    damaged = kernel_build._library(folder / "one.cpp", "kvengine_one")
    damaged.write_text("")

    loaded = []

    def load(path):
        if not damaged.read_text():
            raise OSError("file too short")
        loaded.append(path)

    monkeypatch.setattr(kernel_build.torch.ops, "load_library", load)
    assert kernel_build.load_operators(folder / "one.cpp", "fused=True") is None
    assert loaded == [str(damaged)]
    assert damaged.read_text() == f"half of {SOURCE}"


def test_a_damaged_library_is_not_loaded(folder, compiler):
    """Loading a part of a library may end the process."""
    compiler(0)
    path = library(folder)
    whole = path.read_bytes()
    for damaged in (whole[:-3], whole[:-1] + b"x", b""):
        path.write_bytes(damaged)
        assert library(folder).read_bytes() == whole
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["write_job", "subprocess.Popen"])
def test_a_build_of_layers_that_does_not_begin_leaves_nothing(fails, tmp_path, monkeypatch):
    def failing(*arguments, **options):
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(f"engine.compiling.package_process.{fails}", failing)
    with pytest.raises(TypeError, match="cannot pickle it"):
        package_process.start_building({tmp_path / "layer.pt2": SimpleNamespace(**LAYER)}, None)
    assert not list(tmp_path.iterdir())


def test_a_warmup_touches_nothing_of_the_caller():
    model, streamer = tiny_model("llama"), Columns()
    gen, ids = engine.Generator(model), torch.arange(3, 9)[None]
    live = [caches.build("dynamic", model.config), DynamicCache(config=model.config)]
    for arguments in ({name: cache} for name in ("cache", "past_key_values") for cache in live):
        with pytest.raises(engine.OptionError, match="warmup would write into that: give the name of a cache"):
            gen.warmup(ids, **arguments)
    with pytest.raises(engine.OptionError, match="leave streamer out"):
        gen.warmup(ids, streamer=streamer)
    assert (live[0].total_tokens, live[1].get_seq_length(), streamer.given, streamer.ends) == (0, 0, [], 0)
    assert gen.warmup(ids, cache=configs.DynamicCacheConfig()) == gen.warmup(ids, past_key_values=None) == "off"


def test_a_library_that_cannot_be_loaded(folder, compiler):
    compiler(0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"fused=True .* cannot be loaded: .*or leave it out") as raised:
            kernel_build.load_operators(folder / "one.cpp", "fused=True")
        assert isinstance(raised.value.__cause__, OSError)
    assert not list((folder / "cache" / "kernels").iterdir())


def test_the_folder_follows_the_system(monkeypatch, tmp_path):
    monkeypatch.delenv("KVENGINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / "kvengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in machine.cache_folder().parents


def test_a_library_for_which_memory_is_out_stays(folder, compiler, monkeypatch):
    """Compiling it again takes half a minute, in every process, and it would not be mapped either."""
    compiler(0)
    path, calls = kernel_build._library(folder / "one.cpp", "kvengine_one"), []

    def load(path):
        calls.append(path)
        raise OSError("Could not load this library") from OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(kernel_build.torch.ops, "load_library", load)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*failed to map segment.*free memory"):
        kernel_build.load_operators(folder / "one.cpp", "fused=True")
    assert calls == [str(path)]
    assert path.exists()
