"""Caches and results of every backend, copied, written down and read back by pickle, by torch and from files."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from kept import MODELS, NEW, PAIRS, cases, options_of
from transformers import DynamicCache

import caches
import engine
from configs import CODECS, ConfigError


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def from_file(result, model, folder):
    result.cache.save(folder / "cache")
    return dataclasses.replace(result, cache=caches.load(folder / "cache", model))


@pytest.mark.parametrize(("backend", "residency"), list(cases()))
def test_a_run_goes_on_from_what_was_written_down(backend, residency, tmp_path):
    runs, most = 0, {"dynamic": len(MODELS), "offloaded": 2}.get(backend, 1)
    for name in MODELS if residency == "host" else MODELS[:1]:
        if runs == most:
            break
        model, inputs = tiny_model(name), prompt(tokens=14)
        options = {"cache": backend, "cache_config": options_of(backend, residency), "max_new_tokens": NEW}
        try:
            first = engine.generate(model, inputs, **options)
        except (caches.UnsupportedLayerError, ConfigError):
            continue
        copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)] + ([saved(first)] if runs == 0 else [])
        if first.cache is not None:
            copies.append(from_file(first, model, tmp_path))
        go_on = {"max_new_tokens": NEW} if first.cache is not None else options
        cache = {} if first.cache is None else {"cache": copy.deepcopy(first.cache)}
        expected = engine.generate(model, first.sequences, **go_on, **cache).sequences
        for one in copies:
            assert torch.equal(one.sequences, first.sequences)
            cache = {} if one.cache is None else {"cache": one.cache}
            second = engine.generate(model, one.sequences, **go_on, **cache)
            assert torch.equal(second.sequences, expected)
            assert one.cache is None or second.stats.prompt_tokens == 2
            assert second.stats.cache == first.stats.cache
        runs += 1
    assert runs or backend == "encoder_decoder"


def codecs():
    for backend in caches.names():
        if "backend" in caches.recipe(backend).options.option_names():
            for codec, facts in CODECS.items():
                for bits in facts.bits:
                    is_rare = bits != facts.bits[0] and backend != "quantized"
                    yield pytest.param(backend, codec, bits, marks=[pytest.mark.slow] if is_rare else [])


@pytest.mark.parametrize(("backend", "codec", "bits"), list(codecs()), ids=str)
def test_codes_of_every_codec_are_pickled(backend, codec, bits):
    model, inputs = tiny_model("llama"), prompt(tokens=14)
    options = options_of(backend, "host") | {"backend": codec, "nbits": bits}
    first = engine.generate(model, inputs, cache=backend, cache_config=options, max_new_tokens=NEW)
    kept = [part.tensors() for part in first.cache.layers]
    assert any(tensor.dtype in (torch.uint8, torch.float8_e4m3fn) for tensors in kept for tensor in tensors)
    texts = [
        engine.generate(model, first.sequences, cache=cache, max_new_tokens=NEW).tokens
        for cache in (pickle.loads(pickle.dumps(first.cache)), saved(first.cache), first.cache)
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("choice", PAIRS.values(), ids=PAIRS)
def test_of_an_encoder_too(choice, tmp_path):
    model, inputs = tiny_encoder_decoder("bart"), source("bart")
    first = engine.generate(model, inputs, **choice, max_new_tokens=NEW, output_hidden_states=True, num_beams=2)
    options = {"decoder_input_ids": first.sequences, "max_new_tokens": NEW}
    expected = engine.generate(model, inputs, **options).sequences
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first), saved(first)]
    for one in (*copies, from_file(first, model, tmp_path)):
        for field in ("hidden_states", "encoder_hidden_states", "sequences_scores", "beam_indices"):
            torch.testing.assert_close(getattr(one, field), getattr(first, field), rtol=0, atol=0)
        assert (one.stats, one.tokens, repr(one)) == (first.stats, first.tokens, repr(first))
        assert torch.equal(engine.generate(model, inputs, **options, cache=one.cache).sequences, expected)


def test_a_cache_of_transformers_is_compared_when_it_comes_back():
    model, inputs = tiny_model("llama"), prompt(pads=0)
    first = engine.generate(model, inputs, cache=DynamicCache(config=model.config), max_new_tokens=NEW)
    back = pickle.loads(pickle.dumps(first))
    wrong, mask = back.sequences.clone(), torch.ones_like(back.sequences)
    wrong[1, 3] += 1
    with pytest.raises(engine.InputError, match="differ from token 3 on"):
        engine.generate(model, wrong, attention_mask=mask, cache=back.cache, max_new_tokens=NEW)
    second = engine.generate(model, back.sequences, attention_mask=mask, cache=back.cache, max_new_tokens=NEW)
    assert second.stats.prompt_tokens == 2


def test_rows_that_share_a_prefix():
    model, inputs = tiny_model("llama"), prompt(rows=1, pads=0)
    out = engine.generate(model, inputs, do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
    back = pickle.loads(pickle.dumps(out))
    expected = engine.generate(model, out.sequences, max_new_tokens=NEW).sequences
    assert torch.equal(engine.generate(model, back.sequences, cache=back.cache, max_new_tokens=NEW).sequences, expected)
