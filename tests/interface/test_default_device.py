"""Where torch's default device is not the model's, everything the engine makes is still where it belongs."""

import copy
import subprocess
import sys

import pytest
import torch
from architectures import ids_of, prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from fallbacks import OutAt
from strategy_cases import LOSSY, MODELS, NAMES, asked

import caches
import engine

OTHER = torch.device("meta")  # its tensors have no values, so one in the wrong place ends a run
NEW = 6


def check(run):
    torch.manual_seed(3)
    with OTHER:  # first: nothing that a generator finds out once is known yet
        found = run()
    torch.manual_seed(3)
    assert found == run()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["full", "full and windows", "states"])
def test_strategies(name, kind):
    model = tiny_model(MODELS[kind])
    inputs, arguments = prompt(), asked(name, model)
    check(lambda: engine.generate(model, inputs, **arguments).tokens)


@pytest.mark.parametrize("cache", [name for name in caches.names() if name != "encoder_decoder"])
def test_caches(cache):
    model, inputs = tiny_model({"hybrid": "gemma2", "mamba": "mamba"}.get(cache, "llama")), prompt()
    options = {"cache": cache, "cache_config": LOSSY.get(cache), "num_beams": 3, "max_new_tokens": NEW}
    check(lambda: engine.generate(model, inputs, **options).tokens)


@pytest.mark.parametrize(
    "arguments",
    [
        {"stop_strings": ["("], "num_return_sequences": 3, "do_sample": True, "seed": 1},
        {"guidance_scale": 1.5, "negative_prompt": "class"},
        {"regex": "[a-z]{3,}", "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "top_logprobs": 2},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_parameters(shipped, arguments):
    check(lambda: shipped.generate(["import os\n", "def main(path"], max_new_tokens=NEW, **arguments).text)


PROGRAM = """
import torch, transformers
import engine
model = transformers.AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL)
tokenizer = transformers.AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
torch.set_default_device("meta")
generator = engine.Generator(model, tokenizer, engine.EngineConfig(weights="int8"))
print(generator.generate("import os", max_new_tokens=6, num_beams=2).text)
"""


@pytest.mark.slow
def test_in_a_fresh_process():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    generator = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(weights="int8"))
    expected = generator.generate("import os", max_new_tokens=6, num_beams=2)
    assert ended.stdout == f"{expected.text}\n", ended.stderr


@pytest.mark.parametrize("ids", [True, False])
def test_embeddings(shipped, ids):
    embeds = shipped.model.get_input_embeddings()(torch.arange(20, 30)[None]).detach()
    given = {"inputs_embeds": embeds} | ({"input_ids": torch.arange(20, 30)[None]} if ids else {})
    check(lambda: shipped.generate(**given, max_new_tokens=NEW).tokens)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_models_with_an_encoder(name):
    model, inputs = tiny_encoder_decoder(name), source(name)
    check(lambda: engine.generate(model, inputs, num_beams=2, max_new_tokens=NEW).tokens)


def test_many_prompts(shipped):
    texts = ["import os\n", "def main(path", "x"]
    check(lambda: [out.result().text for out in shipped.generate_many(texts, max_new_tokens=NEW, num_beams=2)])


def test_prompts_with_caches_of_several_lengths():
    generator = engine.Generator(tiny_model("llama"))
    ids = ids_of(30)
    window = {"cache": "sliding_window", "cache_config": {"window_length": 8}}
    asked = [{"prompt": ids, "max_new_tokens": 12} | backend for backend in (window, {}, window)]

    def run():
        ended = {out.index: out.result().tokens for out in generator.generate_many(asked)}
        return [ended[number] for number in range(len(asked))]

    check(run)


def test_conversations_and_prefixes(shipped):
    generator = engine.Generator(shipped.model, shipped.tokenizer, engine.EngineConfig(prefix_store_bytes=10**7))

    def run():
        chat = generator.chat(max_new_tokens=NEW)
        answers = [chat.send("import os").text, chat.send("import sys").text]
        chat.undo()
        prefix = generator.prefill("import os\n" * 20)
        return answers, prefix.generate(["x", "class Path:"], max_new_tokens=NEW).text, chat.send("a").text

    check(run)


@pytest.mark.parametrize("fallback", ["chunk", "offload", "quantize", "split"])
def test_fallbacks(fallback):
    model, inputs = copy.deepcopy(tiny_model("llama")), prompt(rows=4, tokens=40)

    def run():
        with OutAt(model, [0 if fallback == "chunk" else 2]):
            out = engine.generate(model, inputs, max_new_tokens=NEW, on_oom=[fallback])
        assert [one.name for one in out.stats.fallbacks] == [fallback]
        return out.tokens

    check(run)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_in_few_bits(weights):
    config, inputs = engine.EngineConfig(weights=weights), prompt()
    with OTHER:
        generator = engine.Generator(copy.deepcopy(tiny_model("llama")), config=config)
        found = generator.generate(inputs, max_new_tokens=NEW).tokens
    expected = engine.Generator(copy.deepcopy(tiny_model("llama")), config=config)
    assert found == expected.generate(inputs, max_new_tokens=NEW).tokens
