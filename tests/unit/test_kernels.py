"""Which library of kernels is loaded, what building one leaves behind, and what is made once per machine."""

import copy
import runpy
import shutil
import subprocess

import pytest
import torch
from architectures import tiny_model
from places import ROOT
from streamers import Columns
from torch import nn
from transformers import DynamicCache

import caches
import configs
import engine
from caches.platform import machine, native
from configs import ConfigError
from engine.compiling import package_builder

BUILD = runpy.run_path(str(ROOT / "native" / "build.py"))
RELEASE = torch.__version__.partition("+")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, in place of that with the libraries."""
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_outcome", [])
    return tmp_path


def library(kind, digest=None, release=RELEASE):
    return f"kernels-{digest or native._digest_of_sources()}-{release}-{kind}.so"


def test_the_library_is_built_of_the_sources_that_are_there():
    assert native._digest_of_sources() == BUILD["digest_of_sources"]()
    assert set(native._kinds()) <= set(BUILD["kinds"]())


@pytest.mark.parametrize(
    ("capability", "flags", "kinds"),
    [
        ("AVX512", "amx_tile amx_int8 amx_bf16 avx512_vnni", ["amx", "vnni", "avx512", "avx2"]),
        ("AVX512", "avx512f", ["avx512", "avx2"]),
        ("AVX512", "AMD EPYC avx512_vnni avx512_bf16", ["zen4", "avx2"]),
        ("AVX512", "Xeon avx512_vnni avx512_bf16", ["vnni", "avx512", "avx2"]),
        ("AVX2", "amx_tile amx_int8 amx_bf16", ["avx2"]),
        ("DEFAULT", "", []),
    ],
)
def test_the_best_for_this_processor_comes_first(capability, flags, kinds, folder, monkeypatch):
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(native, "processor", lambda: flags)
    for kind in ("amx", "avx2", "avx512", "vnni", "zen4"):
        for release in ("1.0", RELEASE):
            (folder / library(kind, release=release)).touch()
        (folder / library(kind, digest="0" * 12)).touch()  # of other sources
    expected = [library(kind, release=release) for kind in kinds for release in (RELEASE, "1.0")]
    assert [path.name for path in native._libraries()] == expected


@pytest.mark.parametrize("name", ["none", "of another package"])
def test_in_a_wheel_there_are_no_sources(name, folder, monkeypatch):
    (folder / "of another package").mkdir()
    monkeypatch.setattr(native, "_SOURCES", folder / name)
    (folder / library(native._kinds()[0], digest="0" * 12)).touch()
    assert len(native._libraries()) == 1


def test_a_library_that_cannot_be_loaded(folder):
    (folder / library(native._kinds()[0])).write_bytes(b"no library")
    operators = native.Operators("fused=True")
    assert operators.or_none() is None
    with pytest.raises(ConfigError, match=r"fused=True needs the kernels .* cannot be loaded .*no-build-isolation"):
        operators.or_error()


@pytest.mark.parametrize("has_others", [False, True])
def test_weights_in_few_bits_say_that_there_are_no_kernels(folder, has_others, caplog):
    """has_others: a library of other sources is there, as after a change of the checkout."""
    if has_others:
        (folder / library(native._kinds()[0], digest="0" * 12)).touch()
    config = engine.EngineConfig(weights="int8")
    engine.Generator(copy.deepcopy(tiny_model("llama")), config=config)
    [warning] = [record.getMessage() for record in caplog.records if "decoded in every step" in record.getMessage()]
    assert ("of other sources" if has_others else "not built when it was installed") in warning
    assert "pip install --no-build-isolation" in warning


def test_what_finishes_a_library_is_done_once():
    done = []
    operators = native.Operators("fused=True", lambda: done.append(1))
    assert operators.or_none() is operators.or_error() is torch.ops.kvengine
    assert done == [1]


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", shutil.which("false"))
    with pytest.raises(subprocess.CalledProcessError):
        BUILD["build"](tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OSError, match="no-such-compiler"):
        BUILD["build"](tmp_path)
    assert not list(tmp_path.iterdir())


def test_libraries_that_are_there_are_not_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for kind in BUILD["kinds"]():
        (tmp_path / library(kind)).write_bytes(b"this one")
    (tmp_path / library("avx2", digest="0" * 12)).touch()
    built = BUILD["build"](tmp_path)
    assert sorted(built) == sorted(tmp_path.iterdir())
    assert all(path.read_bytes() == b"this one" for path in built)


@pytest.mark.parametrize("fails", ["write_atomically", "subprocess.Popen"])
def test_a_build_of_layers_that_does_not_begin_leaves_nothing(fails, tmp_path, monkeypatch):
    def failing(*arguments, **options):
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(f"engine.compiling.package_builder.{fails}", failing)
    with pytest.raises(TypeError, match="cannot pickle it"):
        package_builder.start_building({tmp_path / "layer.pt2": (nn.Identity(), ((), {}))}, None)
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


def test_the_folder_follows_the_system(monkeypatch, tmp_path):
    monkeypatch.delenv("KVENGINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / "kvengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in machine.cache_folder().parents


def test_a_compiler_that_does_not_know_a_processor_builds_for_the_others(tmp_path, monkeypatch):
    (fake := tmp_path / "compiler").write_text(
        '#!/bin/sh\ncase "$*" in *sapphirerapids*) exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done; echo built > "$2"\n'
    )
    fake.chmod(0o700)
    monkeypatch.setenv("CXX", str(fake))
    (folder := tmp_path / "libraries").mkdir()
    (folder / library("avx2", digest="0" * 12)).touch()  # of other sources: it goes
    built = BUILD["build"](folder)
    assert sorted(built) == sorted(folder.iterdir())
    kinds = {path.stem.split("-")[-1] for path in built}
    assert kinds == set(BUILD["kinds"]()) - {"amx"}
