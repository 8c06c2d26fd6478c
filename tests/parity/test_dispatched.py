"""Models that accelerate has dispatched: weights that wait on a CPU or a disk, layers on several devices."""

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from architectures import ARCHITECTURES, pairs, prompt, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MistralForCausalLM

import caches
import engine

pytestmark = pytest.mark.covering("values", "pairs")

NEW = 14  # beyond the slack of a window's buffer
NAMES = ["llama", "mistral"]
HERE = torch.device("cpu")
ON_CPU = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu") | {
    f"model.layers.{layer}": "cpu" for layer in range(4)
}


def loaded(name, tmp_path, *on_disk):
    """The model from `tmp_path`, through a `device_map` that leaves these parts on disk."""
    tiny_model(name).save_pretrained(tmp_path)
    device_map = ON_CPU | dict.fromkeys(on_disk, "disk")
    return AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")


DISPATCHED = {
    "layers on disk": lambda name, path: loaded(name, path, "model.layers.1", "model.layers.2", "lm_head"),
    "embeddings on disk": lambda name, path: loaded(name, path, "model.embed_tokens", "model.layers.3"),
    "cpu_offload": lambda name, path: accelerate.cpu_offload(copy.deepcopy(tiny_model(name)), HERE),
    "disk_offload": lambda name, path: accelerate.disk_offload(copy.deepcopy(tiny_model(name)), path, HERE),
}


@pytest.fixture(params=DISPATCHED)
def dispatch(request, tmp_path):
    def dispatched(name):
        model = DISPATCHED[request.param](name, tmp_path)
        assert any(parameter.device.type == "meta" for parameter in model.parameters())
        return model

    return dispatched


@pytest.mark.covering("values")
@pytest.mark.parametrize(("name", "cache"), pairs(NAMES))
def test_greedy(name, cache, dispatch):
    model, inputs = dispatch(name), prompt()
    expected = tiny_model(name).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    for _ in range(2):  # no hook is lost on the way
        assert torch.equal(generator.generate(inputs, cache=cache, max_new_tokens=NEW).sequences, expected)


def test_embeddings(dispatch):
    model, inputs = dispatch("llama"), prompt()
    expected = tiny_model("llama").generate(**inputs, max_new_tokens=9, do_sample=False)[:, 13:]
    embeds = tiny_model("llama").get_input_embeddings()(inputs["input_ids"]).detach()
    out = engine.generate(model, inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=9)
    assert torch.equal(out.sequences, expected)


def test_a_cache_from_a_file(dispatch, tmp_path):
    """Keys come to where layers compute, not to where weights wait."""
    model, inputs = dispatch("llama"), prompt()
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    expected = engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=4).sequences
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    first.cache.save(tmp_path / "cache", model)
    live = caches.load(tmp_path / "cache", model)
    assert live.layers[0].keys.device == HERE
    assert torch.equal(engine.generate(model, first.sequences, cache=live, max_new_tokens=4).sequences, expected)


def test_the_compiled_step_is_refused(dispatch):
    config = engine.EngineConfig(cache="static", compile="aot_eager")
    with pytest.raises(engine.OptionError, match="onto one device"):
        engine.Generator(dispatch("llama"), config=config)


@pytest.mark.parametrize("part", ["model", "lm_head"], ids=["first linears", "last linear"])
def test_hooks_put_there_later_are_left_alone(part):
    model = copy.deepcopy(tiny_model("llama"))
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    expected = generator.generate(prompt(), max_new_tokens=5).sequences
    accelerate.cpu_offload(getattr(model, part), HERE)
    for _ in range(2):
        assert torch.equal(generator.generate(prompt(), max_new_tokens=5).sequences, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, MistralForCausalLM])
def test_a_layers_keys_are_where_it_computes(model_class, cache):
    """Tensors without contents stand in for those of a second device."""
    name = model_class.config_class.model_type
    places = ["cpu", "meta", "meta", "cpu"]
    with FakeTensorMode(), torch.no_grad():
        model = model_class(model_class.config_class(**ARCHITECTURES[name][1])).eval()
        for part, place in zip([*model.model.layers, model.model.norm], [*places, "cpu"], strict=True):
            for module in part.modules():
                for key, weight in module.named_parameters(recurse=False):
                    setattr(module, key, torch.nn.Parameter(torch.empty_like(weight, device=place)))
            add_hook_to_module(part, AlignDevicesHook(execution_device=place, skip_keys=["past_key_values"]))
        live = caches.build(cache, model.config, **({"max_cache_len": 32} if cache == "static" else {}))
        for tokens in (13, 1, 1):
            out = model(input_ids=torch.ones(2, tokens, dtype=torch.long), past_key_values=live)
        assert out.logits.device.type == "cpu"
        assert [layer.keys.device.type for layer in live.layers] == places
        assert [layer.values.device.type for layer in live.layers] == places


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("main", "computes"), [("cpu", ["cpu", "cuda:0"] * 2), ("cuda:0", ["cuda:0"] * 4)], ids=["both", "offloaded"]
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_two_devices(name, cache, main, computes):
    # float64: the two devices round differently, and this is about bookkeeping.
    model, inputs = copy.deepcopy(tiny_model(name)).double(), prompt()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    # What is mapped to the CPU computes there if that is the main device, otherwise its weights only wait there.
    device_map = ON_CPU | {"model.layers.1": "cuda:0", "model.layers.3": "cuda:0"}
    accelerate.dispatch_model(model, device_map, main_device=main, skip_keys=model._skip_keys_device_placement)
    out = engine.generate(model, inputs, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences.cpu(), expected)
    assert [str(layer.keys.device) for layer in out.cache.layers] == computes
