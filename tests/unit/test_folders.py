"""Where a cache on disk puts its file: never, by itself, where files are memory."""

import logging
import os
import tempfile

import pytest
import torch
from architectures import prompt, tiny_model
from injection import failing

import caches
import engine
from caches.memory import folders
from caches.memory.folders import disk_folder, memory_type

LINE = "{number} 1 0:{number} / {point} rw,nosuid shared:1 - {kind} {source} rw"


@pytest.fixture
def mounts(monkeypatch, tmp_path):
    """Says what the system has mounted: pairs of a place and a type, or of a type and a device."""

    def say(*found):
        lines = []
        for number, (point, kind) in enumerate([("/", "ext4"), *found]):
            kind, source = kind if isinstance(kind, tuple) else (kind, kind)
            point = str(point).replace(" ", "\\040")
            lines.append(LINE.format(number=number, point=point, kind=kind, source=source))
        (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(folders, "_MOUNTS", tmp_path / "mountinfo")

    return say


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """A folder for temporary files, and another that stands for /var/tmp."""
    for name in ("tmp", "var tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(folders, "_ALTERNATIVE", str(tmp_path / "var tmp"))
    folders.warn_once.cache_clear()
    return tmp_path / "tmp", tmp_path / "var tmp"


def test_tmpdir_comes_first(mounts, temporary):
    mounts()
    assert disk_folder() == str(temporary[0])


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", ("ext4", "/dev/zram0")])
def test_not_where_files_are_memory(mounts, temporary, kind):
    mounts((temporary[0], kind))
    assert disk_folder() == str(temporary[1])
    cache = caches.build("offloaded", tiny_model("llama").config, residency="disk")
    assert cache.scratch.disk_file.folder == str(temporary[1])


def test_nowhere(mounts, temporary):
    mounts((temporary[0], "tmpfs"), (temporary[1], "ramfs"))
    refusal = rf"{temporary[0]} is a tmpfs, {temporary[1]} is a ramfs.*set TMPDIR, or give a `folder`"
    for backend in ("offloaded", "quantized"):
        with pytest.raises(caches.CapacityError, match=refusal):
            caches.build(backend, tiny_model("llama").config, residency="disk")


def test_what_lies_nearest_counts(mounts, tmp_path, monkeypatch):
    (tmp_path / "a b" / "c").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a b" / "c")
    mounts((tmp_path, "tmpfs"), (tmp_path / "a b", "xfs"))
    assert memory_type(str(tmp_path)) == "tmpfs"
    assert memory_type(str(tmp_path / "a b" / "c")) is None
    assert memory_type(str(tmp_path / "link")) is None
    mounts((tmp_path / "a b", "xfs"), (tmp_path / "a b", "tmpfs"))  # one above the other
    assert memory_type(str(tmp_path / "link")) == "tmpfs"
    assert memory_type(str(tmp_path / "a b c")) is None
    mounts((tmp_path, ("btrfs", "/dev/zram1")))
    assert memory_type(str(tmp_path / "link")) == "btrfs in compressed memory"
    monkeypatch.setattr(folders, "_MOUNTS", tmp_path / "not Linux")
    assert memory_type(str(tmp_path)) is None


def test_mount_points_of_any_bytes(mounts, tmp_path):
    mounts((tmp_path, "tmpfs"))
    said = (tmp_path / "mountinfo").read_bytes()
    odd = [b"/caf\xe9", "/a\u2028b".encode(), b"/a\x85b\rc", b""]
    lines = [b"7 1 0:7 / %s rw - ext4 /dev/sda rw\n" % point for point in odd]
    (tmp_path / "mountinfo").write_bytes(b"".join(lines) + b"no mount\n" + said + lines[0])
    assert memory_type(str(tmp_path)) == "tmpfs"
    (tmp_path / "mountinfo").write_bytes(said + lines[0].replace(b"ext4", b"ramfs"))
    assert memory_type(os.fsdecode(b"/caf\xe9/below")) == "ramfs"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no shared memory is mounted")
def test_what_this_machine_says():
    assert memory_type("/dev/shm") == "tmpfs"
    assert memory_type("/proc/self") is None


def test_a_folder_that_was_given_is_taken_with_a_warning(mounts, temporary, caplog):
    mounts((temporary[0], "tmpfs"))
    with caplog.at_level(logging.WARNING, logger="caches"):
        for _ in range(2):
            options = {"residency": "disk", "folder": str(temporary[0])}
            cache = caches.build("offloaded", tiny_model("llama").config, **options)
    assert cache.scratch.disk_file.folder == str(temporary[0])
    [record] = caplog.records
    assert "is a tmpfs: a cache there is in memory, not on a disk" in record.message


def test_the_offload_rung(mounts, temporary):
    model = tiny_model("llama")
    expected = engine.generate(model, prompt(), max_new_tokens=4).sequences

    def recovered(*fallbacks):
        """Memory is out in the second forward."""
        with failing(model, [(1, 2)]):
            out = engine.generate(model, prompt(), max_new_tokens=4, on_oom=fallbacks)
        assert torch.equal(out.sequences, expected)
        assert [fallback.name for fallback in out.stats.fallbacks] == [fallbacks[-1]]
        return out

    mounts((temporary[0], "tmpfs"))
    assert recovered("offload").cache.scratch.disk_file.folder == str(temporary[1])
    mounts((temporary[0], "tmpfs"), (temporary[1], "tmpfs"))
    recovered("offload", "split")
    with pytest.raises(
        engine.OutOfMemoryError, match=r"offload \(CapacityError: no folder on a disk .*TMPDIR"
    ) as raised:
        recovered("offload")
    assert torch.equal(raised.value.partial.sequences, expected[:, :14])


def test_plans_say_so(mounts, temporary):
    mounts((temporary[0], "tmpfs"), (temporary[1], "tmpfs"))
    plan = engine.plan(tiny_model("llama"), prompt_tokens=10, max_new_tokens=5)
    refused = {one.cache: one.refused for one in plan.backends if one.options.get("residency") == "disk"}
    assert "no folder on a disk" in refused["offloaded"]
