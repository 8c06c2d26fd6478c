"""Two processes that compute one model together: texts, bytes, failures, and what is refused."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ranks
from architectures import randomised, tiny_model
from random_models import tokenizer
from transformers import AutoConfig

import caches
import engine
import strategies
from configs import ConfigError
from engine.parallel.tensor_parallel import part_of

MOST = [cache for cache in caches.names() if cache not in ("sliding_window", "hybrid")]  # these need other layers
CELLS = [f"llama {cache}" for cache in MOST] + ["mistral sliding_window", "gemma2 hybrid"]
REFUSED = ("mamba", "encoder_decoder")  # of models that transformers cannot split


@pytest.mark.slow
def test_ranks_stop_and_fail_together():
    found = ranks.found("apart")
    first, second = found
    for name in [name for name in first if name.startswith("after ")]:
        assert first[name] == second[name] == first["alone"], name
    for name in ("cancellation", "time", "time of a criterion", "time of beams", "samples", "many"):
        assert first[name] == second[name], name
    assert first["cancellation"][:2] == ["GenerationCancelled", 2]
    assert first["time"] == first["time of a criterion"] == [row[:1] for row in first["alone"]]
    assert [len(row) for row in first["time of beams"]] == [1, 1]
    assert len({tuple(row) for row in first["samples"]}) > 1
    assert first["fingerprint"] != second["fingerprint"], "their caches have other heads"
    assert first["many"] == first["many alone"]
    for failing, other, name, message in (
        (first, second, "streamer", "no paper"),
        (second, first, "processor", "no ink"),
        (second, first, "beams", "no ink"),
    ):
        assert failing[name][:2] == other[name][:2] == ["GenerationInterrupted", 2]
        assert message in failing[name][2]
        assert f"rank {found.index(failing)} of 2 has failed" in other[name][2]
    for name in ("option", "option again"):
        assert "num_beams=0" in first[name][2]
        assert "rank 0 of 2 has failed" in second[name][2]
    for name in ("arguments", "length", "backend"):
        assert all("compute different texts" in one[name][2] for one in found)


@pytest.mark.slow
def test_every_strategy_on_every_cache():
    for found in ranks.found("compare", *CELLS):
        assert found["different"] == []
        assert {cell.split()[1] for cell, strategy in found["refused"]} == set(REFUSED)
        assert len(found["refused"]) == len(REFUSED) * len(strategies.names())
        assert found["equal"] == (len(CELLS) - len(REFUSED)) * len(strategies.names())
        shares = {cell: sizes[1] / sizes[0] for cell, sizes in found["bytes"].items() if sizes[0]}
        assert len(shares) == len(CELLS) - len(REFUSED) - 1  # that of no cache has no bytes
        assert max(shares.values()) <= 0.51


@pytest.mark.slow
def test_memory_that_is_out_on_one_rank_changes_no_token():
    for found in ranks.found("memory", "0", "80"):
        assert found["wrong"] == []
        assert found["taken"]["recovered"] > 40
        assert min(found["taken"][name] for name in ("release", "chunk", "offload", "split")) > 2


@pytest.mark.slow
def test_a_batch_of_two_ranks():
    found, other = ranks.found("batched", "0", "4")
    assert found["wrong"] == other["wrong"] == []
    assert found["equal"] > 22
    assert found["cancelled"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("runs", [0, 3])
def test_a_rank_that_dies_ends_the_prompts_of_a_batch(runs):
    found, code = ranks.found("batch_ends", str(runs))
    assert code == -9
    assert not found["alive"]
    assert "another rank of the 2 has ended" in found["failure"]
    assert len(found["errors"]) == runs
    assert "None" not in found["errors"]


@pytest.mark.slow
def test_the_server_of_two_ranks():
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    import httpx

    prompts = [f"def function_{number}(" for number in range(3)]
    gen = engine.Generator(engine.SHIPPED_MODEL)
    expected = [gen.generate(prompt, max_new_tokens=12).text[0] for prompt in prompts]
    with ranks.serving() as (server, url):
        body = {"model": "shipped", "temperature": 0}
        with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor() as pool:
            ask = partial(http.post, "/v1/completions")
            bad = ask(json=body | {"prompt": "x", "regex": "(", "max_tokens": 4})
            assert bad.status_code == 400
            asked = [pool.submit(ask, json=body | {"prompt": one, "max_tokens": 12}) for one in prompts]
            assert [one.result().json()["choices"][0]["text"] for one in asked] == expected
        for rank in server:
            rank.terminate()
        assert [rank.wait(30) for rank in server] in ([0, 0], [-15, 0])


@pytest.mark.slow
def test_ctrl_c_on_one_rank_stops_both_at_the_same_token():
    first, second = ranks.found("interrupted")
    assert first == second
    assert 0 < first < 100


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other():
    (message, seconds, tokens), code = ranks.found("ends")
    assert code == -9
    assert "another rank of the 2 has ended" in message
    assert seconds < 5
    assert tokens == 3  # those before the forward in which it died


def test_heads_that_cannot_be_divided(tmp_path):
    randomised("LlamaConfig", dict(vocab_size=20, hidden_size=24, num_attention_heads=6, num_key_value_heads=3,
                                   num_hidden_layers=1, intermediate_size=8)).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(engine.OptionError, match=r"tp=2 cannot divide the 3 key-value heads of llama: tp=3 can"):
        engine.Generator(tmp_path, tokenizer(), engine.EngineConfig(tp=2))
    with pytest.raises(engine.OptionError, match="3 key-value heads"):
        engine.plan(tmp_path, prompt_tokens=4, max_new_tokens=4, tp=2)


def test_a_model_without_a_plan(tmp_path):
    AutoConfig.for_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(engine.OptionError, match="no plan how to split mamba"):
        engine.plan(tmp_path, prompt_tokens=4, max_new_tokens=4, tp=2)


def test_one_process_for_two_ranks():
    with pytest.raises(engine.OptionError, match=r"tp=2 needs 2 processes, and this is one of 1: .*torchrun"):
        engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(tp=2))


@pytest.mark.parametrize(
    "options",
    [
        {"compile": "auto"},
        {"weights": "int8"},
        {"linears": "onednn"},
        {"device_map": "cpu"},
        {"prefix_store_bytes": 100, "prefix_store_folder": "x"},
    ],
)
def test_options_of_one_process(options):
    with pytest.raises(ConfigError, match="but tp=2"):
        engine.EngineConfig(tp=2, **options)


def test_a_plan_of_one_rank_is_that_of_its_part():
    whole, part = (engine.plan(engine.SHIPPED_MODEL, prompt_tokens=64, max_new_tokens=8, tp=tp) for tp in (1, 2))
    assert part.weight_bytes < 0.52 * whole.weight_bytes
    for one, other in zip(part.backends, whole.backends, strict=True):
        assert one.cache == other.cache
        assert one.cache_bytes == {place: size // 2 for place, size in other.cache_bytes.items()}, one.cache


def plan_of(config, tp):
    return engine.plan(config, prompt_tokens=20, max_new_tokens=4, cache="dynamic", device="cpu", tp=tp)


@pytest.mark.parametrize(("name", "parts"), [
    ("gemma3n_text", 2),  # a list of widths
    ("gemma4_text", 2),  # layers with heads of different widths
    ("gpt_neox", 2),  # queries, keys and values of one layer
    ("olmo2", 1),  # keys that are gathered for their norm
    ("deepseek_v2", 1),  # keys of all heads in one
])  # fmt: skip
def test_the_cache_of_one_rank(name, parts):
    whole, part = (plan_of(tiny_model(name).config, tp) for tp in (1, 2))
    size, part_size = (sum(one["dynamic"].cache_bytes.values()) for one in (whole, part))
    assert part_size * parts == size
    assert part.weight_bytes < 0.9 * whole.weight_bytes
    assert part["dynamic"].working_bytes <= whole["dynamic"].working_bytes


def test_heads_that_no_rank_can_have():
    fused = AutoConfig.for_model("gpt_neox", hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    for config in (fused, tiny_model("deepseek_v2").config):
        with pytest.raises(engine.OptionError, match=r"tp=3 cannot divide the 4 attention heads of .*: tp=2 or 4 can"):
            plan_of(config, 3)
    with pytest.raises(engine.OptionError, match="tp=2 cannot divide the 1 and 2 key-value heads of gemma4_text: no"):
        plan_of(tiny_model("gemma4_text_moe").config, 2)
    assert plan_of(tiny_model("olmo2").config, 3)["dynamic"].cache_bytes, "every rank has all heads"


def test_a_part_of_layers_that_differ():
    part = part_of(tiny_model("gemma3n_text").config, 2)
    assert part.intermediate_size == [32] * 6
    config = tiny_model("gemma4_text").config
    part = part_of(config, 2)
    for one, whole in zip(part.per_layer_config, config.per_layer_config, strict=True):
        assert (one.head_dim, 2 * one.num_key_value_heads) == (whole.head_dim, whole.num_key_value_heads)
    uneven = copy.deepcopy(tiny_model("gemma3n_text").config)
    uneven.intermediate_size = [64, 65, 66, 64, 64, 64]
    assert part_of(uneven, 2).intermediate_size == [32, 33, 33, 32, 32, 32], "those of the rank with the most"
