"""The one file of a cache on disk: its descriptors, its space, what growing and failing leave behind."""

import copy
import errno
import gc
import os
import pickle
import random
import resource
import subprocess
import sys
import weakref
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from on_disk import ON_DISK, built, descriptors, limited
from places import ROOT

import caches
import engine
from caches.memory.disk_file import _PAGE, DiskFile
from caches.transfer.split_rows import SplitCache, halves


def fed(cache, layers: int, tokens: int = 6, rows: int = 2) -> None:
    """One step of a foreign loop."""
    new = torch.rand(rows, 2, tokens, 8)
    for layer in range(layers):
        cache.update(new, new, layer)


# Descriptors.


LLAMA, T5 = (partial(tiny_model, "llama"), prompt()), (partial(tiny_encoder_decoder, "t5"), source("t5"))
RUNS = {
    **{backend: (*LLAMA, {"cache": backend, "cache_config": ON_DISK[backend]}, 1) for backend in ON_DISK},
    "beams": (*LLAMA, {"num_beams": 3}, 1),
    "several beams": (*LLAMA, {"num_beams": 2, "num_return_sequences": 2}, 1),
    "an encoder and a decoder": (*T5, {}, 2),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_part_of_a_cache_takes_one_descriptor(run):
    make, inputs, options, parts = RUNS[run]
    options = {"cache": "offloaded", "cache_config": {}, "max_new_tokens": 24} | options
    options["cache_config"] = options["cache_config"] | {"residency": "disk"}
    model, before = make(), descriptors()
    cache = engine.generate(model, inputs, **options).cache
    assert all(part.bytes_by_place["disk"] > 0 for part in cache.parts)
    assert descriptors() == before + parts
    twin = copy.deepcopy(cache)
    assert descriptors() == before + 2 * parts
    cache.release()
    assert descriptors() == before + parts
    assert twin.bytes_by_place["disk"] > 0
    twin.release()
    assert descriptors() == before


def test_split_rows_take_one_per_part():
    cache, before = built("offloaded", tiny_model("llama").config), descriptors()
    fed(cache, 4, rows=8)
    cache.finish_step()
    parts = cache
    for _ in range(3):
        parts = halves(parts, torch.arange(8))
    cache.release()
    assert isinstance(parts, SplitCache)
    assert len(parts.parts) == 8
    assert descriptors() == before + 8


@pytest.mark.parametrize("backend", ON_DISK)
def test_resets_leave_nothing_behind(backend):
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers = 1
    cache = built(backend, config, "/dev/shm" if os.path.isdir("/dev/shm") else None)  # closing a file takes no time

    def turn() -> tuple[int, ...]:
        fed(cache, 1, rows=1)
        cache.reset()
        return descriptors(), len(weakref.finalize._registry)

    def left() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum("(deleted)" in line for line in maps), len(gc.get_objects())

    first = [turn() for _ in range(3)][-1]
    gc.freeze()  # what was there before need not be looked through
    mapped, objects = left()
    assert {turn() for _ in range(1000 if backend == "offloaded" else 50)} == {first}
    assert left()[0] == mapped
    assert left()[1] < objects + 20


def test_too_many_open_files():
    cache = built("offloaded", tiny_model("llama").config)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with limited(resource.RLIMIT_NOFILE, highest + 1):
        held = []
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        with pytest.raises(caches.CapacityError, match=rf"its limit of {highest + 1} open files .*reset or delete"):
            fed(cache, 4)
        for one in held:
            os.close(one)
        fed(cache, 4)
    assert cache.batch_size == 2


# Space.


def blocks(slab: DiskFile) -> int:
    """Bytes that the file takes on the disk."""
    return 512 * os.fstat(slab._file.fileno()).st_blocks


def test_windows_keep_what_is_in_them(tmp_path):
    """Whatever the order in which they grow and go."""
    choose, slab, known, most = random.Random(0), DiskFile(str(tmp_path)), {}, 0
    for number in range(300):
        name = choose.randrange(8)
        if name in known and choose.random() < 0.3:
            del known[name]
            continue
        window, held = known.get(name, (None, b""))
        window = slab.window(len(held) + choose.randrange(3 * _PAGE), window)
        assert window[: len(held)] == held
        filled = bytes([number % 256]) * len(window)
        window[:] = filled
        known[name] = window, filled
        assert all(other[:] == content for other, content in known.values())
        most = max(most, sum(len(window) for window, _ in known.values()))
    assert slab._size == most  # so all that was given back was used again
    assert most <= blocks(slab) <= most + 64 * 1024
    del window
    known.clear()
    assert slab._file is None


def test_pages_are_used_again(tmp_path):
    slab = DiskFile(str(tmp_path))
    one, two, three = (slab.window(4 * _PAGE) for _ in range(3))
    assert slab._size == 12 * _PAGE
    del one, three
    spread = slab.window(7 * _PAGE)  # in two pieces
    assert [part.end - part.begin for part in spread.ranges] == [4 * _PAGE, 3 * _PAGE]
    assert slab._size == 12 * _PAGE
    spread = slab.window(9 * _PAGE, spread)
    assert slab._size == 13 * _PAGE
    assert len(two) == 4 * _PAGE


def test_a_tensor_keeps_its_pages():
    """A view of a buffer that was cleared is no window on the next one's numbers."""
    cache = built("offloaded", tiny_model("llama").config)
    fed(cache, 4)
    cache.finish_step()
    view = next(next(iter(cache.layers)).tensors())
    before = view.clone()
    cache.reset()
    fed(cache, 4)
    assert torch.equal(view, before)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    slab = DiskFile(str(tmp_path))
    held, gone = slab.window(4 * _PAGE), slab.window(2 * _PAGE)
    del gone
    with limited(resource.RLIMIT_FSIZE, 8 * _PAGE):
        with pytest.raises(caches.CapacityError, match="File too large"):
            slab.window(6 * _PAGE)
        assert slab._size == os.fstat(slab._file.fileno()).st_size == 6 * _PAGE
        assert len(slab.window(4 * _PAGE)) == 4 * _PAGE  # free pages and two more
    assert len(held) == 4 * _PAGE


def test_memory_that_cannot_be_mapped(tmp_path):
    slab = DiskFile(str(tmp_path))
    held = slab.window(_PAGE)
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, taken + 2**25), pytest.raises(MemoryError, match="cannot be mapped") as raised:
        slab.window(2**27)
    assert raised.value.__cause__.errno == errno.ENOMEM
    del raised
    assert slab._returned == [(_PAGE, _PAGE + 2**27)]
    assert len(held) == _PAGE


def test_a_fork_of_the_process_leaves_the_file_alone(tmp_path):
    slab = DiskFile(str(tmp_path))
    window = slab.window(_PAGE)
    window[:4] = b"kept"
    with forked() as is_child:
        if is_child:
            del window
            assert slab._file is not None
    assert window[:4] == b"kept"
    assert os.pread(slab._file.fileno(), 4, 0) == b"kept"


@contextmanager
def forked():
    """Runs the block twice, the first time in a fork of the process, which it ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            yield True
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    yield False


def test_a_fork_of_the_process_has_a_file_of_its_own(tmp_path):
    slab = DiskFile(str(tmp_path))
    window, gone = slab.window(_PAGE), slab.window(_PAGE)
    window[:4] = b"kept"
    del gone
    slab._lock.acquire()  # as another thread may at that moment
    with forked() as is_child:
        if is_child:
            own = slab.window(3 * _PAGE)
            own[:] = b"x" * len(own)
            grown = slab.window(2 * _PAGE, window)
            assert grown[:4] == b"kept"
            grown[:4] = b"lost"
            assert slab._size == 5 * _PAGE
            del window
            assert not slab._returned
            del own, grown
            assert slab._file is None
            again = slab.window(_PAGE)
            del again  # a file from before the fork gives back too
            assert slab._file is None
    slab._lock.release()
    assert window[:4] == b"kept"
    assert slab._size == os.fstat(slab._file.fileno()).st_size == 2 * _PAGE
    assert not any(slab.window(3 * _PAGE)[:])


@pytest.mark.parametrize(("given", "then"), [(None, "there"), ("mine", "mine")])
def test_a_pickled_slab_asks_for_its_folder_where_it_is_loaded(given, then, monkeypatch):
    monkeypatch.setattr("caches.memory.disk_file.disk_folder", lambda folder: folder or "here")
    written = pickle.dumps(DiskFile(given))
    monkeypatch.setattr("caches.memory.disk_file.disk_folder", lambda folder: folder or "there")
    assert pickle.loads(written).folder == then


# A deep model.

DEEP = """
import os, resource, sys, torch, transformers
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import caches, engine
from caches.transfer.split_rows import halves
from on_disk import ON_DISK, built, descriptors, limited
config = transformers.LlamaConfig(vocab_size=101, hidden_size=16, intermediate_size=16, num_hidden_layers=80,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, eos_token_id=None, pad_token_id=0)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.arange(1, 81).view(8, 10)
def tokens(cache):
    return engine.generate(model, ids, cache=cache, max_new_tokens=8)
expected, most = tokens("dynamic").sequences, 0
for backend in ON_DISK:
    out = tokens(built(backend, config))
    assert backend != "offloaded" or torch.equal(out.sequences, expected)
    parts = out.cache
    for _ in range(3):
        parts = halves(parts, torch.arange(8))
    most = max(most, descriptors())
    print(backend, out.cache.bytes_by_place["disk"], descriptors(), flush=True)
    del parts
moved = caches.migrate(tokens("dynamic").cache, "offloaded", residency="disk")
moved = caches.migrate(moved, "offloaded_quantized", residency="disk")
beams = engine.generate(model, ids, cache="offloaded", cache_config={"residency": "disk"}, num_beams=2,
    max_new_tokens=4)
print("most", max(most, descriptors()))
"""


@pytest.mark.slow
def test_80_layers_with_256_descriptors():
    paths = [str(ROOT), str(ROOT / "tests/contract"), str(ROOT / "tests/support")]
    done = subprocess.run(
        [sys.executable, "-c", DEEP],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100
