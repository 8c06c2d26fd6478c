"""A cache that our engine has not filled: its content is compared with the prompt, and refused where it is another."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, prompt, randomised, tiny_model
from transformers import DynamicCache, StaticCache

import caches
import engine
from engine.request.inputs import continuation

NEW = 4
FILLED = {
    "ours": lambda config: caches.build("dynamic", config),
    "static": lambda config: caches.build("static", config, max_cache_len=40),
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=40),
}


@torch.no_grad()
def filled(model, inputs, cache):
    """By a plain call."""
    mask = inputs["attention_mask"]
    model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    return cache


def longer(inputs, tokens=3):
    new = prompt(tokens=tokens, pads=0, seed=5)["input_ids"][: len(inputs["input_ids"])]
    ids = torch.cat([inputs["input_ids"], new], dim=1)
    return {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(new)], dim=1)}


@pytest.mark.parametrize("make", FILLED.values(), ids=FILLED)
@pytest.mark.parametrize("fed_by", ["a plain call", "model.generate"])
def test_another_prompt_is_refused(make, fed_by, monkeypatch):
    monkeypatch.setattr(continuation, "_PIECE", 8)  # in several pieces
    model, inputs = tiny_model("llama"), prompt()
    if fed_by == "a plain call":
        cache, ids = filled(model, inputs, make(model.config)), inputs["input_ids"]
    else:
        cache = make(model.config)
        ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, past_key_values=cache)[:, :-1]
    whole = longer({"input_ids": ids, "attention_mask": (ids != 0).long()})
    for row, column in [(0, 4), (1, 0), (1, 11)]:
        other = copy.deepcopy(whole)
        other["input_ids"][row, column] += 1
        with pytest.raises(engine.InputError, match=rf"differ from token {column} on, in row {row} .* there, among"):
            engine.generate(model, other, cache=copy.deepcopy(cache), max_new_tokens=NEW)
    out = engine.generate(model, whole, cache=cache, max_new_tokens=NEW)
    assert torch.equal(out.sequences, model.generate(**whole, max_new_tokens=NEW, do_sample=False))
    assert out.stats.prompt_tokens == 2 * 3


@pytest.mark.parametrize(
    ("name", "pads", "reason"),
    [
        ("mistral", 0, "its first layer holds the last 7 of 13 tokens"),
        ("gemma2", 0, "its first layer holds the last 7 of 13 tokens"),
        ("bamba", 0, r"its first layer keeps no keys \(linear_attention\)"),
        ("falcon_h1", 0, "the first layer of FalconH1ForCausalLM does not begin with the keys"),
        ("bloom", 4, "row 0 has padding, and the keys of this model do not tell whether it was masked"),
    ],
)
def test_what_cannot_be_checked_needs_trust(name, pads, reason):
    model, inputs = tiny_model(name), prompt(pads=pads)
    cache, whole = caches.build("dynamic", model.config), longer(inputs)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    with pytest.raises(engine.InputError, match=f"cannot be checked: {reason}.*trust_cache=True"):
        engine.generate(model, whole, cache=cache, max_new_tokens=NEW)
    out = engine.generate(model, whole, cache=cache, trust_cache=True, max_new_tokens=NEW)
    assert torch.equal(out.sequences, model.generate(**whole, max_new_tokens=NEW, do_sample=False))
    assert out.stats.prompt_tokens == 2 * 3
    third = longer({"input_ids": out.sequences, "attention_mask": (out.sequences != 0).long()})
    assert engine.generate(model, third, cache=out.cache, max_new_tokens=NEW).stats.prompt_tokens == 2 * 4


def test_trust_is_for_a_live_cache_of_unknown_content():
    model, inputs = tiny_model("llama"), prompt()
    with pytest.raises(engine.OptionError, match="trust_cache=True is about a live cache"):
        engine.generate(model, inputs, trust_cache=True, max_new_tokens=NEW)
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    other = first.sequences.clone()
    other[1, 5] += 1
    with pytest.raises(engine.InputError, match=r"differ from token 5 on, in row 1 \(the prompt has .* the cache"):
        engine.generate(model, other, cache=first.cache, trust_cache=True, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["llama", "mistral", "mamba2"])
@pytest.mark.parametrize("make", [FILLED["DynamicCache"], FILLED["StaticCache"]], ids=["DynamicCache", "StaticCache"])
def test_what_a_run_of_ours_left_in_a_cache_of_transformers_is_remembered(name, make):
    """Also where it could not be compared, until another loop feeds it."""
    model, inputs = tiny_model(name), prompt()
    theirs = make(model.config)
    first = engine.generate(model, inputs, cache=theirs, max_new_tokens=NEW)
    second = engine.generate(model, first.sequences, cache=theirs, max_new_tokens=NEW)
    assert torch.equal(second.sequences, model.generate(**inputs, max_new_tokens=2 * NEW, do_sample=False))
    assert second.stats.prompt_tokens == 2
    other = second.sequences.clone()
    other[1, 5] += 1
    with pytest.raises(engine.InputError, match="differ from token 5 on"):
        engine.generate(model, other, cache=theirs, max_new_tokens=NEW)
    if name == "llama":
        with torch.no_grad():
            model(second.sequences[:, -1:], past_key_values=theirs)
        whole = torch.cat([second.sequences, other[:, -1:]], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2 * NEW + 1)], dim=1)
        with pytest.raises(engine.InputError, match="differ from token 20 on, in row 0"):  # it has pads before
            engine.generate(model, whole, attention_mask=mask, cache=theirs, max_new_tokens=NEW)


def test_what_another_model_has_read_is_refused():
    model, inputs = tiny_model("llama"), prompt()
    other = copy.deepcopy(model)
    other.model.layers[3].mlp.down_proj.weight.data.mul_(2)  # of which the first layer tells nothing
    first = engine.generate(model, inputs, max_new_tokens=NEW)
    with pytest.raises(engine.InputError, match="another model object has filled it"):
        engine.generate(other, first.sequences, cache=first.cache, max_new_tokens=NEW)
    wrong = first.sequences.clone()
    wrong[1, 5] += 1
    with pytest.raises(engine.InputError, match="differ from token 5 on"):
        engine.generate(other, wrong, cache=first.cache, trust_cache=True, max_new_tokens=NEW)
    trusted = engine.generate(other, first.sequences, cache=copy.deepcopy(first.cache), trust_cache=True)
    assert trusted.stats.prompt_tokens == 2
    other.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    with pytest.raises(engine.InputError, match="differ from token 0 on"):
        engine.generate(other, longer(inputs), cache=filled(model, inputs, FILLED["ours"](model.config)))


def test_other_positions_are_refused():
    model, inputs = tiny_model("llama"), prompt(pads=0)
    apart = torch.arange(13).expand(2, 13) * 2
    first = engine.generate(model, inputs, position_ids=apart, max_new_tokens=NEW)
    with pytest.raises(engine.InputError, match="differ from token 1 on"):
        engine.generate(model, first.sequences, cache=first.cache, max_new_tokens=NEW)
    positions = torch.cat([apart, apart[:, -1:] + torch.arange(1, NEW + 1)], dim=1)
    whole = {"input_ids": first.sequences, "position_ids": positions, "attention_mask": torch.ones(2, 17)}
    second = engine.generate(model, whole, cache=first.cache, max_new_tokens=NEW)
    assert torch.equal(second.sequences, engine.generate(model, whole, max_new_tokens=NEW).sequences)


def test_embeddings_are_compared():
    model, inputs = tiny_model("llama"), prompt()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = inputs["attention_mask"]
    first = engine.generate(model, inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW)
    new = model.get_input_embeddings()(first.sequences).detach()
    whole = {"inputs_embeds": torch.cat([embeds, new], dim=1), "attention_mask": torch.ones(2, 17)}
    whole["attention_mask"][:, :13] = mask
    wrong = whole | {"inputs_embeds": whole["inputs_embeds"].clone()}
    wrong["inputs_embeds"][1, 7] *= 1.5  # a norm comes first: only the direction counts
    wrong["inputs_embeds"][1, 8, :16] *= 1.5
    with pytest.raises(engine.InputError, match="differ from token 8 on, in row 1"):
        engine.generate(model, wrong, cache=first.cache, max_new_tokens=NEW)
    second = engine.generate(model, whole, cache=first.cache, max_new_tokens=NEW)
    assert torch.equal(second.sequences, model.generate(**whole, max_new_tokens=NEW, do_sample=False))


CODECS = [("kivi", 2), ("kivi", 4), ("kivi", 8), ("fp8", 8), ("quanto", 2), ("quanto", 4), ("hqq", 2), ("hqq", 3)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("codec", "bits"), CODECS, ids=str)
def test_codes_are_compared_to_the_rounding_of_their_codec(name, codec, bits):
    """Own tokens are never refused, in blocks cut off or whole, and of 600 changed ones each is noticed."""
    model = tiny_model(name)
    options = {"backend": codec, "nbits": bits, "residual_length": 4, "q_group_size": 8}
    cache = caches.build("quantized", model.config, **options)
    numbers = torch.Generator().manual_seed(bits)
    ids = torch.randint(2, 99, (3, 60), generator=numbers)
    with torch.no_grad():
        for begin in range(0, 36, 3):
            model(ids[:, begin : begin + 3], past_key_values=cache)
        cache.crop(29)
        model(ids[:, 29:], past_key_values=cache)
    runner = engine.Generator(model)._runner
    columns = continuation.Columns(torch.ones_like(ids), 60)
    held = caches.first_layer(cache)[0]
    assert held[0].exact > 48

    def differ(others):
        made = runner.first_keys(others, columns, 0, 60, continuation.ModelInputs())
        return held[0].differ(made[0], 0) | held[1].differ(made[1], 0)

    assert not differ(ids).any()
    others = [torch.randint(2, 99, ids.shape, generator=numbers) for _ in range(4)]
    changed = torch.stack([other != ids for other in others])
    assert int(changed.sum()) > 600
    assert torch.equal(torch.stack([differ(other) for other in others]), changed)


def test_codes_of_one_bit_say_too_little():
    model, inputs = randomised(*ARCHITECTURES["llama"]), prompt(pads=0)
    cache = caches.build("quantized", model.config, backend="hqq", nbits=1, residual_length=2, q_group_size=8)
    filled(model, inputs, cache)
    with pytest.raises(engine.InputError, match="codes of 1 bit do not distinguish tokens"):
        engine.generate(model, longer(inputs), cache=cache, max_new_tokens=NEW)
