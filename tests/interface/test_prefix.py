"""A prompt that was read once: its continuations are those of the whole prompt, and copy nothing of it."""

import copy

import pytest
import torch
from architectures import ids_of, prompt, tiny_model
from helpers import needs_kernels
from kept import options_of
from transformers import AutoTokenizer

import caches
import engine

NEW = 6
STRATEGIES = [{}, {"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
              {"do_sample": True, "seed": 1, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]  # fmt: skip


def everything(prefix, *rows):
    """The prompts as a batch, padded on the left of what continues the prefix."""
    longest = max(map(len, rows))
    own = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    before = prefix.ids.expand(len(rows), -1)
    return {"input_ids": torch.cat([before, own], 1), "attention_mask": torch.cat([torch.ones_like(before), seen], 1)}


def content_of(cache):
    return [part.clone() for layer in cache.layers for part in layer.dense_state().values()]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "jamba", "mamba"])
def test_continuations_are_those_of_the_prompt(name, strategy):
    model = tiny_model(name)
    if name in ("jamba", "mamba") and "prompt_lookup_num_tokens" in strategy:
        pytest.skip("states cannot take tokens back")
    generator = engine.Generator(model)
    prefix = generator.prefill(ids_of(20))
    before = content_of(prefix.cache)
    for continuation in ([5, 6, 7], [9], [5, 6, 8, 11]):
        out = prefix.generate(continuation, max_new_tokens=NEW, **strategy)
        expected = generator.generate(everything(prefix, continuation), max_new_tokens=NEW, **strategy)
        assert out.tokens == expected.tokens
        assert out.stats.prompt_tokens == len(continuation)
    for now, then in zip(content_of(prefix.cache), before, strict=True):
        assert torch.equal(now, then)
    assert prefix.cache.total_tokens == 20


BACKENDS = [name for name in caches.names() if name not in ("encoder_decoder", "mamba", "none", "hybrid")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend):
    options = options_of(backend, "host") | ({"max_cache_len": 40} if caches.recipe(backend).has_a_size else {})
    generator, backend = engine.Generator(tiny_model("llama")), {"cache": backend, "cache_config": options}
    prefix = generator.prefill(ids_of(20), **backend)
    first = generator.generate(ids_of(20), max_new_tokens=1, **backend).cache
    for continuation in ([5, 6, 7], [9]):
        out = prefix.generate(continuation, max_new_tokens=NEW)
        given = everything(prefix, continuation)
        expected = generator.generate(given, cache=copy.deepcopy(first), max_new_tokens=NEW)
        assert out.tokens == expected.tokens
        assert out.cache.name == prefix.cache.name


def test_a_batch_over_one_prefix():
    generator = engine.Generator(tiny_model("llama"))
    prefix = generator.prefill(ids_of(30))
    rows = [[5, 6, 7], [9], [5, 6, 8, 11, 12]]
    for strategy in STRATEGIES[:4]:
        out = prefix.generate(rows, max_new_tokens=NEW, **strategy)
        expected = generator.generate(everything(prefix, *rows), max_new_tokens=NEW, **strategy)
        assert out.tokens == expected.tokens
    alone = [prefix.generate(row, max_new_tokens=NEW).tokens[0] for row in rows]
    assert prefix.generate(rows, max_new_tokens=NEW).tokens == alone


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_padding_within_windows_is_refused(name):
    """It would take places of tokens; continuations of one length have none."""
    generator = engine.Generator(tiny_model(name))
    prefix = generator.prefill(ids_of(12))
    with pytest.raises(engine.InputError, match=r"continuations of 2 to 5 tokens: .* windows"):
        prefix.generate([[5, 6], [7, 8, 9, 10, 11]], max_new_tokens=NEW)
    rows = [[5, 6], [7, 8]]
    out = prefix.generate(rows, max_new_tokens=NEW)
    assert out.tokens == [prefix.generate(row, max_new_tokens=NEW).tokens[0] for row in rows]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("backend", ["static", "offloaded_static", "sliding_window", "sink"])
@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"max_new_tokens": 100}], ids=str)
def test_a_cache_of_fixed_size_gets_room_for_continuations(backend, asked):
    options = {"window_length": 64} if backend == "sliding_window" else {}
    options |= {"window_length": 64, "num_sink_tokens": 4} if backend == "sink" else {}
    generator = engine.Generator(tiny_model("llama"))
    prefix = generator.prefill(ids_of(20), cache=backend, cache_config=options)
    rows = [[5, 6], [7, 8]] if asked == {} else [[5, 6]]
    asked = {"max_new_tokens": NEW} | asked
    out = prefix.generate(rows, **asked)
    expected = generator.generate(everything(prefix, *rows), cache=backend, cache_config=options, **asked)
    assert out.tokens == expected.tokens
    assert prefix.generate([5, 6], max_new_tokens=NEW).tokens


def test_a_branch_changes_rows_and_backends_without_the_other():
    generator = engine.Generator(tiny_model("llama"))
    prefix = generator.prefill(ids_of(20))
    before = content_of(prefix.cache)
    for change in (
        lambda cache: cache.crop(7),
        lambda cache: cache.select_rows(torch.tensor([0, 0, 0])),
        lambda cache: cache.unshare(),
        lambda cache: caches.migrate(cache, "quantized", residual_length=2),
        lambda cache: caches.convert(cache, "static", max_cache_len=64),
        lambda cache: cache.reserve(500),
        lambda cache: (cache.fork(3), cache.select_rows(torch.tensor([1]))),
        lambda cache: cache.reset(),
    ):
        branched = caches.branch(prefix.cache)
        change(branched)
        if branched.batch_size == 1:
            ids = torch.cat([prefix.ids[:, : branched.total_tokens], ids_of(3)], 1)
            generator.generate(ids, cache=branched, max_new_tokens=NEW)
        for now, then in zip(content_of(prefix.cache), before, strict=True):
            assert torch.equal(now, then)


def test_texts_files_and_streams(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    generator = engine.Generator(engine.SHIPPED_MODEL)
    prefix = generator.prefill("import os\nimport sys\n")
    out = prefix.generate(["def main(", "class File:"], max_new_tokens=NEW)
    ids = [tokenizer(f"import os\nimport sys\n{text}")["input_ids"] for text in ("def main(", "class File:")]
    assert out.tokens == [generator.generate([row], max_new_tokens=NEW).tokens[0] for row in ids]
    prefix.save(tmp_path / "prefix")
    again = generator.prefill(resume=tmp_path / "prefix")
    assert repr(again) == repr(prefix)
    chunks = again.stream("def main(", max_new_tokens=NEW)
    assert [token for chunk in chunks for token in chunk.tokens] == out.tokens[0]


def test_the_tokenizer_of_a_continuation():
    tokenizer = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    shipped = engine.Generator(engine.SHIPPED_MODEL)
    expected = shipped.prefill("import os\n").generate("def main(", max_new_tokens=NEW)
    prefix = engine.Generator(shipped.model).prefill(shipped.prefill("import os\n").ids)
    out = prefix.generate("def main(", tokenizer=tokenizer, max_new_tokens=NEW)
    assert (out.tokens, out.text) == (expected.tokens, expected.text)
    chunks = prefix.stream("def main(", tokenizer=tokenizer, max_new_tokens=NEW)
    assert "".join(chunk.text for chunk in chunks) == expected.text[0]


def test_what_is_no_prefix_is_refused(tmp_path, shipped):
    generator = engine.Generator(tiny_model("llama"))
    with pytest.raises(engine.InputError, match="a prefix is one prompt"):
        generator.prefill(prompt(pads=0))
    with pytest.raises(engine.InputError, match="a prefix is one prompt"):
        generator.prefill(ids_of(5), cache="none")
    prefix = generator.prefill(ids_of(5))
    for wrong in ([], [[]], [[3], []]):
        with pytest.raises(engine.InputError, match="a continuation is empty"):
            prefix.generate(wrong)
    with pytest.raises(engine.InputError, match="needs a tokenizer"):
        prefix.generate("text")
    with pytest.raises(engine.InputError, match="texts or lists of token ids"):
        shipped.prefill("import os\n").generate([{"role": "user", "content": "x"}])
    for start in (prefix.generate, prefix.stream):
        with pytest.raises(engine.OptionError, match="a prefix is in a cache already: leave cache= out"):
            start([3], cache="static")
    with pytest.raises(engine.OptionError, match="resume= brings"):
        generator.prefill(ids_of(5), resume=tmp_path)


@needs_kernels
def test_codes_are_copied_with_the_branch():
    generator = engine.Generator(tiny_model("llama"))
    options = {"cache": "quantized", "cache_config": {"residual_length": 4}}
    prefix = generator.prefill(ids_of(40), **options)
    outs = [prefix.generate([7, 8], max_new_tokens=NEW).tokens for _ in range(2)]
    assert outs[0] == outs[1]
