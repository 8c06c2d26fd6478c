"""The same equalities on a GPU."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, prompt, tiny_model
from support import new_cache, skip_if_refused

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
        live.settle()
        ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(ids, expected)
