"""The same equalities on a GPU."""

import copy

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, prompt, tiny_model
from helpers import new_cache, skip_if_refused
from torch.utils._python_dispatch import TorchDispatchMode

import caches
import engine

pytestmark = pytest.mark.cuda


@pytest.fixture
def on_gpu():
    def move(name):
        # float64: kernels for different shapes round differently, and this is about bookkeeping.
        return copy.deepcopy(tiny_model(name)).to("cuda", torch.float64)

    return move


@pytest.mark.parametrize("cache", caches.names())
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mamba2", "bamba", "lfm2", "falcon_h1"])
def test_greedy(name, cache, on_gpu):
    model = on_gpu(name)
    skip_if_refused(cache, model)
    inputs = {key: value.cuda() for key, value in prompt().items()}
    expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=40)
    assert torch.equal(out.sequences, expected)
    assert out.stats.peak_bytes > 0
    # Prompts on the host are moved to the model.
    assert torch.equal(engine.generate(model, prompt(), cache=cache, max_new_tokens=40).sequences, expected)


COMPILED = [
    *((name, "static") for name in ["llama", "mistral", "gemma2", "bamba", "lfm2", "falcon_h1"]),
    ("mistral", "sliding_window"),
    ("gemma2", "hybrid"),
    ("mamba2", "mamba"),
]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_seed_draws_the_numbers_of_a_global_one_and_leaves_that_alone(options, on_gpu):
    model, inputs = on_gpu("llama"), {key: value.cuda() for key, value in prompt().items()}
    options = options | {"do_sample": True, "max_new_tokens": 20}
    torch.manual_seed(11)
    expected = engine.generate(model, inputs, **options).sequences
    before = torch.cuda.get_rng_state()
    assert torch.equal(engine.generate(model, inputs, **options, seed=11).sequences, expected)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(("name", "cache"), COMPILED)
def test_the_compiled_step(name, cache, on_gpu):
    torch._dynamo.reset()
    model = on_gpu(name)
    expected = engine.generate(model, prompt(), cache=cache, max_new_tokens=40).sequences
    generator = engine.Generator(model, config=engine.EngineConfig(compile="inductor"))
    assert torch.equal(generator.generate(prompt(), cache=cache, max_new_tokens=40).sequences, expected)


@pytest.mark.parametrize(("name", "cache"), COMPILED)
def test_the_exported_step(name, cache, on_gpu):
    model, live = on_gpu(name), new_cache(cache, tiny_model(name))
    ids = prompt(pads=0)["input_ids"].cuda()
    expected = engine.generate(model, ids, cache=cache, max_new_tokens=40).sequences
    ids = engine.generate(model, ids, cache=live, max_new_tokens=1).sequences
    step = engine.export_step(model, live).module()
    for _ in range(39):
        live.begin(1, graph=True)
        with torch.no_grad():
            logits = step(**engine.step_inputs(model, live, ids[:, -1:]))
        live.commit()
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(ids, expected)


OFFLOADED = [(name, cache) for name in ("llama", "gemma2") for cache in ("offloaded", "offloaded_static")]


class Traffic(TorchDispatchMode):
    """Bytes copied between the host and the device."""

    moved = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        given = [one for one in arguments if isinstance(one, torch.Tensor)]
        if isinstance(result, torch.Tensor) and len({tensor.device.type for tensor in [*given, result]}) > 1:
            self.moved += result.nbytes
        return result


def decode(model, ids, cache, steps):
    """A prompt, then one token after another in plain calls."""
    with torch.inference_mode():
        for step in (ids, *[ids[:, :1]] * steps):
            model(step, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(("name", "cache"), OFFLOADED)
@pytest.mark.parametrize("options", [{}, {"residency": "disk"}], ids=str)
def test_offloaded_text_in_pieces_equals_dynamic(name, cache, options, on_gpu):
    model = on_gpu(name)
    generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=5))
    expected = generator.generate(prompt(), cache="dynamic", max_new_tokens=60).sequences
    out = generator.generate(prompt(), cache=cache, cache_config=options, max_new_tokens=60)
    assert torch.equal(out.sequences, expected)
    beams = {"max_new_tokens": 40, "do_sample": False, "num_beams": 3}
    inputs = {key: value.cuda() for key, value in prompt().items()}
    size = {"max_cache_len": 64} if cache == "offloaded_static" else {}
    ours = caches.build(cache, model.config, **options, **size)
    assert torch.equal(model.generate(**inputs, **beams, past_key_values=ours), model.generate(**inputs, **beams))


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_keeps_two_layers_on_the_device(cache, on_gpu):
    model = on_gpu("llama")
    for tokens in (64, 192):
        ids = torch.randint(2, 100, (4, tokens), device="cuda")
        size = {"max_cache_len": 256} if cache == "offloaded_static" else {}
        ours = caches.build(cache, model.config, **size)
        decode(model, ids, caches.build("dynamic", model.config), 1)  # libraries take their own memory now
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        decode(model, ids, ours, 8)
        torch.cuda.synchronize()
        places = ours.bytes_by_place
        layer = places["host"] / len(ours.layers)
        assert places["device"] == 0
        assert places["staging"] <= 2 * layer
        assert torch.cuda.memory_allocated() - before <= 2 * layer + 2**16
        assert all(next(one.tensors()).is_pinned() for one in ours.layers)


def test_offloaded_moves_half_of_what_transformers_moves(on_gpu):
    model = on_gpu("llama")
    ids = torch.randint(2, 100, (4, 160), device="cuda")
    moved = []
    for cache in (
        caches.build("offloaded", model.config),
        transformers.DynamicCache(config=model.config, offloading=True),
    ):
        decode(model, ids, cache, 2)
        with Traffic() as traffic:
            decode(model, ids[:, :1], cache, 7)
        moved.append(traffic.moved)
    assert 0.3 < moved[0] / moved[1] < 0.65, moved
