"""What a plan says, beside what a run then takes."""

from __future__ import annotations

import copy
import functools
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import tiny_model
from encoder_decoders import tiny_encoder_decoder
from limits import Limit, in_a_fork
from places import SUPPORT
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RecurrentGemmaConfig,
)

import caches
import engine
import engine.request.request
from engine.memory import plan
from engine.memory.cache_choice import new_cache
from engine.memory.dry_run import DryRun
from engine.memory.free_memory import Free, find_free
from engine.memory.model_footprint import _Inspection, inspect_model
from engine.memory.peak_memory import FusedAttention, PeakMemory
from engine.memory.plan import cache_bytes, read_planned_model, usable_caches
from engine.memory.plan_table import BackendPlan
from engine.memory.planner import Planner, choose
from engine.request.run_shape import RunShape
from engine.tables import megabytes

PROMPT, NEW = 40, 20
KINDS = ["llama", "mistral", "gemma2", "mamba2", "bamba", "t5", "bloom"]
MORE_KINDS = ["llama4_text", "deepseek_v3", "deepseek_v32", "falcon_h1", "lfm2", "gemma3n_text"]
RUNS = {
    "1 row": (1, {}),
    "3 rows": (3, {}),
    "beams": (2, {"num_beams": 3}),
    "samples": (2, {"do_sample": True, "num_return_sequences": 4}),
}


CONFIG = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip


def model_of(kind):
    return tiny_encoder_decoder(kind) if kind == "t5" else tiny_model(kind)


def windowed(kind, window, layers="sf"):
    """A model whose layers have a window ("s") or none ("f"); of mistral all have one."""
    sizes = dict(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=16384, eos_token_id=None, pad_token_id=0, sliding_window=window,
    )  # fmt: skip
    types = [{"s": "sliding_attention", "f": "full_attention"}[layer] for layer in layers.replace(" ", "")]
    config = (
        MistralConfig(**sizes, num_hidden_layers=len(types))
        if kind == "mistral"
        else Gemma3TextConfig(**sizes, num_hidden_layers=len(types), layer_types=types)
    )
    return AutoModelForCausalLM.from_config(config).eval()


def options_of(cache):
    """Small enough to matter in a run of a few tokens."""
    names = caches.recipe(cache).options.option_names()
    options = {"window_length": 40 if "residual_length" in names else 24} if "num_sink_tokens" in names else {}
    return options | ({"residual_length": 8} if "residual_length" in names else {})


class Watched(engine.Generator):
    """Notes the most bytes that the cache of its run had before a step was committed, and where tokens are chosen."""

    def most_bytes(self, prompt_tokens, batch_size, cache, options=None, new=NEW, **parameters):
        def watched(*arguments):
            self.live, self.most = new_cache(*arguments), 0
            commit = self.live.commit

            def note_and_commit(*rejected):
                note()
                commit(*rejected)

            self.live.commit = note_and_commit
            return self.live

        def note():
            self.most = max(self.most, self.live.bytes)

        class Look(LogitsProcessor):
            def __call__(_, ids, scores):
                note()
                return scores

        ids = torch.randint(3, 100, (batch_size, prompt_tokens))
        parameters |= {"cache": cache, "cache_config": options or None, "max_new_tokens": new}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.run_builder.new_cache", watched)
            out = self.generate(ids, logits_processor=[Look()], **parameters)
        return max(self.most, out.stats.cache_bytes)


def planned(model, batch_size, cache, options=None, new=NEW, prompt=PROMPT, chunk=None, **parameters):
    """The plan of one backend, without what else would fit: that takes longer."""
    subject = read_planned_model(model, None, None)
    is_encoder_decoder = subject.footprint.is_encoder_decoder
    branches = parameters.get("num_beams", parameters.get("num_return_sequences", 1))
    run_shape = RunShape(
        1 if is_encoder_decoder else prompt,
        new,
        batch_size,
        branches,
        prompt if is_encoder_decoder else 0,
        chunk,
        subject.has_end,
    )
    config = caches.recipe(cache).options.from_dict(options or {})
    found = Planner(subject, Free(10**12, 10**12, 10**12)).backend(config, run_shape)
    if found.refused is not None:
        pytest.skip(found.refused)
    return found


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("cache", [name for name in caches.names() if name != "none"])
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)])
def test_a_cache_takes_what_was_planned(kind, cache, run):
    batch_size, parameters = RUNS[run]
    model, options = model_of(kind), options_of(cache)
    found = planned(model, batch_size, cache, options, **parameters)
    measured = Watched(model).most_bytes(PROMPT, batch_size, cache, options, **parameters)
    assert found.total_bytes == pytest.approx(measured, rel=0.1)
    assert sum(found.kind_bytes.values()) + found.cache_bytes.get("staging", 0) == found.total_bytes


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("cache", ["dynamic", "offloaded", "quantized", "sink", "sliding_window"])
@pytest.mark.parametrize("chunk", [16, 100])
def test_also_when_the_prompt_is_read_in_pieces(cache, chunk):
    model, options = tiny_model("mistral" if cache == "sliding_window" else "llama"), options_of(cache)
    found = planned(model, 2, cache, options, prompt=150, chunk=chunk)
    generator = Watched(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
    assert found.total_bytes == pytest.approx(generator.most_bytes(150, 2, cache, options), rel=0.1)


@pytest.mark.parametrize(
    "layers",
    ["ssf ssf", "sf sf ss", *(pytest.param(more, marks=pytest.mark.slow) for more in ("sssf sssf s", "ssssssssf ff"))],
)
def test_offloaded_layers_take_turns_in_their_own_order(layers):
    model = windowed("gemma3", 24, layers)
    footprint, generator = read_planned_model(model, None, None).footprint, Watched(model)
    usage = DryRun(footprint, caches.recipe("offloaded").options(), RunShape(300, NEW, 1), pinned=False).usage()
    generator.most_bytes(300, 1, "offloaded")
    assert usage.at("staging") == generator.live.bytes_by_place["staging"]


@pytest.mark.parametrize("cache", ["dynamic", "quantized"])
def test_room_that_is_made_as_tokens_come_is_planned(cache):
    model = LlamaForCausalLM(CONFIG).eval()
    model.generation_config.eos_token_id = None
    known = planned(model, 1, cache, new=300).total_bytes
    model.generation_config.eos_token_id = 10**6  # it may end early, so room is made little by little
    found = planned(model, 1, cache, new=300)
    assert found.total_bytes == pytest.approx(Watched(model).most_bytes(PROMPT, 1, cache, new=300), rel=0.06)
    assert found.total_bytes >= known


def test_room_of_rows_that_share_a_prefix_is_not_made_for_each():
    model = tiny_model("llama")
    alone, beams = (planned(model, 1, "offloaded_static", prompt=200, num_beams=count) for count in (1, 8))
    assert beams.total_bytes <= 2 * alone.total_bytes
    out = engine.generate(model, torch.ones(1, 200, dtype=torch.long), cache="offloaded_static", num_beams=8)
    buffers = [buffer for layer in out.cache.layers for buffer in layer.offloaded_buffers()]
    assert max(buffer.bytes for buffer in buffers) < 2 * 256 * 2 * 16 * 4  # of one row: slots, heads, width, float32


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "kivi", "nbits": 2},
        {"backend": "kivi", "nbits": 8, "q_group_size": 16},
        {"backend": "hqq", "nbits": 3},
        {"backend": "fp8"},
        {"nbits": 2, "residual_length": 30},
        {"backend": "quanto", "nbits_value": 2, "rotate": False},
        {"residency": "host"},
        {"residency": "disk"},
    ],
    ids=str,
)
def test_options_of_a_codec_count(options):
    model, options = tiny_model("llama"), {"residual_length": 8} | options
    found = planned(model, 2, "quantized", options, prompt=120)
    assert found.total_bytes == pytest.approx(Watched(model).most_bytes(120, 2, "quantized", options), rel=0.1)
    assert options.get("residency", "device") in found.cache_bytes


def test_bytes_for_a_budget():
    model = tiny_model("llama")
    out = engine.generate(model, torch.ones(3, 63, dtype=torch.long), cache="offloaded", max_new_tokens=2)
    assert cache_bytes(model.config, "offloaded", rows=3, tokens=64) == out.cache.bytes_by_place
    halved = cache_bytes(model.config, "offloaded", rows=3, tokens=64, dtype=torch.bfloat16)
    assert 2 * sum(halved.values()) == out.stats.cache_bytes
    pinned = cache_bytes(model.config, "offloaded", rows=3, tokens=64, device_type="cuda")
    assert pinned["host"] == out.cache.bytes_by_place["host"] // 3 * 4  # torch rounds up to a power of two
    assert cache_bytes(model.config, "dynamic", tokens=1)["device"] > 0


# The whole plan.


def test_weights_are_counted_without_loading_them():
    model = tiny_model("llama")
    loaded = engine.plan(model, cache="dynamic", prompt_tokens=PROMPT, max_new_tokens=NEW)
    bare = engine.plan(model.config, cache="dynamic", prompt_tokens=PROMPT, max_new_tokens=NEW, device="cpu")
    tensors = [*model.parameters(), *model.buffers()]
    assert loaded.weight_bytes == bare.weight_bytes == sum(tensor.nbytes for tensor in tensors)
    assert (loaded.weights_are_loaded, bare.weights_are_loaded) == (True, False)
    needs = [plan["dynamic"].need_bytes["device"] for plan in (loaded, bare)]
    assert needs[1] - needs[0] == bare.weight_bytes
    tied = engine.plan(CONFIG, cache="none", prompt_tokens=8, max_new_tokens=8)
    untied = copy.deepcopy(CONFIG)
    untied.tie_word_embeddings = False
    more = engine.plan(untied, cache="none", prompt_tokens=8, max_new_tokens=8).weight_bytes - tied.weight_bytes
    assert more == 1000 * 64 * 4
    halved = engine.plan(CONFIG, cache="none", prompt_tokens=8, max_new_tokens=8, dtype="bfloat16")
    assert halved.weight_bytes == pytest.approx(tied.weight_bytes / 2, rel=0.01)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "mamba2", "mixtral", "t5"])
def test_weights_in_few_bits_are_counted_without_making_them(kind, weights):
    model = copy.deepcopy(model_of(kind))
    run = {"cache": "none", "prompt_tokens": 8, "max_new_tokens": 4}
    bare = engine.plan(model.config, **run, device="cpu", weights=weights)
    converted = engine.Generator(model, config=engine.EngineConfig(weights=weights)).model
    assert bare.weight_bytes == engine.plan(converted, **run).weight_bytes
    assert bare.weight_bytes < engine.plan(model.config, **run, device="cpu").weight_bytes


@functools.cache
def plan_of_all(free_bytes):
    return plan_of(free_bytes)


def plan_of(free_bytes, **arguments):
    return engine.plan(CONFIG, prompt_tokens=500, max_new_tokens=100, free_bytes=free_bytes, device="cpu", **arguments)


def test_what_is_found_to_fit_fits_and_more_does_not():
    need = plan_of(10**12, cache="dynamic")["dynamic"].need_bytes["device"]
    found = plan_of(2 * need, cache="dynamic")["dynamic"]
    assert found.fits
    assert 600 < found.longest_context < 4097
    assert found.largest_batch >= 1
    for change in (1, 1.03):
        tokens, rows = int(change * (found.longest_context - 100)), int(change * found.largest_batch + (change > 1))
        for arguments in ({"prompt_tokens": tokens}, {"prompt_tokens": 500, "batch_size": rows}):
            again = engine.plan(
                CONFIG, cache="dynamic", max_new_tokens=100, free_bytes=2 * need, device="cpu", **arguments
            )
            assert again["dynamic"].fits == (change == 1)
    assert plan_of(10**12, cache="dynamic")["dynamic"].longest_context == 4097  # the last token needs no position
    nothing = plan_of(1000, cache="dynamic")["dynamic"]
    assert (nothing.fits, nothing.longest_context, nothing.largest_batch) == (False, 0, 0)


def test_the_choice_is_the_first_that_loses_nothing_and_fits():
    plenty = plan_of_all(10**12)
    assert plenty.choice == "dynamic"
    assert [backend.cache for backend in plenty.backends] == [*caches.names(), "offloaded"]
    dynamic, away = plenty["dynamic"].need_bytes, plenty["offloaded, residency=disk"].need_bytes
    assert away["disk"] == plenty["dynamic"].cache_bytes["device"]
    gaps = plenty["dynamic"].gap_bytes
    tight = plan_of(int(1.1 * (gaps + dynamic["device"])) - 1000)
    assert tight.choice == "offloaded, residency=disk"
    assert f"dynamic would need {megabytes(dynamic['device'])} of" in tight.why
    assert tight["quantized"].fits  # it fits too, but is never chosen: it loses something
    none = plan_of_all(1000)
    assert none.choice == "offloaded, residency=disk"
    assert "no cache that loses nothing fits" in none.why


def test_a_refused_backend_says_why():
    found = plan_of_all(10**12)
    for name in ("hybrid", "mamba", "sink", "encoder_decoder"):
        with pytest.raises((caches.CacheError, engine.ConfigError)) as refused:
            engine.generate(tiny_model("llama"), torch.ones(1, 3, dtype=torch.long), cache=name)
        assert found[name].refused == str(refused.value)
    far = engine.plan(CONFIG, cache="dynamic", prompt_tokens=4000, max_new_tokens=200)["dynamic"]
    assert "need 4,199 positions, but the model has 4,096" in far.refused
    window = {"window_length": 64}
    assert engine.plan(CONFIG, cache="sink", cache_config=window, prompt_tokens=4000, max_new_tokens=200)["sink"].fits
    small = {"max_cache_len": 64}
    full = engine.plan(CONFIG, cache="static", cache_config=small, prompt_tokens=60, max_new_tokens=9).backends[0]
    assert "holds at most 64 tokens, but 60 prompt tokens and 9 new ones need 68" in full.refused


def test_where_nothing_is_free_nothing_fits(cli):
    found = engine.plan(CONFIG, prompt_tokens=8, max_new_tokens=4, cache="dynamic", free_bytes=0)
    assert (found.free_bytes["device"], found["dynamic"].fits, found["dynamic"].longest_context) == (0, False, 0)
    told = json.loads(cli(["plan", "--cache", "dynamic", "--free-gib", "0", "--json"]).stdout)
    assert (told["free_bytes"]["device"], told["backends"][0]["fits"]) == (0, False)


def test_a_plan_holds_its_backends():
    found = plan_of_all(10**12)
    assert list(found) == list(found.backends)
    assert "dynamic" in found
    assert all(backend.title in found and backend.cache in found for backend in found)
    assert "dynamik" not in found
    assert 0 not in found


def test_a_plan_is_a_table_and_json():
    found = plan_of(10**12, batch_size=2, num_beams=3)
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["rows"], data["choice"]) == (6, "dynamic")
    assert data["backends"][0]["need_bytes"] == found["dynamic"].need_bytes
    shown = str(found)
    assert all(name in shown for name in (*caches.names(), "full attention", "in 6 rows", "Choice: dynamic"))
    assert "Not for this model, or with an option that has to be given: " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0, but a plan is for a whole number, 1 or more"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"free_bytes": -1}, "free_bytes=-1, but a plan is for a whole number, 0 or more"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"num_beams": 2, "num_return_sequences": 3}, "3 texts cannot come from num_beams=2"),
        ({"cache": "dynamik"}, "did you mean 'dynamic'"),
        ({"cache_config": {"nbits": 2}}, "none was named"),
        ({"cache": "quantized", "cache_config": {"nbits": 5}}, "does not support 5 bits"),
        ({"dtype": "float33"}, "no data type of torch"),
        ({"device": "toaster"}, "no device of torch"),
        ({"weights": "int5"}, "one of file, full, int8, int4"),
        ({"weights": "int4", "device": "cuda"}, "products of that kind are for CPUs, and this plan is for cuda"),
    ],
    ids=str,
)
def test_impossible_plans_are_refused(arguments, message, monkeypatch):
    monkeypatch.setattr(plan, "inspect_model", lambda *_: pytest.fail("work was done"))
    arguments = {"prompt_tokens": 10, "max_new_tokens": 10} | arguments
    with pytest.raises((engine.EngineError, caches.CacheError), match=message):
        engine.plan(CONFIG, **arguments)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(engine.InputError, match=r"has no config\.json"):
        engine.plan(tmp_path, prompt_tokens=10, max_new_tokens=10)
    with pytest.raises(engine.OptionError, match=r"this one is: in torch\.float32 on cpu"):
        engine.plan(tiny_model("llama"), prompt_tokens=10, max_new_tokens=10, dtype="bfloat16")
    with pytest.raises(engine.OptionError, match="weights say how a model would be loaded"):
        engine.plan(tiny_model("llama"), prompt_tokens=10, max_new_tokens=10, weights="int4")


# Free memory.


def test_limits_of_the_process_count():
    """A file on a disk is mapped, so a limit of addresses is one of what can be kept there."""

    def free():
        found = find_free(torch.device("cpu"))
        return {"host": found.host, "disk": found.disk}

    without, of_data, of_addresses = (
        in_a_fork(free, limit) for limit in (None, Limit("VmData", 2**29), Limit("VmSize", 2**29))
    )
    assert 0 < of_data["host"] <= 2**29 < without["host"]
    assert 0 < of_addresses["host"] <= 2**29
    assert of_data["disk"] > 2**32 or of_data["disk"] == pytest.approx(without["disk"], rel=0.1)
    assert of_addresses["disk"] == of_addresses["host"]


def test_limits_of_control_groups_count(tmp_path, monkeypatch):
    from engine.memory import free_memory

    before = find_free(torch.device("cpu")).host
    [path] = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()][-1:]
    for name, value in {"memory.max": 5000, "memory.current": 4000, "memory.stat": "anon 1\ninactive_file 500"}.items():
        folder = tmp_path / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(str(value))
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    assert find_free(torch.device("cpu")).host == 1500 < before


# cache="auto".


@pytest.fixture
def free(monkeypatch):
    def set_free(device):
        monkeypatch.setattr(plan, "find_free", lambda *_: Free(device, device, 10**12))

    return set_free


def auto(caplog, **arguments):
    config = engine.EngineConfig(**({"cache": "auto"} | arguments))
    with caplog.at_level(logging.WARNING, "engine"):
        out = engine.Generator(tiny_model("llama"), config=config).generate(torch.ones(2, 30, dtype=torch.long))
    return out.cache, caplog.text


def test_auto_takes_what_fits(caplog, free):
    run_shape = RunShape(30, 20, prompts=2)
    need = [one.need_bytes["device"] + one.gap_bytes for one in needs(tiny_model("llama"), run_shape)]
    free(10**12)
    assert auto(caplog)[0].name == "dynamic"
    assert auto(caplog, compile="eager")[0].name == "static"
    free(int(1.1 * sum(need) / 2))
    cache, log = auto(caplog)
    assert (cache.name, log) == ("offloaded", "")
    assert set(cache.bytes_by_place) == {"device", "disk", "staging"}
    free(10)
    cache, log = auto(caplog)
    assert cache.name == "offloaded"
    assert "no cache that loses nothing fits" in log
    assert "of 0.0 MB free" in log


def needs(model, run_shape):
    subject = read_planned_model(model, None, None)
    planner = Planner(subject, Free(1, 1, 1))
    return [planner.backend(config, run_shape) for config in plan.lossless(subject.device)]


@pytest.mark.parametrize("cache", ["static", "quantized", "sliding_window"])
def test_a_named_cache_is_described_without_a_claim(cache):
    options = {"window_length": 64} if cache == "sliding_window" else {}
    found = plan_of(10**8, cache=cache, cache_config=options)
    changes = found[cache].changes_text
    assert (changes is None) == (cache == "static")
    loss = f"; it can change the text: {changes}" if changes else ""
    assert found.why == f"it fits: it needs {megabytes(found[cache].need_bytes['device'])} of 100.0 MB free{loss}"
    assert f"Choice: {found.choice}; it fits: it needs" in str(found)
    assert plan_of(1000, cache=cache, cache_config=options).why.startswith("it does not fit: it needs ")


def test_parts_of_an_encoder_decoder_cache_change_the_text():
    part = BackendPlan(
        "encoder_decoder",
        {"self_cache": "quantized"},
        need_bytes={"device": 5, "disk": 10**6},
        fits=True,
        changes_text=caches.recipe("quantized").options().changes_text,
    )
    assert choose([part], Free(10**6, 1, None), is_named=True)[1] == (
        "it fits: it needs 0.0 MB of 1.0 MB free (device), 1.0 MB (disk); it can change the text: "
        + str(part.changes_text)
    )


def test_a_model_that_takes_no_cache_runs_without():
    config = OpenAIGPTConfig(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model, ids = OpenAIGPTLMHeadModel(config).eval(), torch.arange(3, 11)[None]
    plan = engine.plan(model, prompt_tokens=8, max_new_tokens=5)
    assert plan.choice == plan["none"].title == "none"
    assert plan.why.startswith("it loses nothing and fits: it needs ")
    assert plan["dynamic"].refused is not None
    out = engine.generate(model, ids, cache="auto", max_new_tokens=5)
    assert out.stats.cache == "none"
    assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=5, do_sample=False))


def test_a_model_whose_own_code_fails_on_the_meta_device_cannot_be_planned():
    model, ids = tiny_model("prophetnet"), torch.arange(3, 9)[None]
    with pytest.raises(engine.InputError, match="ends with AssertionError: At the moment"):
        engine.plan(model, prompt_tokens=6, max_new_tokens=3)
    expected = engine.generate(model, ids, max_new_tokens=3).tokens
    assert engine.generate(model, ids, max_new_tokens=3, cache="auto").tokens == expected
    limited = engine.Generator(model, config=engine.EngineConfig(max_cache_bytes=10**7))
    assert limited.generate(ids, max_new_tokens=3).tokens == expected
    [request] = engine.generate_many(model, ids.tolist(), max_new_tokens=3)
    assert request.result().tokens == expected


@pytest.mark.parametrize("error", [caches.UnsupportedLayerError("no layer"), MemoryError("no memory")], ids=repr)
def test_other_errors_of_an_inspection_pass(error, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr(_Inspection, "footprint", fails)
    with pytest.raises(type(error), match=str(error)):
        inspect_model(LlamaConfig(**CONFIG.to_dict() | {"vocab_size": 77}))


def test_auto_gives_the_same_text_and_is_no_backend():
    model, ids = tiny_model("llama"), torch.ones(1, 9, dtype=torch.long)
    expected = engine.generate(model, ids).sequences
    assert torch.equal(engine.generate(model, ids, cache="auto").sequences, expected)
    assert torch.equal(engine.generate(model, ids, cache_implementation="auto", num_beams=2).sequences[:, :9], ids)
    assert engine.generate(tiny_encoder_decoder("t5"), ids, cache="auto").stats.cache == "dynamic"
    with pytest.raises(caches.UnknownCacheError, match="did you mean 'auto'"):
        engine.generate(model, ids, cache="autoo")
    with pytest.raises(engine.OptionError, match="leave it out"):
        engine.generate(model, ids, cache="auto", cache_config={"max_batch_size": 2})
    assert "auto" not in caches.names()


def test_what_is_free_may_be_unknown():
    found = BackendPlan("dynamic", need_bytes={"device": 5})
    assert choose([found], Free(None, None, None))[1] == (
        "it loses nothing and may fit, how much is free is unknown: it needs 0.0 MB"
    )
    assert choose([BackendPlan("dynamic", refused="no")], Free(1, 1, 1))[0] is None


# What a forward works with.


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_copies_of_scores_are_those_of_the_run(num_beams, do_sample, monkeypatch):
    model, found = tiny_model("llama"), []
    count = engine.request.request.score_copies
    monkeypatch.setattr("engine.request.request.score_copies", lambda *given: found.append(count(*given)) or found[-1])
    engine.generate(model, torch.full((1, 4), 5), num_beams=num_beams, do_sample=do_sample, max_new_tokens=1)
    assert set(found) == {plan._score_copies(num_beams, 1, do_sample)}


def test_scores_are_counted_where_attention_makes_them():
    config = copy.deepcopy(CONFIG)
    assert inspect_model(config).working.plain.pair == 0
    config._attn_implementation = "eager"
    assert 4 * 4 <= inspect_model(config).working.plain.pair < 4 * 4 * 4  # of four heads, in float32
    # Gate, up and their product, and four times the hidden states.
    assert inspect_model(CONFIG).working.plain.token == pytest.approx((3 * 128 + 4 * 64) * 4, rel=0.15)
    # Keys and values repeated for the queries that share them, and a mask of 16 tokens, as bools and as numbers.
    assert inspect_model(CONFIG).working.column == pytest.approx(2 * 64 * 4 + 16 * (1 + 4), rel=0.15)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "mamba2"])
def test_working_memory_is_that_of_longer_steps(kind):
    config = copy.deepcopy(CONFIG if kind != "mamba2" else tiny_model(kind).config)
    if kind == "mamba2":
        config.chunk_size = 256  # tokens that are computed together: a shorter step takes as much
    else:
        config._attn_implementation = kind
    found, ids = inspect_model(config), torch.zeros(3, 3000, dtype=torch.long, device="meta")
    with torch.no_grad(), PeakMemory(found.model) as memory, FusedAttention():
        found.model(ids, use_cache=False, logits_to_keep=1)
    assert found.working.of_step(3, 3000, 3000) == pytest.approx(memory.most, rel=0.2)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("chunk", [None, 300])
@pytest.mark.parametrize("window", [100, 512, 1500])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_masks_of_windows_are_planned(kind, window, chunk):
    model, ids = windowed(kind, window), torch.full((1, 2500), 5)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="default", prefill_chunk_tokens=chunk))
    for count in (2500, min(window - 1, 280)):
        with PeakMemory(model) as memory:
            generator.generate(ids[:, :count], max_new_tokens=2)
        found = planned(model, 1, "dynamic", new=2, prompt=count, chunk=chunk)
        said = found.total_bytes + found.working_bytes
        assert said == pytest.approx(memory.most, rel=0.2 if chunk else 0.1)


def test_steps_that_are_computed_token_by_token_are_short(monkeypatch):
    """RecurrentGemma has windows too: steps of 131072 tokens were measured for their masks, which took hours."""
    config = RecurrentGemmaConfig(
        num_hidden_layers=3, vocab_size=100, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=1, attention_window_size=16,
    )  # fmt: skip
    monkeypatch.setattr("engine.memory.model_footprint._VERY_LONG_STEP", 64)
    assert inspect_model(config).working.masked is None


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "prompt", "chunk"), [("dynamic", 1024, 0), ("quantized", 2048, 512)])
def test_the_whole_process_takes_what_was_planned(cache, prompt, chunk):
    script = SUPPORT / "peak.py"
    command = [sys.executable, script, "small", cache, str(prompt), str(chunk)]
    said, measured = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    print(f"{cache}, {prompt} tokens: {said:,} planned, {measured:,} measured")
    assert said == pytest.approx(measured, rel=0.2)


def test_the_command(cli, tmp_path):
    CONFIG.save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--prompt-tokens", "100", "--batch-size", "3", "--json", "--free-gib", "1"]
    data = json.loads(cli([*arguments, "--cache", "quantized", "--cache-option", "nbits=2"]).stdout)
    found = engine.plan(
        CONFIG, cache="quantized", cache_config={"nbits": 2}, prompt_tokens=100, max_new_tokens=20, batch_size=3,
        free_bytes=2**30,
    )  # fmt: skip
    assert data["backends"] == json.loads(json.dumps(found.to_dict()))["backends"]
    assert data["free_bytes"]["device"] == 2**30
    drawn = json.loads(cli([*arguments, "--cache", "dynamic", "--num-beams", "3", "--sample"]).stdout)
    found = engine.plan(
        CONFIG, cache="dynamic", prompt_tokens=100, max_new_tokens=20, batch_size=3, num_beams=3, do_sample=True
    )
    assert drawn["logits_bytes"] == found.logits_bytes
    assert "quantized" in cli(["plan", "--prompt-tokens", "100", "--cache", "quantized"]).stdout
    done = cli(["plan", str(tmp_path / "nowhere"), "--cache", "dynamic"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "there is no folder" in done.stderr
    done = cli(["generate", "x", "--cache", "auto", "--max-new-tokens", "3", "--json"])
    assert json.loads(done.stdout)["stats"]["cache"] == "dynamic"


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "mamba2", "bamba"])
def test_usable_caches_are_those_that_a_run_takes(kind):
    gen = engine.Generator(tiny_model(kind))
    usable = []
    for name in caches.names():
        try:
            gen.generate([[5, 6, 7]], max_new_tokens=2, cache=name)
            usable.append(name)
        except (caches.CacheError, engine.EngineError):
            pass
    assert usable_caches(gen.model) == usable
