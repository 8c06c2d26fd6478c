"""What a run does when memory is out: the fallbacks one by one, in the order that was asked for."""

import logging

import pytest
import torch
from architectures import tiny_model
from fallbacks import NEW, OOM, OutAt, expected, prompt, run, same

import caches
import engine
from caches.protocol import capabilities
from caches.transfer.split_rows import halves
from configs import EngineConfig
from engine import run_builder
from engine.decoding.forward_executor import ForwardExecutor
from engine.memory import fallbacks
from engine.memory.peak_memory import PeakMemory


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("error", OOM.values(), ids=OOM)
@pytest.mark.parametrize("forward", [0, 1, 4, NEW - 1])
@pytest.mark.parametrize("fallback", ["release", "offload", "split"])
def test_every_rung_by_itself_gives_the_undisturbed_text(fallback, forward, error):
    assert same(run([forward], [fallback], error), expected()) == [fallback]


def test_the_prompt_is_read_in_ever_smaller_pieces():
    out = run([0, 1], ["chunk"])
    assert same(out, expected()) == ["chunk", "chunk"]
    assert "pieces of 10 tokens" in out.stats.fallbacks[0].what
    assert "pieces of 8 tokens" in out.stats.fallbacks[1].what


def test_the_rungs_are_climbed_in_the_order_that_was_asked_for(caplog):
    with caplog.at_level(logging.WARNING, logger="engine"):
        out = run([0, 1, 2, 3, 8], ["offload", "chunk", "release", "split"])
    assert same(out, expected()) == ["offload", "chunk", "chunk", "release", "split"]
    assert sum("out of memory" in record.message for record in caplog.records) == 5
    assert out.stats.cache == "offloaded"
    assert out.cache.bytes_by_place["disk"] == expected().stats.cache_bytes
    assert out.stats.fallbacks[4].bytes_before <= expected().stats.cache_bytes / 2  # two of four layers


@pytest.mark.parametrize("cache", ["dynamic", "static", "none", "quantized"])
@pytest.mark.parametrize("options", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_searches_and_samples_go_on_with_the_same_rows(cache, options):
    torch.manual_seed(5)
    reference = expected(cache=cache, **options)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    same(run([0, 3, 5], EngineConfig().on_oom, cache=cache, **options), reference)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_generated_comes_back_when_no_rung_is_left():
    reference = expected()
    with pytest.raises(engine.OutOfMemoryError, match=r"after 3 new tokens.*release.*split") as raised:
        run(range(3, 12), EngineConfig().on_oom)
    partial = raised.value.partial
    assert [len(row) for row in partial.tokens] == [3] * 3
    assert torch.equal(partial.sequences, reference.sequences[:, : partial.sequences.shape[1]])
    assert [fallback.name for fallback in partial.stats.fallbacks] == ["release", "offload", "split", "split"]
    rest = engine.generate(tiny_model("llama"), partial.sequences, cache=partial.cache, max_new_tokens=NEW - 3)
    assert torch.equal(rest.sequences, reference.sequences)


ON_DISK = {"cache_config": {"residency": "disk"}}
OUT_OF_WAY = 30  # failures: more than any run of these has fallbacks


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ("offloaded", ON_DISK),
        ("offloaded_quantized", ON_DISK),
        ("dynamic", {}),
        ("none", {}),
        ("sink", {"cache_config": {"window_length": 32}}),
    ],
)
@pytest.mark.parametrize("on_oom", [EngineConfig().on_oom, ("offload", "chunk"), ("quantize", "split", "chunk")])
def test_a_run_ends_where_nothing_helps(cache, options, on_oom):
    """A cache that is on disk already is not moved, so nothing begins anew."""
    model, out = tiny_model("llama"), OutAt(tiny_model("llama"), range(OUT_OF_WAY))
    with out, pytest.raises(engine.OutOfMemoryError) as raised:
        engine.generate(model, prompt(), max_new_tokens=NEW, on_oom=on_oom, cache=cache, **options)
    assert out.raised == len(raised.value.partial.stats.fallbacks) + 1 < OUT_OF_WAY


@pytest.mark.parametrize("name", ["offloaded", "offloaded_quantized"])
def test_an_empty_cache_is_on_disk_too(name):
    """It has no bytes there yet, and to move it would change nothing."""
    on_oom = ["offload"] if name == "offloaded" else ["offload", "quantize"]
    model, out = tiny_model("llama"), OutAt(tiny_model("llama"), [0])
    with out, pytest.raises(engine.OutOfMemoryError) as raised:
        engine.generate(model, prompt(), max_new_tokens=NEW, on_oom=on_oom, cache=name, **ON_DISK)
    assert raised.value.partial.stats.fallbacks == ()


def test_what_is_done_again_at_one_place_is_no_progress(monkeypatch):
    """Whatever a fallback says that it has done."""
    monkeypatch.setitem(fallbacks._APPLY, "chunk", lambda session: "the prompt is read on in pieces of 9 tokens")
    model, out = tiny_model("llama"), OutAt(tiny_model("llama"), range(OUT_OF_WAY))
    with out, pytest.raises(engine.OutOfMemoryError, match=r"chunk \(.* 9 tokens, as before") as raised:
        engine.generate(model, prompt(), max_new_tokens=NEW, on_oom=["chunk", "offload"])
    # After the cache has moved a step may have room that had none before.
    assert [one.name for one in raised.value.partial.stats.fallbacks] == ["chunk", "offload", "chunk"]
    assert out.raised == 4
    with OutAt(model, [0, 3]) as out:  # at another place it is another one
        assert len(engine.generate(model, prompt(), max_new_tokens=NEW, on_oom=["chunk"]).stats.fallbacks) == 2


def test_an_empty_ladder_gives_up_at_once():
    with pytest.raises(engine.OutOfMemoryError, match="on_oom allows no way to go on") as raised:
        run([2], [])
    assert raised.value.partial.stats.fallbacks == ()


@pytest.mark.parametrize("place", ["reader_now", "read_parameters", "read_cache_choice"])
def test_memory_that_is_out_before_a_call_is_read_is_told_too(place, monkeypatch):
    def out(*args):
        raise OOM["cpu"]()

    monkeypatch.setattr(run_builder, place, out)
    with pytest.raises(engine.OutOfMemoryError, match=r"while the run was prepared.*can't allocate") as raised:
        run([], EngineConfig().on_oom)
    assert raised.value.partial.tokens == [[]]
    with pytest.raises(engine.OutOfMemoryError):
        next(engine.Generator(tiny_model("llama")).generate_many([prompt(1)])).result()


def test_rows_of_one_prompt_stay_together():
    out = run([2, 3], ["split"], num_beams=2)
    assert "2 parts" in out.stats.fallbacks[0].what
    assert same(out, expected(num_beams=2)) == ["split", "split"]


def test_a_cache_that_cannot_be_moved_stays_where_it_is():
    with pytest.raises(engine.OutOfMemoryError, match=r"could not be taken: offload .*imposes a window"):
        run([2], ["offload"], cache="sink", cache_config={"window_length": 32})


@pytest.mark.parametrize(
    ("fallbacks", "message"), [("offload", "a list of fallbacks"), (["swap"], "swap"), (["split", "split"], "twice")]
)
def test_what_is_no_ladder_is_refused(fallbacks, message):
    with pytest.raises(engine.ConfigError, match=message):
        engine.generate(tiny_model("llama"), prompt(), on_oom=fallbacks)
    with pytest.raises(engine.ConfigError, match="on_oom"):
        EngineConfig(on_oom=fallbacks)


def test_a_live_cache_goes_on_as_another():
    model, first = tiny_model("llama"), prompt(rows=1)
    live = caches.build("dynamic", model.config)
    with OutAt(model, [2]):
        out = engine.generate(model, first, cache=live, max_new_tokens=NEW, on_oom=["offload"])
    assert out.cache is not live
    assert out.cache.name == "offloaded"
    assert torch.equal(out.sequences, engine.generate(model, first, max_new_tokens=NEW).sequences)


def test_pieces_are_not_made_ever_smaller_where_something_else_may_help():
    inputs = prompt(rows=1, columns=200)
    out = run(range(4), ["chunk", "offload"], inputs=inputs)
    assert same(out, expected(inputs)) == ["chunk", "chunk", "offload", "chunk"]


def test_scratch_memory_is_dropped(monkeypatch):
    model = tiny_model("llama")
    cache = caches.build("offloaded", model.config)
    held, release = [], ForwardExecutor.release

    def watched(executor):
        held.append(sum(tensor.nbytes for tensor in cache.scratch.tensors()))
        release(executor)
        held.append(sum(tensor.nbytes for tensor in cache.scratch.tensors()))

    monkeypatch.setattr(ForwardExecutor, "release", watched)
    whole = engine.generate(model, prompt(), max_new_tokens=8)
    with OutAt(model, [4]):
        out = engine.generate(model, prompt(), cache=cache, max_new_tokens=8, on_oom=["release"])
    assert held[0] > 0
    assert held[1] == 0
    assert torch.equal(out.sequences, whole.sequences)


# Rows that are computed part after part.


@pytest.mark.parametrize("backend", ["dynamic", "static"])
def test_splitting_takes_about_a_layer(backend):
    """And what the caller holds is emptied on the way."""
    model = tiny_model("llama")
    options = {"max_cache_len": 128} if backend == "static" else {}
    cache = caches.build(backend, model.config, **options)
    with PeakMemory(model) as live, torch.no_grad():
        model(torch.randint(3, 90, (8, 100)), past_key_values=cache)
        cache.crop(0)
        before, layers, peaks = cache.bytes, len(cache.layers), []
        split: caches.EngineCache | None = cache
        for _ in range(3):
            live.most = start = live._now
            split = halves(split, torch.arange(8))
            peaks.append(live.most - start)
    assert len(split.parts) == 8
    assert cache.bytes == 0
    assert max(peaks) <= 1.5 * before / layers
    assert split.bytes <= before


def test_parts_say_that_their_keys_are_codes():
    """Then prompts are not read in smaller chunks, which would read the codes of the chunks before."""
    model = tiny_model("llama")
    for backend, is_quantized in (("dynamic", False), ("quantized", True)):
        cache = caches.build(backend, model.config)
        with torch.no_grad():
            model(torch.randint(3, 90, (4, 100)), past_key_values=cache)
        cache.crop(0)
        assert capabilities(halves(cache, torch.arange(4))).is_quantized == is_quantized
