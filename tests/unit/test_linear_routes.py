"""The fastest matrix product is measured once per machine, while no other program uses it."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from rich.progress import Progress

from engine.cli.progress import Work
from engine.kernels import linear_backend, linear_routes
from engine.kernels.linear_routes import ALL_TORCH

pytestmark = pytest.mark.skipif(not linear_backend.has_onednn(), reason="this torch was built without oneDNN")


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "of" / "a_user"))
    monkeypatch.setattr(linear_routes, "_known", {})
    return tmp_path / "of" / "a_user"


NAMES = ("torch", "mm", "mm", "torch", "torch", "mm", "torch")
ONE, OTHER = (640, 320), (320, 640)


@pytest.fixture
def measured(cache_folder, monkeypatch):
    """The shapes that were measured, in turn."""
    found = []

    def measure(shapes):
        found.extend(shapes)
        return dict.fromkeys(shapes, NAMES)

    monkeypatch.setattr(linear_routes, "_measure", measure)
    return found


def test_a_measurement_is_made_once_per_machine(cache_folder, measured):
    for _ in range(2):
        assert linear_routes.fastest([ONE]) == {ONE: NAMES}
        assert linear_routes.fastest([ONE, OTHER]) == {ONE: NAMES, OTHER: NAMES}
    assert measured == [ONE, OTHER]
    (file,) = cache_folder.glob("*.json")
    assert json.loads(file.read_text()) == {"640x320": list(NAMES), "320x640": list(NAMES)}
    linear_routes._known.clear()  # as in another process
    assert linear_routes.fastest([OTHER]) == {OTHER: NAMES}
    assert measured == [ONE, OTHER]
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        linear_routes.fastest([OTHER])
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert measured == [ONE, OTHER, OTHER]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"640x320": ["torch"]}',
        '{"640x320": [1, 2, 3, 4, 5, 6, 7]}',
        '{"640x320": 5}',
        '{"640x320": [[], {}, 3, 4, 5, 6, 7]}',
        '{"medium": ["mm", "mm", "mm", "mm", "mm", "mm", "mm"]}',
    ],
)
def test_a_file_that_says_nothing_is_written_anew(content, cache_folder, measured):
    cache_folder.mkdir(parents=True)
    linear_routes.path().write_text(content)
    assert linear_routes.fastest([ONE]) == {ONE: NAMES}
    assert json.loads(linear_routes.path().read_text()) == {"640x320": list(NAMES)}


def test_a_folder_that_cannot_be_written(cache_folder, measured):
    cache_folder.parent.write_text("a file where the folder should be")
    assert linear_routes.fastest([ONE]) == linear_routes.fastest([ONE]) == {ONE: NAMES}
    assert measured == [ONE]


@pytest.mark.parametrize(("gain", "expected"), [(1.05, "torch"), (1.3, "mm")])
def test_torchs_own_has_a_margin(gain, expected):
    assert linear_routes._fastest({"torch": 1.0, "mm": 1 / gain, "onednn": 1.1}) == expected


def test_rounds_are_compared_and_slow_works_are_left_out():
    calls = []
    speed = [1.0, 1.0, 1.2, 0.5, 0.7, 1.5, 9.0, 2.0]  # of the machine: the warm-up, then seven rounds
    each = {"torch": 2.0, "mm": 1.8, "lucky": 2.2, "slow": 9.0}

    def work(name):
        calls.append(name)
        seconds = each[name] * speed[calls.count(name) - 1]
        return seconds / 3 if name == "lucky" and calls.count(name) == 3 else seconds

    works = {name: partial(work, name) for name in each}
    found = linear_routes.against_torch({"a group": works})
    assert found == {"a group": {name: pytest.approx(each[name] / 2) for name in ("torch", "mm", "lucky")}}
    assert [calls.count(name) for name in works] == [8, 8, 8, 3]


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(linear_routes, "_POOL_BYTES", (2**16, 2**16))
    monkeypatch.setattr(linear_routes, "_TIMED", 2**12)
    monkeypatch.setattr(linear_routes, "_LARGEST", 2**13)
    monkeypatch.setattr(linear_routes, "_check_quiet", lambda pool: None)  # other tests run beside this one


@pytest.mark.usefixtures("_small")
def test_the_measurement_says_something():
    found = linear_routes._measure([ONE, (100000, 16), (3, 2**20)])  # the last ones are larger than the pool
    assert list(found) == [ONE, (100000, 16), (3, 2**20)]
    for names in found.values():
        assert len(names) == 7
        assert set(names) <= {"torch", *linear_routes.routes()}


def test_matrices_are_not_read_twice_in_a_row():
    matrices = linear_routes._matrices(torch.ones(2**23), (1024, 1024))
    one, other = matrices(), matrices()
    assert [matrix.shape for matrix in one] == [(1024, 1024)] * 4
    assert len({matrix.data_ptr() for matrix in one + other}) == 8
    assert {matrix.data_ptr() for matrix in matrices()} == {matrix.data_ptr() for matrix in one}
    many_rows = linear_routes._matrices(torch.ones(2**23), (1024, 1024), rows=32)  # each takes longer
    assert len(many_rows()) == 1


@pytest.mark.usefixtures("_small")
def test_the_progress_line_shows_what_is_done_once_per_machine(monkeypatch):
    shown, show = [], Progress.update
    monkeypatch.setattr(Progress, "update", lambda bar, task, **what: shown.append(what) or show(bar, task, **what))
    with Work() as work:
        work.doing("loading the model")
        linear_routes._measure([ONE])
    linear_routes._measure([ONE])
    assert shown == [{"description": "loading the model (measuring matrix products on this machine, once)"}]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_measures_what_is_routed_whatever_the_defaults_are(dtype, monkeypatch):
    given, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda one, other: given.append((one, other, mm(one, other))) or given[-1][2])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            linear_routes._measure([ONE])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(tensor.dtype, tensor.device.type) for product in given for tensor in product} == {(torch.float32, "cpu")}


@pytest.mark.usefixtures("_small")
def test_without_memory_to_measure_in_torchs_own_is_taken_for_now(cache_folder, monkeypatch):
    def none(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as full:
        full.setattr(torch, "full", none)
        assert linear_routes.fastest([ONE]) == {ONE: ALL_TORCH}
    assert not list(cache_folder.glob("*.json"))
    monkeypatch.setattr(linear_routes, "_fastest", lambda relative: "mm")
    assert linear_routes.fastest([ONE]) == {ONE: ("mm",) * 7}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("quiet", [0, 1, 7])
@pytest.mark.parametrize("kernel", [True, False])
def test_on_a_busy_machine_the_usual_ones_are_taken_for_now(cache_folder, monkeypatch, quiet, kernel):
    """quiet: how many checks find that it is not. kernel: whether there is one."""
    checks, known = [], {"mm": linear_routes.mm} | ({"kernel": linear_routes.mm} if kernel else {})

    def check(pool):
        checks.append(pool)
        if len(checks) > quiet:
            raise linear_routes._Busy

    monkeypatch.setattr(linear_routes, "_fastest", lambda relative: "mm")
    monkeypatch.setattr(linear_routes, "routes", lambda: known)
    monkeypatch.setattr(linear_routes.sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with monkeypatch.context() as busy:
        busy.setattr(linear_routes, "_check_quiet", check)
        usual = ("kernel",) * 6 + ("torch",) if kernel else ALL_TORCH
        assert linear_routes.fastest([ONE, (8, 8)]) == {ONE: usual, (8, 8): ALL_TORCH}
        assert len(checks) == quiet + 1
    assert not list(cache_folder.glob("*.json"))
    assert not linear_routes.are_measured([ONE, (8, 8)])
    assert linear_routes.fastest([ONE, (8, 8)]) == {ONE: ("mm",) * 7, (8, 8): ALL_TORCH}
    assert linear_routes.are_measured([ONE, (8, 8)])


@pytest.mark.parametrize(("system", "capability"), [("darwin", "AVX2"), ("linux", "DEFAULT")])
def test_where_the_kernel_is_not_the_usual_one(monkeypatch, system, capability):
    monkeypatch.setattr(linear_routes.sys, "platform", system)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(linear_routes, "routes", lambda: {"kernel": None})
    assert linear_routes._usual() == ALL_TORCH


def test_processes_measure_one_after_the_other(cache_folder, monkeypatch):
    """What another one has measured in the meantime is taken."""

    def measure(shapes):
        raise AssertionError("measured again")

    monkeypatch.setattr(linear_routes, "_measure", measure)
    cache_folder.mkdir(parents=True)
    with ThreadPoolExecutor() as pool, FileLock(linear_routes.path().with_suffix(".lock")):
        found = pool.submit(linear_routes.fastest, [ONE])
        assert not wait([found], timeout=0.3).done
        linear_routes.path().write_text(json.dumps({"640x320": NAMES}))
    assert found.result() == {ONE: NAMES}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_processor_that_another_program_uses_is_busy(monkeypatch):
    monkeypatch.setattr(linear_routes, "_PROBE_SECONDS", 0.3)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        try:
            other.stdout.readline()
            with pytest.raises(linear_routes._Busy):
                linear_routes._check_quiet(torch.ones(2**16))
        finally:
            other.kill()
            other.communicate()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("of_all", "of_this", "threads", "is_busy"), [
    (1.9, 1.0, 2, False), (1.5, 1.0, 2, True), (2.0, 0.7, 2, True), (1.9, 1.0, 64, False), (1.0, 1.0, 1, False),
])  # fmt: skip
def test_how_much_of_two_processors_is_quiet(monkeypatch, of_all, of_this, threads, is_busy):
    clocks = {"perf_counter": 1.0, "process_time": of_all, "thread_time": of_this}
    clocks = {name: iter([0.0, time]).__next__ for name, time in clocks.items()}
    monkeypatch.setattr(linear_routes, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(linear_routes, "usable_processors", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with pytest.raises(linear_routes._Busy) if is_busy else nullcontext():
        linear_routes._check_quiet(torch.ones(8))


@pytest.mark.parametrize(
    ("name", "capability", "kernels", "says"),
    [
        ("AMD EPYC 9554", "AVX512", True, "kernel"),
        ("AMD EPYC 9554", "AVX2", True, "measured"),
        ("AMD EPYC 9554", "AVX512", False, "measured"),
        ("Intel(R) Xeon(R)", "AVX512", True, "measured"),
    ],
)
def test_where_the_kind_of_processor_tells_nothing_is_measured(
    name, capability, kernels, says, cache_folder, monkeypatch
):
    monkeypatch.setattr(linear_routes.sys, "platform", "linux")
    monkeypatch.setattr(linear_routes, "processor", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(linear_routes, "routes", lambda: {"kernel": None} if kernels else {})
    monkeypatch.setattr(linear_routes, "_measure", lambda shapes: dict.fromkeys(shapes, ("measured",) * 7))
    assert linear_routes.usual([ONE, (8, 8)]) == {ONE: (says,) * 7, (8, 8): ALL_TORCH}


@pytest.mark.usefixtures("measured")
def test_what_was_measured_counts_more_than_the_kind_of_processor(monkeypatch):
    linear_routes.fastest([ONE])
    linear_routes._known.clear()
    monkeypatch.setattr(linear_routes, "_agreed", lambda: ("kernel",) * 7)
    assert linear_routes.usual([ONE, OTHER]) == {ONE: NAMES, OTHER: ("kernel",) * 7}
