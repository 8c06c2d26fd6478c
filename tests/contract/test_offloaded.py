"""Columns that live away from the device: the same text, two layers' worth of the device, nothing left on the disk."""

import copy
import gc
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from architectures import four_layers, prompt, tiny_model
from contract import EDGES, FULL, KINDS, READS_OTHERS, Kind, build
from encoder_decoders import source, tiny_encoder_decoder
from on_disk import limited
from transformers import GenerationMixin
from trial import Trial
from walk import walk

import caches
import engine
from caches.memory.buffers import DeviceBuffer, DiskBuffer, HostBuffer
from caches.memory.disk_file import DiskFile
from caches.memory.prefetch import CopyStream, Prefetcher
from configs import ConfigError

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 16
BACKENDS = ("offloaded", "offloaded_static")
NAMES = ["llama", "mistral", "gemma2", "llama4_text", "bamba", "falcon_h1"]


def on_disk(folder, **options):
    return {"residency": "disk", "folder": str(folder)} | options


# The same as on the device.


@pytest.mark.covering("values")
@pytest.mark.parametrize("options", [{}, {"residency": "disk"}, {"offload_only_non_sliding": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_two_turns_equal_those_of_a_dynamic_cache_bit_by_bit(name, options):
    model, inputs = four_layers(name), prompt()
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=5))
    again = torch.tensor([[5, 9, 11], [7, 3, 2]])

    def two_turns(cache, cache_config):
        first = generator.generate(
            inputs, cache=cache, cache_config=cache_config, max_new_tokens=NEW, output_logits=True
        )
        ids = torch.cat([first.sequences, again], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, 13:])], dim=1)
        turn = {"input_ids": ids, "attention_mask": mask}
        second = generator.generate(turn, cache=first.cache, max_new_tokens=NEW, output_logits=True)
        assert second.stats.prompt_tokens == 2 * 4  # the others are in the cache
        return second.sequences, torch.stack([*first.logits, *second.logits])

    expected = two_turns("dynamic", None)
    for backend, more in (("offloaded", {}), ("offloaded_static", {"max_cache_len": 90})):
        for found, must in zip(two_turns(backend, options | more), expected, strict=True):
            assert torch.equal(found, must)


@pytest.mark.parametrize("options", [{}, {"residency": "disk"}], ids=str)
@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "t5gemma"])
def test_encoder_decoder_models(name, options):
    model, inputs = tiny_encoder_decoder(name), source(name)
    expected = GenerationMixin.generate(model, **inputs, max_new_tokens=NEW, do_sample=False)
    for backend in BACKENDS:
        out = engine.generate(model, inputs, cache=backend, cache_config=options, max_new_tokens=NEW)
        assert torch.equal(out.sequences, expected)
        for part in out.cache.parts:  # the encoder's are away too
            assert part.bytes_by_place[options.get("residency", "host")] > 0
    beside = {"self_cache": "dynamic", "cross_cache": {"name": "offloaded"} | options}
    out = engine.generate(model, inputs, cache="encoder_decoder", cache_config=beside, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert out.cache.parts[0].bytes_by_place.keys() == {"device"}


@pytest.mark.parametrize("residency", ["host", "disk"])
@pytest.mark.parametrize("backend", ["quantized", "offloaded_quantized"])
def test_what_is_kept_of_an_encoder_is_where_the_codes_are(backend, residency):
    model, inputs = tiny_encoder_decoder("t5"), source("t5")
    options = {"residency": residency, "residual_length": 2}
    out = engine.generate(model, inputs, cache=backend, cache_config=options, max_new_tokens=NEW)
    offloaded = engine.generate(model, inputs, cache="offloaded", max_new_tokens=NEW).cache
    moved = caches.migrate(offloaded, backend, **options)
    for cache in (out.cache, moved):
        for part in cache.parts:
            assert part.bytes_by_place[residency] > 0
    expected = engine.generate(model, inputs, max_new_tokens=NEW).cache.parts[1]
    assert all(torch.equal(kept, must) for kept, must in zip(moved.parts[1].key_cache, expected.key_cache, strict=True))


@pytest.mark.parametrize("residency", ["host", "disk"])
def test_windows_keep_no_memory_of_a_long_prompt(residency):
    model, long = tiny_model("mistral"), prompt(rows=1, tokens=200, pads=0)
    for tokens in (1, 5):
        out = engine.generate(
            model, long, cache="offloaded", cache_config={"residency": residency}, max_new_tokens=tokens
        )
        least = engine.generate(model, long, cache="dynamic", max_new_tokens=tokens)
        assert torch.equal(out.sequences, least.sequences)
        assert out.cache.bytes_by_place[residency] <= 2 * least.cache.bytes


@pytest.mark.parametrize("residency", ["host", "disk"])
def test_without_room_for_a_smaller_copy_nothing_changes(residency, monkeypatch):
    model, long = tiny_model("mistral"), prompt(rows=1, tokens=200, pads=0)
    expected = engine.generate(model, long, max_new_tokens=NEW).sequences
    kind = {"host": HostBuffer, "disk": DiskBuffer}[residency]

    def fails(self, count, kept):
        raise MemoryError

    monkeypatch.setattr(kind, "_copied", fails)
    out = engine.generate(model, long, cache="offloaded", cache_config={"residency": residency}, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    monkeypatch.undo()
    allocate = kind._allocate

    def full(self, count, dtype, device, kept):
        if kept is None and self._memory is not None:
            raise MemoryError
        return allocate(self, count, dtype, device, kept)

    monkeypatch.setattr(kind, "_allocate", full)
    out = engine.generate(model, long, cache="offloaded", cache_config={"residency": residency}, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("kind", ["full", "full + sliding", "indexed", "windows with states", "encoder, full"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_sequence_of_operations_on_disk(backend, kind, tmp_path):
    trial = Trial(backend, kind, 3, **on_disk(tmp_path, offload_only_non_sliding=False))
    trial.step(2)
    for seed in range(3):
        for _ in walk(copy.deepcopy(trial), seed):
            pass
    assert os.listdir(tmp_path) == []


# Where the bytes are.


def held_by(cache):
    return [held for layer in cache.layers for held in layer.dense_state().values()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_device_has_two_layers_however_many_there_are(backend):
    for kind in ("full", "full + sliding", "indexed"):
        staging = []
        for times in (1, 3):
            specs = KINDS[kind].specs * times
            recipe = caches.recipe(backend)
            size = {"max_cache_len": 128} if recipe.has_a_size else {}
            trial = Trial("offloaded", kind)
            trial.kind = Kind(specs)
            trial.cache = recipe.build(specs, recipe.options(offload_only_non_sliding=False, **size))
            for count in (100, 1, 1, 5):
                trial.step(count)
            places = trial.cache.bytes_by_place
            assert sum(places.values()) == trial.cache.bytes
            assert places["device"] == 0
            assert places["host"] >= sum(held.nbytes for held in held_by(trial.cache))
            staging.append(places["staging"])
            widest = max(sum(tensor.nbytes for tensor in layer.tensors()) for layer in trial.cache.layers)
            assert 0 < staging[-1] <= 2 * widest
        assert staging[0] == staging[1]


def test_layers_with_windows_may_stay():
    for backend, default in (("offloaded", False), ("offloaded_static", True)):
        for stay in (None, True, False):
            options = {} if stay is None else {"offload_only_non_sliding": stay}
            trial = Trial(backend, "full + sliding", **options)
            trial.step(5)
            is_away = [any(True for _ in layer.offloaded_buffers()) for layer in trial.cache.layers]
            keeps_windows = default if stay is None else stay
            assert is_away == [spec.attention_span.size is None or not keeps_windows for spec in trial.kind.specs]
            assert (trial.cache.bytes_by_place["device"] > 0) == keeps_windows


@pytest.mark.parametrize("options", [{}, {"residency": "disk"}], ids=str)
def test_a_model_without_weights_tells_the_size(options):
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config)
    ours = caches.build("offloaded", model.config, **options)
    for tokens in (9, 1, 200, 1):
        model(torch.zeros(2, tokens, dtype=torch.long, device="meta"), past_key_values=ours)
    assert ours.bytes_by_place[options.get("residency", "host")] > 4 * 2 * 211 * 2 * 2 * 8 * 4 - 1
    assert all(tensor.is_meta for layer in ours.layers for tensor in layer.tensors())


def test_states_stay():
    trial = Trial("offloaded", "attention, states")
    trial.step(5)
    assert trial.cache.bytes_by_place["device"] == sum(
        tensor.nbytes for layer in trial.cache.layers if layer.state for tensor in layer.state.tensors()
    )


def test_a_step_moves_what_it_reads_once_and_what_it_adds_once(monkeypatch):
    moved = {"read": 0, "write": 0}

    def counted(name, bytes_of):
        original = getattr(HostBuffer, name)

        def method(self, *arguments):
            result = original(self, *arguments)
            moved[name] += bytes_of(result, arguments)
            return result

        monkeypatch.setattr(HostBuffer, name, method)

    counted("read", lambda result, arguments: result.nbytes)
    counted("write", lambda result, arguments: arguments[1].nbytes)
    trial = Trial("offloaded", "full")
    for _ in range(4):
        trial.step(1)
    for _ in range(5):
        held = sum(one.nbytes for one in held_by(trial.cache))
        trial.cache.reserve(64)
        moved.update(read=0, write=0)
        trial.step(1)
        new = held // (trial.total_tokens - 1)
        # The first layer's columns of the next step are fetched before this one ends: with those that it added.
        assert moved == {"read": held + new // 4, "write": new}


# The order of things where copies run beside the computation.


class Late(CopyStream):
    """Copies come as late as they may: when they are waited for."""

    started = 0

    def start(self, copy, memory):
        Late.started += 1
        copy()
        came = memory.clone()
        memory.view(torch.uint8).fill_(255)
        return memory, came

    def wait(self, copied):
        if copied is not None:
            copied[0].copy_(copied[1])


@pytest.mark.parametrize("kind", ["full", "full + sliding", "indexed", "windows with states", "shared"])
def test_what_is_read_is_waited_for(kind, monkeypatch):
    trial = Trial("offloaded", kind)
    trial.cache.scratch.prefetcher = Prefetcher(Late)
    monkeypatch.setattr(Late, "started", 0)
    for count in [*EDGES, 1, 1, 1]:
        trial.step(count)
    assert Late.started > 2 * len(EDGES)
    for _ in walk(trial, 1):
        pass


def test_streams_and_events(monkeypatch):
    """A copy starts when what was queued before is done, and is waited for before what it brings is read."""
    log = []

    class FakeStream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            log.append(f"{self.name} records")
            return f"event of {self.name}"

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

        def __enter__(self):
            log.append("enter side")

        def __exit__(self, *error):
            log.append("leave side")

    class FakeMemory:
        def record_stream(self, stream):
            log.append(f"memory used on {stream.name}")

    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream("side"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream("compute"))
    beside = CopyStream(torch.device("cuda"))
    copied = beside.start(lambda: log.append("copy"), FakeMemory())
    beside.wait(copied)
    assert log == [
        "compute records",
        "side waits for event of compute",
        "enter side",
        "copy",
        "leave side",
        "memory used on side",
        "side records",
        "compute waits for event of side",
    ]


def test_what_a_layer_read_lasts_where_later_layers_read_it_too():
    def lasts(*more):
        cache = build("offloaded", Kind((FULL,) * 4 + more))
        new = lambda number: torch.full((1, 2, 1, 2), float(number), dtype=torch.float64)  # noqa: E731
        for step in range(4):
            cache.begin(1)
            read = [cache.update(new(10 * step + layer), new(-layer), layer)[0] for layer in range(4)]
            cache.commit()
        return all(bool((keys[0, 0, -1] == 30 + layer).all()) for layer, keys in enumerate(read))

    assert lasts(READS_OTHERS)
    assert not lasts()  # else the test shows nothing


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_few_layers(layers, monkeypatch):
    """What comes after a layer is itself, or what came before it: what was fetched too early lacks the last tokens."""
    monkeypatch.setitem(KINDS, "few", Kind((FULL,) * layers))
    trial = Trial("offloaded", "few")
    for count in EDGES:
        trial.step(count)
        trial.check()
        trial.step(3, rejected=2)
        trial.feed(1)


# Buffers.


@pytest.mark.parametrize("new_buffer", [DeviceBuffer, HostBuffer, lambda: DiskBuffer(DiskFile())])
def test_buffers(new_buffer, monkeypatch):
    """Codes too: any data type, and rows rearranged in place in small pieces."""
    monkeypatch.setattr("caches.memory.buffers._CHUNK_BYTES", 40)
    buffer = new_buffer()
    assert buffer.shape is None
    held = torch.randint(0, 255, (3, 2, 9, 4), dtype=torch.uint8)
    buffer.open(held, 10)
    buffer.write(0, held)
    for index in ([2, 0, 1], [1, 1], [0, 1, 1, 0, 0], [4], [0, 0, 0]):
        twin, before = copy.deepcopy(buffer), held
        buffer.select_rows(torch.tensor(index), 9)
        held = held[index]
        assert torch.equal(twin.read(0, 9), before)
        assert buffer.shape == (len(index), 2, 4)
        assert torch.equal(buffer.read(0, 9), held)
    buffer.shift(4, 9)
    assert torch.equal(buffer.read(0, 5), held[:, :, 4:])
    buffer.reserve(20, keep=5)
    buffer.write(5, held)
    assert torch.equal(buffer.read(2, 14), torch.cat([held[:, :, 4:], held], dim=2)[:, :, 2:])
    space = buffer.space(torch.empty(buffer.numel(20), dtype=torch.uint8), 20)
    assert torch.equal(buffer.read(5, 14, space), held)
    buffer.clear()
    assert list(buffer.tensors()) == []


# The disk.


def files_of_at_most(size):
    return limited(resource.RLIMIT_FSIZE, size)


@pytest.mark.parametrize("kind", ["full", "full + sliding", "attention with states", "encoder, full"])
def test_a_full_disk_is_an_error_before_the_step(kind, tmp_path):
    trial = Trial("offloaded", kind, 3, **on_disk(tmp_path))
    with files_of_at_most(200_000):
        trial.step(5)
        for attempt in (lambda: trial.cache.begin(5000), lambda: trial.feed(5000), lambda: trial.cache.reserve(5000)):
            with pytest.raises(
                caches.CapacityError, match=rf"needs a file of [\d,]+ bytes in {tmp_path}, where [\d,]+ "
            ):
                attempt()
            trial.check()
        trial.step(3)
        trial.check()
    trial.step(400)
    trial.check()


def test_a_full_disk_at_the_first_step(tmp_path):
    trial = Trial("offloaded", "full", 3, **on_disk(tmp_path))
    with files_of_at_most(2_000):
        with pytest.raises(caches.CapacityError, match="File too large"):
            trial.step(100)
        trial.cache.abort()
        trial.check()
    trial.step(3)
    trial.check()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="gone' is no folder on this machine: make it first"):
        Trial("offloaded", "full", **on_disk(tmp_path / "gone"))
    (tmp_path / "gone").mkdir()
    trial = Trial("offloaded", "full", **on_disk(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    match = r"gone, which is no folder: No such file or directory.*another `folder`"
    with pytest.raises(caches.CapacityError, match=match):
        trial.step(1)


def test_a_full_disk_keeps_what_was_generated(tmp_path):
    model, ids = tiny_model("llama"), prompt(pads=0)["input_ids"]
    expected = model.generate(ids, max_new_tokens=150, do_sample=False, pad_token_id=0)
    ours = caches.build("offloaded", model.config, **on_disk(tmp_path))
    failed = pytest.raises(engine.GenerationInterrupted, match=r"CapacityError: .* bytes are free")
    with files_of_at_most(160_000), failed as raised:
        engine.generate(model, ids, cache=ours, max_new_tokens=150)
    partial = raised.value.partial
    new = partial.sequences.shape[1] - 13
    assert 100 < new < 150
    assert torch.equal(partial.sequences, expected[:, : 13 + new])
    rest = engine.generate(model, partial.sequences, cache=partial.cache, max_new_tokens=150 - new)
    assert torch.equal(rest.sequences, expected)


LIVES_UNTIL_KILLED = """
import sys, time, torch, caches
from transformers import LlamaConfig
cache = caches.build("offloaded", LlamaConfig(num_hidden_layers=2), residency="disk", folder=sys.argv[1])
new = torch.ones(1, 2, 500, 8)
for layer in (0, 1):
    cache.update(new, new, layer)
assert cache.bytes_by_place["disk"] >= 4 * new.nbytes
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_on_the_disk(tmp_path):
    trial = Trial("offloaded", "full", **on_disk(tmp_path))
    for count in (5, 300):
        trial.step(count)
        assert os.listdir(tmp_path) == []
    open_files = len(os.listdir("/proc/self/fd"))
    trial.cache.reset()
    trial.forget(3)
    assert len(os.listdir("/proc/self/fd")) < open_files  # so its space is free again
    trial.step(5)
    del trial
    gc.collect()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_nothing_is_left_on_the_disk_of_a_process_that_was_killed(tmp_path):
    command = [sys.executable, "-c", LIVES_UNTIL_KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert os.listdir(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


# What it is not for.


@pytest.mark.parametrize("cache", [*BACKENDS, "offloaded_quantized"])
@pytest.mark.parametrize("residency", ["host", "disk"])
def test_what_was_prefetched_of_cropped_tokens_is_not_read(cache, residency, tmp_path):
    """Rows that share a prompt: all that each has for itself is cropped, and other tokens take their place."""
    generator, ids = engine.Generator(tiny_model("llama")), prompt(rows=1, tokens=12, pads=0)["input_ids"]
    other = torch.cat([ids, prompt(rows=1, tokens=6, pads=0, seed=4)["input_ids"]], dim=1).repeat(2, 1)
    own = {"max_cache_len": 80} if cache == "offloaded_static" else {}
    own |= {"residual_length": 0} if cache == "offloaded_quantized" else {}
    away = {"residency": residency} | ({"folder": str(tmp_path)} if residency == "disk" else {})

    def run(name, options):
        forked = {"do_sample": True, "seed": 1, "num_return_sequences": 2, "max_new_tokens": NEW}
        first = generator.generate(ids, cache=name, cache_config=options, **forked)
        first.cache.crop(11)
        return generator.generate(other, cache=first.cache, max_new_tokens=NEW).tokens

    here = {"offloaded": "dynamic", "offloaded_static": "static", "offloaded_quantized": "quantized"}[cache]
    assert run(cache, own | away) == run(here, own)
