"""Which matrix product is used: by the kind of processor, or as `engine linears` has measured on a quiet machine."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from engine.kernels import linear_backend, linear_measurement, linear_routes
from engine.kernels.linear_routes import ALL_TORCH

pytestmark = pytest.mark.skipif(not linear_backend.has_onednn(), reason="this torch was built without oneDNN")


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "of" / "a_user"))
    return tmp_path / "of" / "a_user"


NAMES = ("torch", "mm", "mm", "torch", "torch", "mm", "torch")
WITHOUT = ("torch", "mm", "onednn", "swapped", "swapped", "onednn", "torch")
ONE, OTHER, SMALL = (640, 320), (320, 640), (8, 8)


@pytest.fixture
def measured(cache_folder, monkeypatch):
    """The shapes that were measured, in turn."""
    shapes_of_calls = []

    def measure(shapes):
        shapes_of_calls.extend(shapes)
        return dict.fromkeys(shapes, NAMES)

    monkeypatch.setattr(linear_measurement, "_measure", measure)
    return shapes_of_calls


def test_a_measurement_is_made_once_per_machine(cache_folder, measured):
    for _ in range(2):
        assert linear_measurement.fastest([ONE, SMALL]) == {ONE: NAMES}
    assert linear_measurement.fastest([OTHER]) == {ONE: NAMES, OTHER: NAMES}
    assert measured == [ONE, OTHER]
    (file,) = cache_folder.glob("*.json")
    assert json.loads(file.read_text()) == {"640x320": list(NAMES), "320x640": list(NAMES)}
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        linear_measurement.fastest([OTHER])
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
    assert linear_measurement.fastest([ONE]) == {ONE: NAMES}
    assert json.loads(linear_routes.path().read_text()) == {"640x320": list(NAMES)}


def test_a_folder_that_cannot_be_written(cache_folder, measured):
    cache_folder.parent.write_text("a file where the folder should be")
    assert linear_measurement.fastest([ONE]) == {ONE: NAMES}
    assert linear_routes.stored() == {}


@pytest.mark.parametrize(("gain", "expected"), [(1.05, "torch"), (1.3, "mm")])
def test_torchs_own_has_a_margin(gain, expected):
    assert linear_measurement._fastest({"torch": 1.0, "mm": 1 / gain, "onednn": 1.1}) == expected


def test_rounds_are_compared_and_slow_works_are_left_out():
    calls = []
    speed = [1.0, 1.0, 1.2, 0.5, 0.7, 1.5, 9.0, 2.0]  # of the machine: the warm-up, then seven rounds
    each = {"torch": 2.0, "mm": 1.8, "lucky": 2.2, "slow": 9.0}

    def work(name):
        calls.append(name)
        seconds = each[name] * speed[calls.count(name) - 1]
        return seconds / 3 if name == "lucky" and calls.count(name) == 3 else seconds

    works = {name: partial(work, name) for name in each}
    found = linear_measurement.against_torch({"a group": works})
    assert found == {"a group": {name: pytest.approx(each[name] / 2) for name in ("torch", "mm", "lucky")}}
    assert [calls.count(name) for name in works] == [8, 8, 8, 3]


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(linear_measurement, "_POOL_BYTES", (2**16, 2**16))
    monkeypatch.setattr(linear_measurement, "_TIMED", 2**12)
    monkeypatch.setattr(linear_measurement, "_LARGEST", 2**13)
    monkeypatch.setattr(linear_measurement, "_check_quiet", lambda pool: None)  # other tests run beside this one


@pytest.mark.usefixtures("_small")
def test_the_measurement_says_something():
    found = linear_measurement._measure([ONE, (100000, 16), (3, 2**20)])  # the last ones are larger than the pool
    assert list(found) == [ONE, (100000, 16), (3, 2**20)]
    for names in found.values():
        assert len(names) == 7
        assert set(names) <= {"torch", *linear_routes.routes()}


def test_matrices_are_not_read_twice_in_a_row():
    matrices = linear_measurement._matrices(torch.ones(2**23), (1024, 1024))
    one, other = matrices(), matrices()
    assert [matrix.shape for matrix in one] == [(1024, 1024)] * 4
    assert len({matrix.data_ptr() for matrix in one + other}) == 8
    assert {matrix.data_ptr() for matrix in matrices()} == {matrix.data_ptr() for matrix in one}
    many_rows = linear_measurement._matrices(torch.ones(2**23), (1024, 1024), rows=32)  # each takes longer
    assert len(many_rows()) == 1


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_measures_what_is_routed_whatever_the_defaults_are(dtype, monkeypatch):
    given, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda one, other: given.append((one, other, mm(one, other))) or given[-1][2])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            linear_measurement._measure([ONE])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(tensor.dtype, tensor.device.type) for product in given for tensor in product} == {(torch.float32, "cpu")}


@pytest.mark.usefixtures("_small")
def test_without_memory_to_measure_in_nothing_is_known(cache_folder, monkeypatch):
    def none(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as full:
        full.setattr(torch, "full", none)
        assert linear_measurement.fastest([ONE]) == {}
    assert not list(cache_folder.glob("*.json"))
    monkeypatch.setattr(linear_measurement, "_fastest", lambda relative: "mm")
    assert linear_measurement.fastest([ONE]) == {ONE: ("mm",) * 7}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("quiet", [0, 1, 7])
def test_on_a_busy_machine_nothing_is_stored(cache_folder, monkeypatch, quiet):
    """quiet: how many checks find that it is not."""
    checks = []

    def check(pool):
        checks.append(pool)
        if len(checks) > quiet:
            raise linear_measurement._Busy

    monkeypatch.setattr(linear_measurement, "_fastest", lambda relative: "mm")
    with monkeypatch.context() as busy:
        busy.setattr(linear_measurement, "_check_quiet", check)
        assert linear_measurement.fastest([ONE, SMALL]) == {}
        assert len(checks) == quiet + 1
    assert not list(cache_folder.glob("*.json"))
    assert linear_measurement.fastest([ONE, SMALL]) == {ONE: ("mm",) * 7}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_processor_that_another_program_uses_is_busy(monkeypatch):
    monkeypatch.setattr(linear_measurement, "_PROBE_SECONDS", 0.3)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        try:
            other.stdout.readline()
            with pytest.raises(linear_measurement._Busy):
                linear_measurement._check_quiet(torch.ones(2**16))
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
    monkeypatch.setattr(linear_measurement, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(linear_measurement, "usable_processors", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with pytest.raises(linear_measurement._Busy) if is_busy else nullcontext():
        linear_measurement._check_quiet(torch.ones(8))


@pytest.mark.parametrize(
    ("system", "name", "capability", "kernels", "expected"),
    [
        ("linux", "AMD EPYC 9554", "AVX512", True, ("kernel",) * 7),
        ("linux", "AMD EPYC 7763", "AVX2", True, ("kernel",) * 7),
        ("linux", "Intel(R) Xeon(R)", "AVX512", True, ("kernel",) * 6 + ("torch",)),
        ("linux", "Intel(R) Xeon(R)", "AVX512", False, WITHOUT),
        ("win32", "AMD EPYC 9554", "AVX2", True, WITHOUT),
        ("linux", "aarch64", "DEFAULT", True, ALL_TORCH),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("cache_folder")
def test_the_kind_of_processor_tells_the_product(system, name, capability, kernels, expected, monkeypatch):
    monkeypatch.setattr(linear_routes.sys, "platform", system)
    monkeypatch.setattr(linear_routes, "processor", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(linear_routes, "routes", lambda: {"kernel": None} if kernels else {})
    assert linear_routes.names_for([ONE, SMALL]) == {ONE: expected, SMALL: ALL_TORCH}


@pytest.mark.parametrize(
    ("system", "flags", "capability", "kernels", "expected"),
    [
        ("linux", "avx2", "AVX2", True, ("kernel",) * 7),
        ("linux", "avx512_vnni", "AVX512", True, ("kernel",) * 7),
        ("linux", "avx512_bf16 avx512_fp16", "AVX512", True, ("kernel",) * 6 + ("torch",)),
        ("linux", "avx2", "AVX2", False, ALL_TORCH),
        ("win32", "avx2", "AVX2", True, ALL_TORCH),
        ("linux", "aarch64", "DEFAULT", True, ALL_TORCH),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("measured")
def test_products_of_sixteen_bits(system, flags, capability, kernels, expected, dtype, monkeypatch):
    """What was measured is of float32."""
    linear_measurement.fastest([ONE])
    monkeypatch.setattr(linear_routes.sys, "platform", system)
    flag = {"bfloat16": "avx512_bf16", "float16": "avx512_fp16"}
    monkeypatch.setattr(linear_routes, "multiplies", lambda dtype: flag[dtype] in flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(linear_routes, "routes", lambda: {"kernel": None} if kernels else {})
    assert linear_routes.names_for([ONE, SMALL], dtype=dtype) == {ONE: expected, SMALL: ALL_TORCH}


@pytest.mark.usefixtures("measured")
def test_what_was_measured_counts_more_than_the_kind_of_processor(monkeypatch):
    linear_measurement.fastest([ONE])
    monkeypatch.setattr(linear_routes, "_by_kind_of_processor", lambda: ("kernel",) * 7)
    assert linear_routes.names_for([ONE, OTHER]) == {ONE: NAMES, OTHER: ("kernel",) * 7}
