"""The decode step on a fixed cache is one graph, with the text of the eager one; or it is refused."""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, RARE_ARCHITECTURES, prompt, randomised, tiny_model
from transformers.models.bloom import modeling_bloom

import caches
import configs
import engine
from caches.transfer.export_buffers import Buffers
from strategies import Emit, Forward, Rows

NEW = 14  # beyond a window's buffer, so that it is compacted on the way
AOT_EAGER = engine.EngineConfig(cache="static", compile="aot_eager")
IMPOSED = configs.SlidingWindowCacheConfig(window_length=6)


@pytest.fixture(autouse=True)
def _short_buffers():
    """Not here: a graph is for buffers of one length."""


@pytest.fixture
def graphs(monkeypatch, request):
    """Every graph that is compiled, through the aot_eager backend or the one that a test's parameter names."""
    from torch._dynamo.backends.registry import lookup_backend

    torch._dynamo.reset()
    own, compile, seen = lookup_backend(getattr(request, "param", "aot_eager")), torch.compile, []

    def counting(graph, inputs):
        seen.append(graph)
        return own(graph, inputs)

    @functools.wraps(compile)
    def patched(f, backend, **options):
        return compile(f, backend=counting, **options)

    monkeypatch.setattr(torch, "compile", patched)
    return seen


def reference(model, inputs, new=NEW):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False)


PLAIN = ["gpt2", "phi3", "llama4_text", "bloom", "gemma3n_text"]
MIXED = ["jamba", "falcon_h1", "zamba2", "lfm2", "qwen3_next", "granitemoehybrid", "nemotron_h"]
ABOVE = {"llama", "bamba", *PLAIN, *MIXED}  # with a static cache, the one that every architecture has
MORE = [name for name in MORE_ARCHITECTURES if name not in ABOVE]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("mamba", "mamba"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("gemma2", "hybrid"), ("bamba", "static"), ("mistral", "sliding_window"), ("mamba2", "mamba"))
        ),
        *(pytest.param(name, "static", marks=pytest.mark.slow) for name in PLAIN + MIXED),
    ],
)
def test_one_graph_over_all_steps(name, cache, graphs):
    if name == "bloom" and not hasattr(modeling_bloom, "_get_alibi_slopes"):
        pytest.skip("this release's bloom wants a 2D mask in every step")
    model, inputs = tiny_model(name), prompt()
    out = engine.Generator(model, config=AOT_EAGER).generate(inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, reference(model, inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_an_imposed_window(name, graphs):
    model, inputs = tiny_model(name), prompt()
    expected = engine.generate(model, inputs, cache=IMPOSED, max_new_tokens=NEW).sequences
    out = engine.Generator(model, config=AOT_EAGER).generate(inputs, cache=IMPOSED, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert not torch.equal(out.sequences, reference(model, inputs))
    assert len(graphs) == 1


@dataclass(frozen=True)
class Swaps:
    """Greedy; every third step the rows change places."""

    name, samples = "swaps", False

    def flow(self, task):
        ids, process = task.ids, task.process
        tokens = ids
        for step in itertools.count(1):
            logits = yield Forward(tokens)
            ids = yield Emit(process(ids, logits).argmax(dim=-1, keepdim=True))
            tokens = ids[:, -1:]
            if step % 3 == 0:
                yield Rows(torch.tensor([1, 0]))
                tokens = tokens.flip(0)


class FailsAfter:
    """A logits processor that raises once, in its nth call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("enough")
        return scores


@pytest.mark.parametrize(
    ("name", "cache", "options"),
    [
        ("llama", "static", {"max_cache_len": 128, "max_batch_size": 4}),
        pytest.param("mistral", "sliding_window", {}, marks=pytest.mark.slow),
        pytest.param("bamba", "static", {"max_cache_len": 128}, marks=pytest.mark.slow),
        pytest.param("mamba", "mamba", {}, marks=pytest.mark.slow),
    ],
)
def test_nothing_between_the_steps_costs_a_graph_or_moves_a_tensor(name, cache, options, graphs):
    model, inputs = tiny_model(name), prompt()
    live = caches.build(cache, model.config, **options)
    generate = functools.partial(engine.Generator(model, config=AOT_EAGER).generate, cache=live)

    generate(inputs, max_new_tokens=2)
    addresses = [tensor.data_ptr() for tensor in Buffers(live).buffers()]

    live.reset()
    swapped = engine.generate(model, inputs, strategy=Swaps(), max_new_tokens=NEW).sequences
    assert torch.equal(generate(inputs, strategy=Swaps(), max_new_tokens=NEW).sequences, swapped)

    live.reset()
    with pytest.raises(engine.GenerationInterrupted, match="enough") as raised:
        generate(inputs, logits_processor=[FailsAfter(9)], max_new_tokens=NEW)
    begun = raised.value.partial.sequences
    assert begun.shape[1] == 13 + 8
    live.begin(1, graph=True)
    layer, nan = live.layers[0], torch.full((2, 2, 1, 8), float("nan"))  # a forward that dies has written something
    for state in [*layer.conv_states.values(), *layer.recurrent_states.values()]:
        state.fill_(float("nan"))
    if live.specs[0].keeps_kv:
        live.update(nan, nan, 0)
    live.abort()
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 8), value=1)
    out = generate({"input_ids": begun, "attention_mask": mask}, max_new_tokens=NEW - 8)
    assert torch.equal(out.sequences, reference(model, inputs))

    live.reset()
    assert torch.equal(generate(inputs, max_new_tokens=NEW).sequences, out.sequences)
    assert [tensor.data_ptr() for tensor in Buffers(live).buffers()] == addresses
    assert len(graphs) == 1


@pytest.mark.slow  # of models without states, the test of calls of similar length makes several
@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_second_call_of_the_same_shapes_compiles_nothing(name, graphs):
    generator = engine.Generator(tiny_model(name), config=AOT_EAGER)
    first = generator.generate(prompt(), max_new_tokens=9)
    again = generator.generate(prompt(), max_new_tokens=9)
    assert torch.equal(first.sequences, again.sequences)
    assert len(graphs) == 1


@pytest.mark.parametrize("cache", ["static", pytest.param(IMPOSED, marks=pytest.mark.slow)], ids=["static", "imposed"])
def test_calls_of_similar_length_with_and_without_pads_share_a_graph(cache, graphs):
    model = tiny_model("llama")
    generator = engine.Generator(model, config=AOT_EAGER)
    for tokens in range(5, 17, 2):
        inputs = prompt(tokens=tokens, pads=tokens % 4 - 1)
        expected = engine.generate(model, inputs, cache=cache, max_new_tokens=9).sequences
        assert torch.equal(generator.generate(inputs, cache=cache, max_new_tokens=9).sequences, expected)
    assert len(graphs) == 1


@pytest.mark.slow
def test_any_number_of_shapes(graphs):
    config_class, arguments = ARCHITECTURES["llama"]
    model = randomised(config_class, arguments | {"num_hidden_layers": 1})
    generator = engine.Generator(model, config=AOT_EAGER)
    for rows in range(1, 10):  # torch allows a function 8
        assert generator.generate(prompt(rows=rows), max_new_tokens=3).stats.new_tokens == 3 * rows
    assert len(graphs) == 9


def test_a_model_that_is_known_not_to_be_one_graph_is_refused():
    with pytest.raises(engine.OptionError, match="GPTNeoForCausalLM as a model whose step cannot be one"):
        engine.Generator(tiny_model("gpt_neo"), config=AOT_EAGER)


def test_a_model_that_turns_out_not_to_be_one_graph_can_go_on_without(graphs):
    model, inputs = tiny_model("falcon_alibi"), prompt(pads=0)
    with pytest.raises(
        engine.GenerationInterrupted, match=r"cannot be one: .*modeling_falcon\.py, line \d+.* compile off"
    ) as found:
        engine.Generator(model, config=AOT_EAGER).generate(inputs, max_new_tokens=5)
    assert isinstance(found.value.__cause__, engine.OptionError)
    assert graphs == []
    partial = found.value.partial
    rest = engine.generate(model, partial.sequences, cache=partial.cache, max_new_tokens=4)
    assert torch.equal(rest.sequences, reference(model, inputs, new=5))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["eager"], indirect=True)  # tests above show what AOTAutograd does with a graph
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in ARCHITECTURES if name not in ABOVE),
        *(
            pytest.param(name, marks=pytest.mark.product if number % 8 else ())
            for number, name in enumerate([*MORE, *RARE_ARCHITECTURES])
            if name not in ABOVE
        ),
    ],
)
def test_architectures_are_one_graph_or_refused(name, graphs):
    if name in RARE_ARCHITECTURES and not hasattr(transformers, RARE_ARCHITECTURES[name][0]):
        pytest.skip("this release of transformers does not know it yet")
    model, inputs = tiny_model(name), prompt()
    new = 20 if name == "deepseek_v32" else NEW  # exact ties in its index go by the room
    try:
        out = engine.Generator(model, config=AOT_EAGER).generate(inputs, max_new_tokens=new)
    except (caches.UnsupportedLayerError, engine.OptionError) as error:
        pytest.skip(str(error))
    except engine.GenerationInterrupted as error:
        if isinstance(error.__cause__, engine.OptionError):
            pytest.skip(str(error.__cause__))
        raise
    assert torch.equal(out.sequences, reference(model, inputs, new))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "static"),
        ("gemma2", "hybrid"),
        ("mistral", "sliding_window"),
        ("llama", IMPOSED),
        ("mamba", "mamba"),
        *((name, "static") for name in ("bamba", "jamba", "qwen3_next")),
    ],
)
def test_inductor(name, cache):
    torch._dynamo.reset()
    model, inputs = tiny_model(name), prompt()
    expected = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW).sequences
    generator = engine.Generator(model, config=engine.EngineConfig(compile="inductor"))
    assert torch.equal(generator.generate(inputs, cache=cache, max_new_tokens=NEW).sequences, expected)
