"""Which errors are taken for memory that is out, and which are told as they are."""

from __future__ import annotations

import copy
import errno
import gc
import traceback
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from architectures import tiny_model
from fallbacks import OutAt, prompt, run

import caches
import engine
from caches.platform import host_allocator, out_of_memory
from caches.platform.out_of_memory import is_of_onednn, is_out_of_memory, recovering, without_frames
from caches.platform.undo import on_failure
from caches.stores.dense import GrowingStore
from configs import EngineConfig

YES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("std::bad_alloc (originally from torch_parallel_for(long, long))"),
    RuntimeError("bad allocation"),
    RuntimeError("unable to mmap 4096 bytes from file </tmp/a>: Cannot allocate memory (12)"),
]
NO = [
    RuntimeError("my plug-in has not enough memory slots"),
    RuntimeError("the request ran out of memory entries"),
    RuntimeError("bad allocation of slots"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive. DecodingLoop workload with"),
    ValueError("DefaultCPUAllocator: can't allocate memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", YES, ids=str)
def test_memory_is_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", NO, ids=str)
def test_memory_is_not_the_reason(error):
    assert not is_out_of_memory(error)


def test_messages_leave_out_the_place_in_the_code_of_torch():
    failure = "you tried to allocate 8 bytes. Error code 12"
    error = RuntimeError(f'{failure} (originally from torch_call_dispatcher("aten::new_empty") failed at /x.h)\nmore')
    assert out_of_memory.in_words(error) == f"RuntimeError: {failure}"


def test_the_cpu_allocator_says_so_in_the_form_that_is_known():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_where_the_message_does_not_tell_an_allocation_is_tried():
    error = RuntimeError("could not create a primitive")
    assert not is_out_of_memory(error, size=1000)
    assert is_out_of_memory(error, size=2**60)


def of_onednn():
    return RuntimeError("could not create a primitive")


@pytest.mark.parametrize("error", [of_onednn, lambda: RuntimeError("not enough memory slots")])
def test_what_torch_cannot_do_either_and_errors_of_plug_ins_are_told_as_they_are(error):
    with pytest.raises(engine.GenerationInterrupted, match=r"could not create a primitive|memory slots") as raised:
        run([2], EngineConfig().on_oom, error)
    assert not isinstance(raised.value, engine.OutOfMemoryError)
    assert raised.value.partial.stats.fallbacks == ()


class Told(MemoryError):
    """One that can be referred to weakly."""


@pytest.mark.parametrize("where", ["forward", "processor"])
def test_the_error_itself_is_the_cause(where):
    """Without what its frames hold on to."""
    pinned = []

    def error():
        held = torch.zeros(10)
        pinned.append(weakref.ref(held))
        return Told("no memory in here")

    def fails(ids, scores):
        held = torch.zeros(10)
        pinned.append(weakref.ref(held))
        raise Told("no memory in here")

    model = tiny_model("llama")
    options = {"logits_processor": [fails]} if where == "processor" else {}
    with OutAt(model, [1] if where == "forward" else [], error), pytest.raises(engine.OutOfMemoryError) as raised:
        engine.generate(model, prompt(), max_new_tokens=4, on_oom=[], **options)
    cause = raised.value.__cause__
    assert isinstance(cause, Told)
    assert (str(cause), cause.__traceback__, cause.__context__) == ("no memory in here", None, None)
    gc.collect()
    assert all(reference() is None for reference in pinned)


def test_what_is_kept_of_an_error_has_no_frames():
    def fails():
        try:
            raise MemoryError("first")
        except MemoryError as first:
            raise RuntimeError("second") from first

    with pytest.raises(RuntimeError) as raised:
        fails()
    assert raised.value.__cause__.__traceback__ is not None
    error = without_frames(raised.value)
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None


def pinning(error, pinned):
    held = torch.zeros(10)
    pinned.append(weakref.ref(held))
    raise error


@pytest.mark.parametrize(("error", "classes"), [(Told("out"), ()), (OSError("full"), (OSError, caches.CacheError))])
def test_behind_a_block_that_recovers_nothing_is_held(error, classes):
    pinned = []
    with recovering(*classes) as outcome:
        pinning(error, pinned)
    assert outcome.failure is error
    assert error.__traceback__ is None
    assert pinned[0]() is None


def test_a_block_that_comes_to_its_end_has_no_failure():
    with recovering(Exception) as outcome:
        pass
    assert outcome.failure is None


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_other_errors_pass_through_a_block_that_recovers_with_their_frames(error):
    with pytest.raises(type(error)) as raised, recovering(OSError) as outcome:
        pinning(error, [])
    assert outcome.failure is None
    assert "pinning" in [frame.name for frame in raised.traceback]


def test_where_the_message_does_not_tell_a_block_recovers_by_its_size():
    with recovering(size=2**60) as outcome:
        raise of_onednn()
    assert is_of_onednn(outcome.failure)
    with pytest.raises(RuntimeError), recovering():
        raise of_onednn()


def test_an_error_that_is_being_handled_keeps_its_frames():
    outcome = recovering()

    def fails():
        try:
            pinning(ValueError("first"), [])
        finally:
            with outcome:
                pinning(Told("second"), [])

    with pytest.raises(ValueError, match="first") as raised:
        fails()
    assert (outcome.failure.__traceback__, outcome.failure.__context__) == (None, raised.value)
    assert "pinning" in [frame.name for frame in raised.traceback]


@pytest.mark.parametrize("where", ["forward", "processor", "rows"])
@pytest.mark.parametrize("on_oom", [(), EngineConfig().on_oom])
def test_an_error_that_the_caller_is_handling_keeps_its_frames(where, on_oom, monkeypatch):
    """Also where the run's own errors were raised in its handling."""
    calls, model, select_rows = [], tiny_model("llama"), GrowingStore.select_rows
    options = {"num_beams": 2} if where == "rows" else {}

    def fails_once(work, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise Told("no memory in here")
        return work(*arguments)

    if where == "processor":
        options["logits_processor"] = [partial(fails_once, lambda ids, scores: scores)]
    if where == "rows":
        monkeypatch.setattr(GrowingStore, "select_rows", lambda *arguments: fails_once(select_rows, *arguments))
    handled, error = None, nullcontext() if on_oom else pytest.raises(engine.OutOfMemoryError)
    try:
        pinning(ValueError("first"), [])
    except ValueError as first:
        handled = first
        with OutAt(model, [2] if where == "forward" else [], lambda: Told("no memory in here")), error:
            assert engine.generate(model, prompt(), max_new_tokens=4, on_oom=on_oom, **options).stats.fallbacks
    assert "pinning" in [frame.name for frame in traceback.extract_tb(handled.__traceback__)]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), None])
def test_what_a_failed_block_has_begun_is_undone(error):
    undone = []
    with pytest.raises(type(error)) if error else nullcontext(), on_failure(partial(undone.append, "here")):
        if error:
            raise error
    assert undone == (["here"] if error else [])


def test_an_error_without_text_has_a_first_line():
    assert out_of_memory.first_line(ValueError()) == "ValueError"
    assert out_of_memory.in_words(ValueError()) == "ValueError"
    assert out_of_memory.in_words(ValueError("a\nb")) == "ValueError: a"


def test_a_library_that_raises_without_text_while_loading(monkeypatch):
    def wordless(*given, **options):
        raise ValueError

    monkeypatch.setattr("engine.loading.load.AutoConfig.from_pretrained", wordless)
    with pytest.raises(engine.InputError, match=r"no model could be loaded from '.*shipped': ValueError"):
        engine.plan(engine.SHIPPED_MODEL, prompt_tokens=4, max_new_tokens=4)


def test_a_library_that_raises_without_text_while_studied(monkeypatch):
    def wordless(*given, **options):
        raise ValueError

    model = copy.deepcopy(tiny_model("llama"))
    model.config.max_position_embeddings = 251  # of its own: what was studied is kept
    monkeypatch.setattr(type(model), "_from_config", wordless)
    with pytest.raises(engine.InputError, match="describes no model that generates text: ValueError"):
        engine.plan(model, prompt_tokens=4, max_new_tokens=5)


def test_windows_has_no_library_without_a_name(monkeypatch):
    calls = []

    def refuses(name):
        calls.append(name)
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr(host_allocator.ctypes, "CDLL", refuses)
    out_of_memory.empty_allocators()
    host_allocator.keep_freed_memory.__wrapped__()
    assert calls == [None, None]
