"""compile="auto": layers as compiled code give the same text, with every cache and strategy."""

import copy
import dataclasses
import gc
import shutil
import sys
import weakref
from functools import partial

import pytest
import torch
from architectures import prompt, suiting, tiny_model
from compiled import AUTO, GREEDY, generator_of, reference
from helpers import needs_kernels
from transformers import AutoModelForCausalLM, LlamaConfig

import caches
import engine
from engine.compiling import layer_attention, layer_compiler

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in
    ("gemma2", "gpt2", "mixtral", "jamba")), *(pytest.param(name, marks=pytest.mark.product) for name in
    ("opt", "qwen3"))])  # fmt: skip
def test_the_same_text_for_other_lengths_rows_and_weights(name):
    model = copy.deepcopy(tiny_model(name))
    generator = generator_of(model)
    for inputs in (prompt(2), prompt(3, tokens=20), prompt(4, tokens=5, pads=0), prompt(2, tokens=40, seed=1)):
        out = generator.generate(inputs, **GREEDY)
        assert torch.equal(out.sequences, reference(model, inputs))
        assert out.stats.compiled.endswith("layers")
    assert generator.pools["graphs"] == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)  # in place: the code reads the weights where they are
    assert torch.equal(generator.generate(prompt(2), **GREEDY).sequences, reference(model, prompt(2)))


@pytest.mark.usefixtures("builds_nothing")
def test_other_strategies(llama):
    generator = engine.Generator(llama, config=AUTO)
    for arguments in ({"num_beams": 3}, {"num_beams": 2, "length_penalty": 0.5}, {"prompt_lookup_num_tokens": 3}):
        out = generator.generate(prompt(1, pads=0), **GREEDY | arguments)
        assert torch.equal(out.sequences, reference(llama, prompt(1, pads=0), **arguments))
        assert out.stats.compiled == "4 layers" or "prompt_lookup_num_tokens" in arguments
    out = generator.generate(prompt(65), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(65)))
    assert out.stats.compiled.startswith("off: for more than 64 rows")
    out = generator.generate(prompt(3), **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences, reference(llama, prompt(3)))
    assert len(out.hidden_states) == GREEDY["max_new_tokens"]
    for one in (out, generator.generate(prompt(1, pads=0), **GREEDY, penalty_alpha=0.6, top_k=3)):
        assert one.stats.compiled == "off: a step returns what its layers record"


@pytest.mark.slow
def test_tokens_that_are_verified(llama, monkeypatch):
    generator, arguments = generator_of(llama, rows=1), GREEDY | {"max_new_tokens": 24, "prompt_lookup_num_tokens": 3}
    inputs = prompt(1, pads=0)["input_ids"].repeat(1, 3)
    text = reference(llama, {"input_ids": inputs}, **arguments)
    again = {"input_ids": torch.cat([text, inputs[:, -3:]], dim=1)}  # its own text proposes
    for _ in range(3):
        generator.generate(again, **arguments)
        generator._runner.finish_compiling()
    counted, compute = [], layer_compiler._Set._chained

    def counting(self, inputs, attention):
        counted.append(inputs["input_ids"].shape[1])
        return compute(self, inputs, attention)

    monkeypatch.setattr(layer_compiler._Set, "_chained", counting)
    out = generator.generate(again, **arguments)
    assert torch.equal(out.sequences, reference(llama, again, **arguments))
    assert out.stats.compiled == "4 layers"
    assert max(counted) == 4


@pytest.mark.covering("values")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_few_bits(weights, rows):
    config = LlamaConfig(vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                         num_attention_heads=4, initializer_range=0.1, eos_token_id=None)  # fmt: skip
    torch.manual_seed(0)
    generator = engine.Generator(
        AutoModelForCausalLM.from_config(config).eval(), config=dataclasses.replace(AUTO, weights=weights)
    )
    scores = []
    for _ in range(2):
        out = generator.generate(prompt(rows, pads=0), **GREEDY, output_logits=True, return_dict_in_generate=True)
        scores.append(torch.stack(out.logits))
        state = generator.warmup(prompt(rows, pads=0), **GREEDY)
    assert state == out.stats.compiled == "3 layers"
    eager, compiled = scores
    assert (eager - compiled).norm() < 0.05 * eager.norm()  # activations are rounded to bfloat16


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text"])
def test_layers_that_share_their_keys(name):
    model = tiny_model(name)
    out = engine.Generator(model, config=AUTO).generate(prompt(1, tokens=4, pads=0), **GREEDY)
    assert torch.equal(out.sequences, reference(model, prompt(1, tokens=4, pads=0)))


def test_a_dropped_result_frees_its_cache(llama):
    generator = generator_of(llama)
    gc.collect()
    gc.disable()
    try:
        cache = weakref.ref(generator.generate(prompt(2), **GREEDY).cache)
        assert cache() is None
    finally:
        gc.enable()


@needs_kernels
def test_no_layer_is_open_after_a_step(llama, appended):
    generator_of(llama).generate(prompt(2), **GREEDY)
    assert appended
    asked = []
    layer_attention.run(
        [calling_attention], list(torch.zeros(3, 2, 4, 1, 8)), [lambda *new: asked.append(new) or new[0]]
    )
    assert len(asked) == 1


def calling_attention(inputs):
    return [torch.ops.kvengine.layer_attention(*inputs)]


def test_a_signal_as_attention_begins_comes_through_compiled_code(llama):
    """Its handler raises before the operator can keep the error."""
    generator, arguments, calls = generator_of(llama), GREEDY | {"cache": "offloaded"}, []
    expected = generator.generate(prompt(2), **arguments).sequences

    def interrupting(frame, event, _):
        if frame.f_code is layer_attention._attention.__code__:
            calls.append(frame)
            if len(calls) == 4 * 3 + 2:  # the third step, layer 1
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupting)
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            generator.generate(prompt(2), **arguments)
    finally:
        sys.settrace(before)
    found = stopped.value.partial.sequences
    assert 10 < found.shape[1] < expected.shape[1]
    assert torch.equal(found, expected[:, : found.shape[1]])


@pytest.mark.parametrize(("text", "kind"), [("SystemExit: SIGTERM", SystemExit), ("no name: SIGTERM", RuntimeError)])
def test_the_name_of_an_exception_is_read(text, kind):
    def code(inputs):
        raise RuntimeError(text)

    with pytest.raises(kind, match="SIGTERM"):
        layer_attention.run([code], [torch.zeros(1)], [lambda *new: new[0]])


@needs_kernels
@pytest.mark.parametrize(("rows", "arguments"), [
    (3, {"num_beams": 3}), (1, {"cache": "offloaded_static"}), (1, {"cache": "quantized"}),
])  # fmt: skip
def test_layers_some_of_which_the_kernel_appends_to(rows, arguments, appended):
    """Layers with a window keep their tokens in another way than those without."""
    model = tiny_model("qwen3")
    generator = generator_of(model, rows)
    for _ in range(2):
        out = generator.generate(prompt(1, tokens=30, pads=0), **GREEDY | arguments)
        assert out.stats.compiled == f"{model.config.num_hidden_layers} layers"
    off = engine.Generator(model).generate(prompt(1, tokens=30, pads=0), **GREEDY | arguments)
    assert torch.equal(out.sequences, off.sequences)
    assert appended


def test_a_run_without_steps_says_so(llama):
    generator = generator_of(llama)
    for arguments in ({"cache": "none"}, {"max_new_tokens": 1}):
        out = generator.generate(prompt(2), **GREEDY | arguments)
        assert out.stats.compiled == "off: no step after a prompt yet"


@pytest.mark.parametrize("cache", suiting("llama"))
def test_all_caches(llama, cache):
    options = {"sink": {"window_length": 12}, "quantized_sink": {"window_length": 12}}.get(cache)
    arguments = {"cache": cache, "cache_config": options} | GREEDY
    generator, off = engine.Generator(llama, config=AUTO), engine.Generator(llama)
    for inputs, more in ((prompt(3, tokens=20), {}), (prompt(1, pads=0), {"num_beams": 3})):
        out, expected = (one.generate(inputs, **arguments | more) for one in (generator, off))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.compiled == ("off: no step after a prompt yet" if cache == "none" else "4 layers")


@pytest.fixture
def appended(monkeypatch):
    """The caches that the kernel appends to, in each layer of each step."""
    parts, own = [], layer_attention.open_layers

    def noting(layers, *arguments):
        parts.extend([[(rows.rows, len(rows.segments)) for rows in layer] for layer in layers])
        assert own(layers, *arguments)
        return True

    monkeypatch.setattr(layer_attention, "open_layers", noting)
    return parts


@needs_kernels
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
@pytest.mark.parametrize("inputs", [prompt(1, pads=0), prompt(3), prompt(3, pads=0)])
def test_the_kernel_appends_where_the_cache_keeps_what_it_is_given(llama, inputs, cache, appended):
    generator, rows = generator_of(llama, len(inputs["input_ids"])), len(inputs["input_ids"])
    for _ in range(2):  # the first call records the layers
        appended.clear()
        out = generator.generate(inputs, **GREEDY, cache=cache)
        assert torch.equal(out.sequences, reference(llama, inputs))
    assert appended == [[(rows, 1)]] * (0 if cache == "offloaded" else 4 * (GREEDY["max_new_tokens"] - 1))


@needs_kernels
def test_the_kernel_appends_to_rows_that_share_a_prefix(llama, appended):
    generator, arguments = generator_of(llama, 3), {"num_beams": 3, "length_penalty": 0.5}
    for _ in range(2):
        appended.clear()
        out = generator.generate(prompt(1, pads=0), **GREEDY | arguments)
        assert torch.equal(out.sequences, reference(llama, prompt(1, pads=0), **arguments))
    # The first step after the fork allocates the rows' own slots.
    assert appended == [[(3, 2)]] * 4 * (GREEDY["max_new_tokens"] - 2)


@needs_kernels
def test_prompts_of_a_batch(llama, appended):
    prompts = [prompt(1, tokens=tokens, pads=0)["input_ids"] for tokens in (6, 19, 11)]
    found = {}
    for config in (AUTO, engine.EngineConfig()):
        generator = engine.Generator(llama, config=config)
        done = [item.result() for item in generator.generate_many(prompts, **GREEDY)]
        found[config.compile] = sorted(out.sequences.tolist() for out in done), {out.stats.compiled for out in done}
    assert found["auto"][0] == found["off"][0]
    assert found["auto"][1] == {"4 layers"}
    assert [(1, 1)] * 3 in appended, "three caches of one row and one segment"


@pytest.mark.slow
def test_eager_attention(llama):
    llama.set_attn_implementation("eager")
    out = generator_of(llama).generate(prompt(2), **GREEDY)
    assert torch.equal(out.sequences, reference(llama, prompt(2)))
    assert out.stats.compiled == "4 layers"


def test_a_cache_may_keep_what_it_is_given():
    """Compiled code writes other values there."""
    kept = []

    def code(inputs):
        found = torch.ops.kvengine.layer_attention_in_python(*inputs)
        for tensor in inputs:
            tensor.zero_()
        return [found]

    class Keeping:
        def update(self, key, value, number):
            kept.extend((key, value))
            return key, value

    layer = layer_attention.LayerAttention(0, lambda module, query, *_: (query.transpose(1, 2), None), None, {})
    query, key, value = torch.rand(2, 4, 1, 8), torch.rand(2, 2, 1, 8), torch.rand(2, 2, 1, 8)
    before = key.clone(), value.clone()
    [found] = layer_attention.run([code], [query, key, value], [partial(layer.compute, Keeping(), None)])
    assert found.shape == (2, 1, 4, 8)
    assert all(map(torch.equal, kept, before))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_what_a_cache_raises_comes_through_compiled_code(llama, error, monkeypatch):
    generator, calls, update = generator_of(llama), [], caches.Cache.update

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) == 4 * 3 + 2:  # the third step, layer 1
            raise error
        return update(self, *arguments)

    monkeypatch.setattr(caches.Cache, "update", failing)
    expected = reference(llama, prompt(2))
    calls.clear()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt) as stopped:
            generator.generate(prompt(2), **GREEDY)
        found = stopped.value.partial.sequences
        assert torch.equal(found, expected[:, : found.shape[1]])
    else:
        out = generator.generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, expected)
        assert [fallback.name for fallback in out.stats.fallbacks] == ["release"]
    assert len(calls) > 4 * 3 + 1


def test_layers_with_another_attention_are_computed_without():
    for name, why in (
        ("falcon", "its layers do not give what a cache returns to an attention function"),
        ("deepseek_v3", "its layers do not give what a cache returns to an attention function"),
        ("mamba", "none of its layers"),
    ):
        model = tiny_model(name)
        out = engine.Generator(model, config=AUTO).generate(prompt(2), **GREEDY)
        assert torch.equal(out.sequences, reference(model, prompt(2)))
        assert out.stats.compiled.startswith(f"off: {why}")
