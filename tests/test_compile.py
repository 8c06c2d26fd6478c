"""The decode step on a fixed cache is one graph, with the text of the eager one."""

import functools

import pytest
import torch
from architectures import prompt, tiny_model

import engine


@pytest.fixture
def graphs(monkeypatch):
    """Every graph that is compiled, through the aot_eager backend."""
    from torch._dynamo.backends.registry import lookup_backend

    torch._dynamo.reset()
    aot_eager, compile, seen = lookup_backend("aot_eager"), torch.compile, []

    def counting(graph, inputs):
        seen.append(graph)
        return aot_eager(graph, inputs)

    @functools.wraps(compile)
    def patched(f, backend, **options):
        return compile(f, backend=counting, **options)

    monkeypatch.setattr(torch, "compile", patched)
    return seen


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "llama4_text", "phi3"])
def test_one_graph_over_all_steps(name, rows, graphs):
    model, inputs = tiny_model(name), prompt(rows=rows)
    expected = engine.generate(model, inputs, cache="static", max_new_tokens=21).sequences
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    assert torch.equal(generator.generate(inputs, max_new_tokens=21).sequences, expected)
    assert len(graphs) == 1


def test_a_second_call_of_the_same_shapes_compiles_nothing(graphs):
    generator = engine.Generator(tiny_model("llama"), config=engine.EngineConfig(cache="static", compile="aot_eager"))
    first = generator.generate(prompt(), max_new_tokens=9)
    again = generator.generate(prompt(), max_new_tokens=9)
    assert torch.equal(first.sequences, again.sequences)
    assert len(graphs) == 1


def test_calls_of_similar_length_share_a_graph(graphs):
    model = tiny_model("llama")
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    for tokens in range(5, 17):
        out = generator.generate(prompt(tokens=tokens, pads=2), max_new_tokens=4)
        assert torch.equal(
            out.sequences, engine.generate(model, prompt(tokens=tokens, pads=2), max_new_tokens=4).sequences
        )
    assert len(graphs) == 1


def test_any_number_of_shapes(graphs):
    generator = engine.Generator(tiny_model("llama"), config=engine.EngineConfig(cache="static", compile="aot_eager"))
    for rows in range(1, 11):
        assert generator.generate(prompt(rows=rows), max_new_tokens=3).stats.new_tokens == 3 * rows
    assert len(graphs) == 10


def test_a_compiled_step_over_a_window_that_is_compacted(graphs):
    model, inputs = tiny_model("mistral"), prompt()
    expected = engine.generate(model, inputs, cache="dynamic", max_new_tokens=60).sequences
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    assert torch.equal(generator.generate(inputs, max_new_tokens=60).sequences, expected)
    assert len(graphs) == 1


def test_compile_needs_a_fixed_cache():
    generator = engine.Generator(tiny_model("llama"), config=engine.EngineConfig(compile="aot_eager"))
    with pytest.raises(engine.OptionError, match="cache='static'"):
        generator.generate(prompt(), max_new_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_inductor(name):
    torch._dynamo.reset()
    model, inputs = tiny_model(name), prompt()
    expected = engine.generate(model, inputs, cache="static", max_new_tokens=40).sequences
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="inductor"))
    assert torch.equal(generator.generate(inputs, max_new_tokens=40).sequences, expected)
