"""Caches of earlier calls: prompts that begin in the same way are read once, and every text is as without."""

import errno
import inspect
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import reused
import torch
from architectures import ids_of, tiny_model
from covering import graded
from fallbacks import OutAt
from safetensors import SafetensorError

import caches.files
import engine
from configs import ConfigError

NEW = 6


def generator_of(name="llama", store_bytes=10**8, **options):
    return engine.Generator(tiny_model(name), config=engine.EngineConfig(prefix_store_bytes=store_bytes, **options))


def joined(*ids):
    return torch.cat(ids, 1)


def places(cache):
    return {tensor.untyped_storage().data_ptr() for layer in cache.layers for tensor in layer.tensors()}


def stored(generator):
    return [entry for index in generator._store._kinds.values() for entry in index]


@pytest.mark.parametrize("first", graded((0, 20), (40, 60, 80), range(100, 260, 20)))
def test_random_histories_are_as_without(first):
    assert reused.run(range(first, first + 20))["cached tokens"] > 0


@pytest.mark.product
@pytest.mark.parametrize("first", range(260, 10_000, 487))
def test_more_random_histories(first):
    assert reused.run(range(first, first + 487))["cached tokens"] > 0


def test_what_two_prompts_have_in_common_is_read_once_and_not_copied():
    generator, common = generator_of(), ids_of(100)
    first = generator.generate(joined(common, ids_of(9, 1)), max_new_tokens=NEW)
    assert (first.stats.cached_tokens, first.stats.prompt_tokens) == (0, 109)
    second = generator.generate(joined(common, ids_of(9, 2)), max_new_tokens=NEW)
    assert (second.stats.cached_tokens, second.stats.prompt_tokens) == (100, 9)
    assert places(first.cache) < places(second.cache)  # its own tensors have what came since
    own = places(second.cache) - places(first.cache)
    sizes = [one.shape[2] for layer in second.cache.layers for one in layer.tensors()
             if one.untyped_storage().data_ptr() in own]  # fmt: skip
    assert max(sizes) < 32


def test_a_conversation_goes_on_where_it_ended():
    generator, text = generator_of(), ids_of(60)
    held = set()
    for turn in range(4):
        out = generator.generate(text, max_new_tokens=NEW)
        assert out.stats.cached_tokens == (0 if turn == 0 else text.shape[1] - 5 - 1)
        assert len(stored(generator)) == 1  # the longer one in place of the shorter
        text = joined(out.sequences, ids_of(5, turn))
        held |= places(out.cache)
    rooms = {one.shape[2] for layer in out.cache.layers for one in layer.tensors()}
    assert len(held) == len(places(out.cache))  # no tensor was copied
    assert rooms == {128}


def test_the_caches_of_calls_can_go_on():
    """They are the caller's: what is stored does not change with them."""
    generator, text = generator_of(), ids_of(60)
    plain = engine.Generator(generator.model)
    for change in (lambda cache: cache.crop(20), lambda cache: cache.select_rows(torch.tensor([0, 0])),
                   lambda cache: cache.reset(), lambda cache: cache.fork(2)):  # fmt: skip
        out = generator.generate(text, max_new_tokens=NEW)
        change(out.cache)
        rows = max(1, out.cache.batch_size)
        other = joined(text[:, : out.cache.total_tokens], ids_of(4, 9)).expand(rows, -1)
        if out.cache.total_tokens <= 60:
            generator.generate(other, cache=out.cache, max_new_tokens=NEW)
        assert generator.generate(text, max_new_tokens=NEW).tokens == plain.generate(text, max_new_tokens=NEW).tokens


@pytest.mark.parametrize("name", ["gemma2", "lfm2"])
def test_where_tokens_cannot_be_taken_back_the_third_prompt_goes_on(name):
    """The second one stores where both are the same."""
    generator, common = generator_of(name), ids_of(50)
    plain, cached, read = engine.Generator(generator.model), [], []
    for seed in range(1, 4):
        ids = joined(common, ids_of(9, seed))
        out = generator.generate(ids, max_new_tokens=NEW)
        assert out.tokens == plain.generate(ids, max_new_tokens=NEW).tokens
        cached.append(out.stats.cached_tokens)
        read.append(out.stats.prompt_tokens)
    assert (cached, read) == ([0, 0, 50], [59, 59, 9])


def test_the_prompt_of_several_rows_is_stored():
    generator, ids = generator_of(), ids_of(60)
    strategies = [{"do_sample": True, "seed": 1, "num_return_sequences": 4}, {"num_beams": 3}]
    plain = engine.Generator(generator.model)
    for strategy, cached in zip(strategies, (0, 59), strict=True):
        out = generator.generate(ids, max_new_tokens=NEW, **strategy)
        assert out.tokens == plain.generate(ids, max_new_tokens=NEW, **strategy).tokens
        assert (out.stats.cached_tokens, out.stats.prompt_tokens) == (cached, 60 - cached)


def test_a_prompt_that_is_stored_before_its_rows_part_is_read_in_pieces():
    generator = generator_of()
    with generator.batch(piece_tokens=16) as batch:
        found = batch.submit(ids_of(100), num_beams=3, max_new_tokens=NEW)
    assert batch.counts.pieces >= 6
    assert [len(entry.ids) >= 99 for entry in stored(generator)] == [True]
    assert (
        found.result().tokens
        == engine.generate(tiny_model("llama"), ids_of(100), num_beams=3, max_new_tokens=NEW).tokens
    )


def test_a_call_that_is_cancelled_in_its_prompt_has_all_of_that():
    generator, common = generator_of("gemma2"), ids_of(40)
    generator.generate(joined(common, ids_of(9, 1)), max_new_tokens=NEW)
    text, stop = joined(common, ids_of(9, 2)), threading.Event()
    stop.set()
    with pytest.raises(engine.GenerationCancelled) as stopped:
        generator.generate(text, max_new_tokens=NEW, cancellation=stop)
    partial = stopped.value.partial
    assert torch.equal(partial.sequences, text)
    assert (partial.stats.prompt_tokens, partial.stats.cached_tokens) == (49, 0)


def test_answers_go_before_prompts_and_these_before_what_is_common():
    generator, common = generator_of(store_bytes=10**8), ids_of(100)
    for seed in range(1, 5):
        generator.generate(joined(common, ids_of(60, seed)), max_new_tokens=64, eos_token_id=[])
    assert [len(entry.ids) for entry in stored(generator)] == [223] * 4
    store, lengths = generator._store, []
    store._most = store.bytes
    while store.bytes:
        store._most = store.bytes - 1
        store._make_fit()
        lengths.append(sorted(len(entry.ids) for entry in stored(generator)))
    assert lengths[0][0] == 160
    assert all(min(one) == 160 for one in lengths if 223 in one)  # no prompt goes before the last answer
    assert all(min(one) >= 100 for one in lengths if one)
    assert lengths[-2:] == [[100], []]


def test_bytes_stay_within_the_budget():
    generator = generator_of(store_bytes=200_000)
    for seed in range(12):
        generator.generate(ids_of(100, seed), max_new_tokens=NEW)
        assert 0 < generator.pools["prefix_bytes"] <= 200_000
        assert generator._store.bytes == reused._bytes(generator._store)
    assert generator.generate(ids_of(100, 11), max_new_tokens=NEW).stats.cached_tokens == 99
    assert generator.generate(ids_of(100, 0), max_new_tokens=NEW).stats.cached_tokens == 0
    generator.release()
    assert generator.pools["prefix_bytes"] == 0


def test_what_has_no_room_is_in_a_folder_also_for_the_next_process(tmp_path):
    folder = {"prefix_store_folder": str(tmp_path)}
    generator, texts = generator_of(store_bytes=70_000, **folder), [ids_of(100, seed) for seed in range(3)]
    expected = [generator.generate(text, max_new_tokens=NEW).tokens for text in texts]
    [own] = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert len(list(own.glob("*.safetensors"))) == 2
    generator.release()
    other = generator_of(**folder)
    for text, tokens in zip(texts, expected, strict=True):
        out = other.generate(text, max_new_tokens=NEW)
        assert (out.tokens, out.stats.cached_tokens) == (tokens, 99)
    for file in own.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    damaged = generator_of(**folder)
    for text, tokens in zip(texts, expected, strict=True):
        out = damaged.generate(text, max_new_tokens=NEW)
        assert (out.tokens, out.stats.cached_tokens) == (tokens, 0)


def test_an_entry_for_whose_file_there_is_no_memory_is_forgotten(tmp_path, monkeypatch):
    """Memory that is out calls for `release`, which empties the store: that has to succeed."""
    generator = generator_of(prefix_store_folder=str(tmp_path))
    expected = generator.generate(ids_of(100), max_new_tokens=NEW).tokens

    def no_memory(*_):
        raise NO_MEMORY

    monkeypatch.setattr(caches.Cache, "save", no_memory)
    model = generator.model
    with OutAt(model, [0]):
        out = generator.generate(ids_of(100, 1), max_new_tokens=NEW, on_oom=["release"])
    assert [one.name for one in out.stats.fallbacks] == ["release"]
    assert generator.generate(ids_of(100), max_new_tokens=NEW).tokens == expected
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_of_another_user_are_read(tmp_path, monkeypatch):
    folder = {"prefix_store_folder": str(tmp_path)}
    generator = generator_of(**folder)
    generator.generate(ids_of(100), max_new_tokens=NEW)
    generator.release()

    def fails(path):
        raise PermissionError(path)

    monkeypatch.setattr("os.utime", fails)
    assert generator_of(**folder).generate(ids_of(100), max_new_tokens=NEW).stats.cached_tokens == 99


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
NOT_NOW = [("safe_open", OSError(errno.ENOMEM, "not now")), ("safe_open", OSError(errno.EMFILE, "not now")),
           ("_restore", NO_MEMORY)]  # fmt: skip


@pytest.mark.parametrize(("part", "error"), NOT_NOW, ids=["no memory", "no descriptors", "no memory on the device"])
def test_files_that_cannot_be_read_now_stay(part, error, tmp_path, monkeypatch):
    folder = {"prefix_store_folder": str(tmp_path)}
    generator = generator_of(**folder)
    expected = generator.generate(ids_of(100), max_new_tokens=NEW).tokens
    generator.release()
    [file] = tmp_path.rglob("*.safetensors")

    def fails(*_, **__):
        raise error

    other = generator_of(**folder)
    with monkeypatch.context() as patch:
        patch.setattr(caches.files, part, fails)
        if error is NO_MEMORY:
            with pytest.raises(torch.OutOfMemoryError):
                caches.load(file, other.model)
        out = other.generate(ids_of(100), max_new_tokens=NEW)
        assert (out.tokens, out.stats.cached_tokens) == (expected, 0)
    assert file.exists()
    assert generator_of(**folder).generate(ids_of(100), max_new_tokens=NEW).stats.cached_tokens == 99


def test_files_that_another_process_removes_meanwhile(tmp_path, monkeypatch):
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(tmp_path))
    found = Path.glob

    def glob(folder, pattern):
        yield folder / "removed.safetensors"
        yield from found(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    for seed in range(3):
        generator.generate(ids_of(100, seed), max_new_tokens=NEW)
    assert len(list(found(tmp_path, "*/*.safetensors"))) == 2
    assert len(generator._store) == 3


def test_under_autocast_nothing_is_stored():
    generator, text = generator_of(), ids_of(100)
    with torch.autocast("cpu", torch.bfloat16):
        generator.generate(text, max_new_tokens=NEW)
        assert generator.generate(text, max_new_tokens=NEW).stats.cached_tokens == 0
    assert generator.generate(text, max_new_tokens=NEW).stats.cached_tokens == 0
    assert generator.generate(text, max_new_tokens=NEW).stats.cached_tokens == 99
    with torch.autocast("cpu", torch.bfloat16):
        assert generator.generate(text, max_new_tokens=NEW).stats.cached_tokens == 0


def test_files_that_are_gone_hide_no_others(tmp_path):
    generator, common, hits = generator_of(store_bytes=40_000, prefix_store_folder=str(tmp_path)), ids_of(60), 0
    for seed in range(60):
        out = generator.generate(joined(common, ids_of(9, seed)), max_new_tokens=2)
        hits += out.stats.cached_tokens >= 60
    files = len(list(tmp_path.rglob("*.safetensors")))
    assert hits >= 58
    assert len(generator._store) <= files + 3


def cached_tokens(folder):
    """Of three prompts, by a generator of its own."""
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(folder))
    found = [generator.generate(ids_of(100, seed), max_new_tokens=NEW).stats.cached_tokens for seed in range(3)]
    generator.release()
    assert generator.prefix_failures == 0
    return found


DAMAGED = [
    "{}", "null", "[" * 10**5, {"ids": []}, {"ids": ["a"] * 50}, {"ids": [7] * 50}, {"kind": None},
    {"prompt_tokens": "x"}, {"common_tokens": None},
]  # fmt: skip


@pytest.mark.parametrize("damage", [None, *DAMAGED], ids=lambda damage: str(damage)[:30])
def test_an_index_that_is_gone_or_damaged_is_made_again(damage, tmp_path):
    assert cached_tokens(tmp_path) == [0, 0, 0]
    for index in tmp_path.glob("*/*.json"):
        if damage is None:  # the process was killed before it wrote it
            index.unlink()
        else:
            index.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(index.read_text()) | damage))
    assert cached_tokens(tmp_path) == [0, 0, 0]
    assert cached_tokens(tmp_path) == [99, 99, 99]


def test_a_file_that_holds_other_tokens_is_not_believed(tmp_path):
    assert cached_tokens(tmp_path) == [0, 0, 0]
    first, *others = tmp_path.glob("*/*.safetensors")
    for other in others:
        shutil.copy(first, other)
    found = cached_tokens(tmp_path)
    assert (found.count(99), found.count(0)) == (1, 2)


def test_files_have_a_limit_too(tmp_path):
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(tmp_path))
    for seed in range(20):
        generator.generate(ids_of(100, seed), max_new_tokens=NEW)
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) >= 4
    assert sum(file.stat().st_size for file in files) <= 8 * 70_000


def test_threads_share_what_is_stored():
    generator, common = generator_of(), ids_of(60)
    plain = engine.Generator(generator.model)
    texts = [joined(common, ids_of(5, seed)) for seed in range(6)]
    expected = [plain.generate(text, max_new_tokens=NEW).tokens for text in texts]
    found = {}

    def work(number):
        for turn in range(3):
            out = generator.generate(texts[number], max_new_tokens=NEW)
            found[number, turn] = out.tokens, out.stats.cached_tokens

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number, turn][0] for number in range(6) for turn in range(3)] == [
        tokens for tokens in expected for _ in range(3)
    ]
    assert sum(cached for _, cached in found.values()) > 12 * 60


@pytest.mark.parametrize("call", [
    {"inputs": {"input_ids": ids_of(60).expand(2, -1)}}, {"inputs": ids_of(60), "penalty_alpha": 0.5, "top_k": 3},
    {"inputs": ids_of(60), "output_hidden_states": True}, {"inputs": ids_of(60), "cache": "none"},
    {"inputs": ids_of(60), "guidance_scale": 2.0}, {"inputs": ids_of(20)},
])  # fmt: skip
def test_calls_that_read_all(call):
    generator = generator_of()
    for _ in range(2):
        out = generator.generate(**call, max_new_tokens=NEW)
        assert out.stats.cached_tokens == 0
    assert stored(generator) == []


def test_a_live_cache_is_the_callers():
    generator = generator_of()
    out = generator.generate(ids_of(60), max_new_tokens=NEW)
    more = generator.generate(joined(out.sequences, ids_of(4, 1)), cache=out.cache, max_new_tokens=NEW)
    assert more.stats.cached_tokens == 65
    assert [len(entry.ids) for entry in stored(generator)] == [65]


def test_what_is_stored_goes_when_memory_is_out(monkeypatch):
    generator = generator_of(on_oom=["release"])
    generator.generate(ids_of(60), max_new_tokens=NEW)
    forward, calls = generator.model.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return forward(*args, **kwargs)

    failing.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(generator.model, "forward", failing)
    out = generator.generate(ids_of(60, 1), max_new_tokens=NEW)
    assert [one.name for one in out.stats.fallbacks] == ["release"]
    assert [entry.ids[:60] for entry in stored(generator)] == [tuple(ids_of(60, 1)[0].tolist())]


def test_wrong_options():
    with pytest.raises(ConfigError, match="prefix_store_bytes"):
        engine.EngineConfig(prefix_store_bytes=0)
    with pytest.raises(ConfigError, match="prefix_store_folder is for what has no room"):
        engine.EngineConfig(prefix_store_folder="prefixes")


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for so many bytes, which is full otherwise."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)], capture_output=True)
    if not os.path.ismount(tmp_path):
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(folder):
    with suppress(OSError), open(folder / "others", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_full_disk_costs_no_text(small_disk, caplog):
    """What is in memory stays within its limit; once there is room, files are written again."""
    texts = [ids_of(100, seed) for seed in range(6)]
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(small_disk))
    plain = engine.Generator(generator.model)

    def check(text):
        assert generator.generate(text, max_new_tokens=NEW).tokens == plain.generate(text, max_new_tokens=NEW).tokens
        assert generator.pools["prefix_bytes"] <= 70_000

    fill(small_disk)
    for text in texts[:4]:
        check(text)
    assert generator.prefix_failures >= 3
    [said] = [one.message for one in caplog.records if "cannot be written" in one.message]
    assert "No space left" in said or "bytes are needed" in said
    os.unlink(small_disk / "others")
    for text in texts:
        check(text)
    assert list(small_disk.rglob("*.json"))
    assert not list(small_disk.rglob(".*"))
    caplog.clear()
    fill(small_disk)
    for seed in range(10, 13):
        check(ids_of(100, seed))
    assert len([one for one in caplog.records if "cannot be written" in one.message]) == 1


ERRORS = [OSError(errno.ENOSPC, "no space"), SafetensorError("I/O error"), RuntimeError("anything: canary")]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {str(error)[:12]}")
@pytest.mark.parametrize("place", ["caches.Cache.save", "engine.reuse.prefix_files.write_atomically",
                                   "engine.reuse.prefix_files.load", "engine.reuse.prefix_store.branch"])  # fmt: skip
def test_an_error_of_the_store_costs_no_text(place, error, tmp_path, monkeypatch, caplog):
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(tmp_path))
    texts = [ids_of(100, seed) for seed in range(3)]
    expected = [generator.generate(text, max_new_tokens=NEW).tokens for text in texts]
    before, remaining = generator.prefix_failures, [ids_of(100, seed) for seed in range(5, 8)]
    assert before == 0
    wanted = [engine.Generator(generator.model).generate(text, max_new_tokens=NEW).tokens for text in remaining]

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        for text, tokens in zip([*texts, *remaining], [*expected, *wanted], strict=True):
            assert generator.generate(text, max_new_tokens=NEW).tokens == tokens
            assert generator.pools["prefix_bytes"] <= 70_000
    assert generator.prefix_failures > 0 or place.endswith("load")
    assert "canary" not in caplog.text
    for text, tokens in zip(texts, expected, strict=True):
        assert generator.generate(text, max_new_tokens=NEW).tokens == tokens
    assert generator.generate(texts[-1], max_new_tokens=NEW).stats.cached_tokens == 99
    assert len(list(tmp_path.rglob("*.json"))) == len(list(tmp_path.rglob("*.safetensors"))) > 0


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    generator = generator_of(store_bytes=70_000, prefix_store_folder=str(tmp_path / "stored"))
    for seed in range(3):
        generator.generate(ids_of(100, seed), max_new_tokens=NEW)
    shutil.rmtree(tmp_path / "stored")
    for seed in range(3):
        generator.generate(ids_of(100, seed), max_new_tokens=NEW)
    assert list(tmp_path.rglob("*.safetensors"))


def test_partial_files_of_a_process_that_was_killed_go(tmp_path):
    folder = {"prefix_store_folder": str(tmp_path)}
    generator = generator_of(**folder)
    generator.generate(ids_of(100), max_new_tokens=NEW)
    generator.release()
    [own] = tmp_path.iterdir()
    for name, age in ((".old.safetensors-12", 3600), (".tmpNew", 1)):
        (own / name).write_bytes(b"part")
        os.utime(own / name, (time.time() - age,) * 2)
    assert generator_of(**folder).generate(ids_of(100), max_new_tokens=NEW).stats.cached_tokens == 99
    assert [one.name for one in own.glob(".*")] == [".tmpNew"]
