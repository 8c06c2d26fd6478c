"""`Generator.score`: log probabilities of texts, beside transformers' loss and a model that reads token by token."""

import copy
import json
import math
import weakref

import architectures
import pytest
import torch
from architectures import randomised, tiny_model
from encoder_decoders import tiny_encoder_decoder

import engine

LOSSY = {
    "quantized": {"cache": "quantized", "cache_config": {"nbits": 2, "residual_length": 1, "q_group_size": 8}},
    "sinks": {"cache": "sink", "cache_config": {"window_length": 8}},
}


def texts(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def loss(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()


@pytest.mark.parametrize("kind", ["llama", "mistral", "mamba2", "bamba"])
def test_the_perplexity_is_that_of_transformers_loss(kind):
    model, ids = tiny_model(kind), texts(30, 2, 17, 70)
    scores = engine.Generator(model).score(ids, rows=3)
    for score, row in zip(scores, ids, strict=True):
        assert score.tokens == tuple(row)
        assert len(score.logprobs) == len(row) - 1
        assert math.log(score.perplexity) == pytest.approx(loss(model, row), rel=1e-4)
    found = json.loads(json.dumps(scores[1].to_dict()))
    assert found["logprob"] == scores[1].logprobs[0] == scores[1].logprob


RARE = sorted({*architectures.MORE_ARCHITECTURES, *architectures.RARE_ARCHITECTURES} - {"mamba2", "bamba"})
NOT_IN_PIECES = {"doge", "doge_moe", "moshi", "prophetnet"}
# Their own forward counts positions otherwise than transformers' `generate`, which gives them.
COUNTING = {"camembert", "data2vec_text", "roberta", "roberta_prelayernorm", "xlm_roberta", "xlm_roberta_xl", "xmod"}


def in_one_forward(model, ids, **given):
    with torch.no_grad():
        logits = model(torch.tensor([ids]), **given).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "kind",
    [*architectures.ARCHITECTURES, "mamba2", "bamba", *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARE)],
)
def test_every_token_has_the_log_probability_of_one_forward(kind):
    if not hasattr(architectures.transformers, architectures.config_of(kind)):
        pytest.skip("this release of transformers does not know it")
    model, rows = tiny_model(kind), texts(30, 21)
    gen = engine.Generator(model)
    if kind in NOT_IN_PIECES:
        with pytest.raises(engine.InputError, match="a text is read piece by piece here, and in"):
            gen.score(rows)
        return
    for score, ids in zip(gen.score(rows, piece_tokens=7), rows, strict=True):
        given = {"position_ids": torch.arange(len(ids))[None]} if kind in COUNTING else {}
        expected = in_one_forward(model, ids, **given)
        most = 1e-4 if kind in RARE else 1e-5
        close = [abs(found - value) < most for found, value in zip(score.logprobs, expected, strict=True)]
        # Of equal scores the indexer of this model takes either token.
        assert close.count(False) <= (1 if kind == "deepseek_v32" else 0)


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "offloaded_static", "none", "auto"])
def test_lossless_caches_give_the_same(cache):
    gen, rows = engine.Generator(tiny_model("llama")), texts(30, 21)
    for score, expected in zip(gen.score(rows, piece_tokens=7, cache=cache), gen.score(rows), strict=True):
        assert score.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("piece_tokens", [1, 5, 64])
def test_a_window_is_a_mask(piece_tokens):
    model, [ids] = tiny_model("llama"), texts(30)
    behind = torch.arange(30)[:, None] - torch.arange(30)
    expected = in_one_forward(model, ids, attention_mask=((behind >= 0) & (behind < 8))[None, None])
    window = {"cache": "sliding_window", "cache_config": {"window_length": 8}}
    [score] = engine.Generator(model).score([ids], piece_tokens=piece_tokens, **window)
    assert score.logprobs == pytest.approx(expected, abs=1e-5)


def test_logits_of_a_piece_alone_exist():
    model, most = copy.deepcopy(tiny_model("llama")), []
    logits = weakref.WeakSet()

    def note(*given):
        logits.add(given[2])
        most.append(sum(tensor.shape[1] for tensor in logits))

    model.lm_head.register_forward_hook(note)
    engine.Generator(model).score(texts(101), piece_tokens=10)
    assert most[-10:] == pytest.approx([10] * 10, abs=10)
    assert len(most) >= 10


def test_a_long_text_does_not_change_a_short_one():
    """Dynamic RoPE: the keys of a text depend on the longest one that is read with it."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    arguments = architectures.ARCHITECTURES["llama"][1] | {"rope_parameters": rope, "max_position_embeddings": 24}
    model, rows = randomised("LlamaConfig", arguments), texts(60, 12)
    _, short = engine.Generator(model).score(rows, piece_tokens=60)
    assert short.logprobs == pytest.approx(in_one_forward(copy.deepcopy(model), rows[1]), abs=1e-5)


@pytest.mark.parametrize("cache", LOSSY)
def test_what_a_cache_loses_counts(cache):
    """Token by token it is what a run gets that generates the text."""
    gen, [ids] = engine.Generator(tiny_model("llama")), texts(24)
    out = gen.generate([ids[:1]], max_new_tokens=23, prefix_allowed_tokens_fn=lambda _, so_far: [ids[len(so_far)]],
                       output_logits=True, eos_token_id=[], **LOSSY[cache])  # fmt: skip
    expected = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, ids[1:], strict=True)]
    [score] = gen.score([ids], piece_tokens=1, **LOSSY[cache])
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    exact, [in_pieces] = gen.score([ids])[0].logprob, gen.score([ids], piece_tokens=8, **LOSSY[cache])
    assert abs(in_pieces.logprob - exact) > 1e-4
    assert in_pieces.logprobs[:7] == pytest.approx(gen.score([ids])[0].logprobs[:7], abs=1e-4)


def test_the_models_own_settings_change_nothing():
    gen, [ids] = engine.Generator(tiny_model("llama")), texts(20)
    expected = gen.score([ids])[0].logprobs
    settings = {"do_sample": True, "num_beams": 4, "repetition_penalty": 1.5, "eos_token_id": ids[5], "max_length": 5}
    settings["num_return_sequences"] = 2
    before = dict(vars(gen.model.generation_config))
    try:
        gen.model.generation_config.update(**settings)
        assert gen.score([ids])[0].logprobs == expected
    finally:
        vars(gen.model.generation_config).update(before)


def test_texts(shipped):
    gen = shipped
    one, two = gen.score(["import os\n", "def main():\n    return 0\n"])
    assert list(one.tokens) == gen.tokenizer("import os\n")["input_ids"]
    [alone] = gen.score("import os\n")
    assert alone.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert gen.score([]) == []
    for ids in (one.tokens, list(one.tokens), torch.tensor(one.tokens), torch.tensor([one.tokens])):
        assert gen.score(ids)[0].tokens == one.tokens
    assert one.perplexity < gen.score("os import\n")[0].perplexity
    assert len(two.logprobs) > len(one.logprobs)


@pytest.mark.parametrize(
    ("given", "options", "match"),
    [
        ([[5, 6], [7]], {}, r"^texts\[1\] has 1 token, and a score begins with the second one"),
        ([[5, 6], []], {}, r"^texts\[1\] has 0 tokens"),
        (7, {}, "^texts=7: give a text, its token ids, or a list of texts"),
        (["a", 5], {}, r"tokenizer"),
        ([[5, 6], 5], {}, r"^texts\[1\]=5: give a text or a list of token ids"),
        (["a text"], {}, "tokenizer"),
        ([[5, 10**6]], {}, "outside the model's vocabulary"),
        ([[5, 6]], {"rows": 0}, "^rows=0: give a whole number"),
        ([[5, 6]], {"piece_tokens": 0.5}, "^piece_tokens=0.5: give"),
        ([[5, 6]], {"cache": object()}, "begins with an empty cache"),
    ],
    ids=[
        "one token",
        "none",
        "number",
        "text and id",
        "ids and id",
        "no tokenizer",
        "vocabulary",
        "rows",
        "pieces",
        "cache",
    ],
)
def test_refusals(given, options, match):
    with pytest.raises(engine.EngineError, match=match):
        engine.Generator(tiny_model("llama")).score(given, **options)


def test_a_text_that_is_too_long_is_refused_before_the_others_are_read(shipped):
    calls = []
    hook = shipped.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(engine.InputError, match="positions, but the model has 2,048"):
            shipped.score([[5, 6, 7], [5] * 3000, [8, 9]], rows=1)
    finally:
        hook.remove()
    assert not calls


@pytest.mark.parametrize(
    "changed",
    [
        lambda logits: logits * 1e6,
        lambda logits: logits.index_fill(-1, torch.arange(1, logits.shape[-1]), -torch.inf),
    ],
    ids=["finite", "none"],
)
def test_texts_without_a_likelihood(changed):
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.register_forward_hook(lambda *given: changed(given[2]))
    gen = engine.Generator(model)
    [scored] = gen.score(texts(20)[:1])
    assert scored.perplexity == float("inf")
    json.dumps(scored.to_dict(), allow_nan=False)
    out = gen.generate([[5, 6]], max_new_tokens=2, top_logprobs=3)
    json.dumps(out.to_dict(), allow_nan=False)
    chunks = gen.stream([[5, 6]], max_new_tokens=2, top_logprobs=3)
    json.dumps([chunk.to_dict() for chunk in chunks], allow_nan=False)


def test_models_with_an_encoder_are_refused():
    with pytest.raises(engine.InputError, match="has an encoder, so a text alone has no score"):
        engine.Generator(tiny_encoder_decoder("t5")).score([[5, 6, 7]])
