"""Models whose linear layers are not plain ones: PEFT adapters, in PEFT's wrapper or without, and quantized weights."""

import copy

import peft
import pytest
import torch
from architectures import prompt, suiting, tiny_model
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from optimum import quanto
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import caches
import engine
from engine.reuse.conversation import flat

NEW = 12
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**options):
    """Adapters with random weights: PEFT's usual ones do nothing before they are trained."""
    return peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM", **options)


def in_wrapper(model):
    return peft.get_peft_model(model, lora()).eval()


def in_mixed_wrapper(model):
    return peft.get_peft_model(model, lora(), mixed=True).eval()


def without_wrapper(model):
    model.add_adapter(lora())
    return model


def by_quanto(model):
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def by_hqq(model):
    config = BaseQuantizeConfig(nbits=4, group_size=16)
    for module in list(model.model.layers.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                setattr(module, name, HQQLinear(child, config, compute_dtype=torch.float32, device="cpu"))
    return model


MAKERS = [in_wrapper, in_mixed_wrapper, without_wrapper, by_quanto, by_hqq]


def made(make, name="llama"):
    return make(copy.deepcopy(tiny_model(name)))


def text_of(model, inputs):
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_greedy(name, make):
    model, inputs = made(make, name), prompt()
    expected = text_of(model, inputs)
    assert not torch.equal(expected, text_of(tiny_model(name), inputs))
    generators = [engine.Generator(model, config=engine.EngineConfig(linears=one)) for one in ("default", "onednn")]
    for number, cache in enumerate(suiting(name)):
        out = generators[number % 2].generate(inputs, cache=cache, max_new_tokens=NEW)
        assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    "make", [by_quanto, *(pytest.param(make, marks=pytest.mark.slow) for make in (in_wrapper, by_hqq))]
)
def test_the_compiled_step(make):
    torch._dynamo.reset()
    model, inputs = made(make), prompt()
    generator = engine.Generator(model, config=engine.EngineConfig(cache="static", compile="aot_eager"))
    assert torch.equal(generator.generate(inputs, max_new_tokens=NEW).sequences, text_of(model, inputs))


def test_the_active_adapter_is_that_of_the_call():
    model, inputs = made(in_wrapper), prompt()
    generator = engine.Generator(model)
    model.add_adapter("other", lora())
    model.eval()
    texts = []
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        texts.append(generator.generate(inputs, max_new_tokens=NEW).sequences)
        assert torch.equal(texts[-1], text_of(model, inputs))
    with model.disable_adapter():
        texts.append(generator.generate(inputs, max_new_tokens=NEW).sequences)
    assert torch.equal(texts[-1], text_of(tiny_model("llama"), inputs))
    assert len({tuple(text.flatten().tolist()) for text in texts}) == 3


def test_a_cache_is_of_the_adapters_that_read_it(tmp_path, tokenizer):
    model = made(in_wrapper)
    model.add_adapter("other", lora())
    model.eval()
    generator = engine.Generator(model)
    out = generator.generate(prompt(rows=1, pads=0), max_new_tokens=NEW)
    more = torch.cat([out.sequences, torch.tensor([[5]])], dim=1)
    model.set_adapter("other")
    with pytest.raises(engine.InputError, match=r"adapters changed from default \(scale 2\) to other"):
        generator.generate(more, cache=out.cache, max_new_tokens=NEW)
    with pytest.raises(caches.CacheFileError, match=r"default \(scale 2\) to other \(scale 2\)"):
        out.cache.save(tmp_path / "cache")
    seen = torch.ones_like(more)
    with pytest.raises(engine.InputError, match="adapters changed from default"):  # also with the new tokens alone
        generator.generate(more[:, -2:], attention_mask=seen, cache=out.cache, max_new_tokens=NEW)
    generator.generate(more, cache=out.cache, max_new_tokens=NEW, trust_cache=True)
    joined = caches.join_rows([generator.generate(more[:, :8], max_new_tokens=NEW).cache,
                               read_by(model, "default", generator, more[:, :8]).cache])  # fmt: skip
    with pytest.raises(caches.CacheFileError, match=r"between which the active adapters changed from other.*default"):
        joined.save(tmp_path / "cache")


def read_by(model, adapter, generator, ids):
    model.set_adapter(adapter)
    return generator.generate(ids, max_new_tokens=NEW)


def test_an_adapter_that_changes_in_the_middle_of_a_stream():
    model = made(in_wrapper)
    generator = engine.Generator(model)
    live = caches.build("dynamic", generator.model.config)
    ids = prompt(rows=1, pads=0)["input_ids"]
    with model.disable_adapter():
        shown = generator.stream(ids, cache=live, max_new_tokens=NEW)
        next(shown)
    shown.close()
    known = live.log.ids[:, : live.total_tokens]
    with pytest.raises(engine.InputError, match="while it was filled, the active adapters changed from none"):
        generator.generate(torch.cat([known, ids], dim=1), cache=live, max_new_tokens=NEW)


def test_modules_that_are_saved_whole_with_an_adapter():
    """Their wrapper shows the attention's own scale, a float."""
    model = made(lambda model: peft.get_peft_model(model, lora(modules_to_save=["self_attn"])).eval())
    assert torch.equal(engine.generate(model, prompt(), max_new_tokens=NEW).sequences, text_of(model, prompt()))


def test_another_scale_or_a_merge_empties_the_store():
    model = made(in_wrapper)
    generator = engine.Generator(model, config=engine.EngineConfig(prefix_store_bytes=10**8))
    ids = prompt(rows=1, tokens=100, pads=0)
    generator.generate(ids, max_new_tokens=NEW)
    assert generator.generate(ids, max_new_tokens=NEW).stats.cached_tokens == 99
    with peft.helpers.rescale_adapter_scale(model, 0.5):
        out = generator.generate(ids, max_new_tokens=NEW)
        assert (out.stats.cached_tokens, out.sequences.tolist()) == (0, text_of(model, ids).tolist())
    model.add_adapter("other", lora())
    model.eval()
    for _ in range(2):
        out = generator.generate(ids, max_new_tokens=NEW)
    assert out.stats.cached_tokens == 99
    model.merge_adapter(["other"])
    out = generator.generate(ids, max_new_tokens=NEW)
    assert (out.stats.cached_tokens, out.sequences.tolist()) == (0, text_of(model, ids).tolist())


def test_a_conversation_is_read_again_by_other_adapters():
    model = in_wrapper(AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL))
    model.add_adapter("other", lora())
    model.eval()
    generator = engine.Generator(model, AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL))
    chat = generator.chat(max_new_tokens=NEW)
    chat.send("import os")
    model.set_adapter("other")
    out = chat.send("x = 1")
    read = flat(chat._conversation.segments)[: -len(out.tokens[0])]
    assert out.stats.prompt_tokens == len(read)
    assert out.tokens == generator.generate(torch.tensor([read]), max_new_tokens=NEW).tokens


def test_a_folder_with_an_adapter(tmp_path, tokenizer):
    model = in_wrapper(AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    inputs = tokenizer("import os\n", return_tensors="pt")
    assert torch.equal(engine.generate(tmp_path, "import os\n", max_new_tokens=NEW).sequences, text_of(model, inputs))


@pytest.mark.parametrize(
    "config",
    [
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PolyConfig(task_type="CAUSAL_LM", target_modules=TARGETS),
        lora(alora_invocation_tokens=[5, 6]),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_that_are_more_than_layers_are_refused(config):
    base = copy.deepcopy(tiny_model("llama"))
    base.__class__ = type("Llama", (LlamaForCausalLM,), {})  # the forward it has is not its class's own
    model = peft.get_peft_model(base, config)
    with pytest.raises(engine.InputError, match=f"'default' \\({type(config).__name__}\\).*own generate"):
        engine.generate(model, prompt(), max_new_tokens=NEW)


def test_dropout_of_an_adapter_in_training_mode_is_refused():
    model = made(lambda model: peft.get_peft_model(model, lora(lora_dropout=0.5)))
    with pytest.raises(engine.InputError, match=r"model\.eval\(\)"):
        engine.generate(model, prompt(), max_new_tokens=NEW)
    model.eval()
    assert torch.equal(engine.generate(model, prompt(), max_new_tokens=NEW).sequences, text_of(model, prompt()))
