"""The first tokens of a row and the last: equal to keeping all keys unrotated and placing them anew in each step."""

import copy
import inspect
import sys

import pytest
import torch
import transformers
from architectures import _TINY, WINDOW, prompt, randomised, tiny_model
from encoder_decoders import source, tiny_encoder_decoder
from multimodal import seeing_model, seen_prompt

import caches
import configs
import engine

W, S, NEW = 10, 3, 20
SINK = {"cache": "sink", "cache_config": {"window_length": W, "num_sink_tokens": S}}
_LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
ROPES = {
    "linear": dict(rope_type="linear", factor=3.0),
    "llama3": _LLAMA3,
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
}
MODELS = ["llama", *ROPES, "phi", "persimmon", "glm", "cohere", "cohere2", "smollm3", "qwen3", "gemma3_text", "gemma2"]


def model_of(name: str, **more):
    """A tiny model; with the name of a rope type, a Llama with that."""
    if name not in ROPES:
        return tiny_model(name)
    return randomised("LlamaConfig", _TINY | dict(rope_parameters=ROPES[name] | dict(rope_theta=10000.0)) | more)


class SlotPositions(transformers.DynamicCache):
    """The oracle: keys as they were before they were rotated, all of them; each step rotates those that a token sees to
    the places they have in the window, by the model's own functions. Feed a token at a time beyond the window.

    true_positions: tokens are fed with the positions they have in the text, not in the window."""

    def __init__(self, model, window, sinks, true_positions=False):
        super().__init__()
        self.model, self.window, self.sinks, self.true_positions = model, window, sinks, true_positions
        self.specs = caches.read_specs(model.config)
        self.rows = {}

    @property
    def total_tokens(self):
        return self.rows[0][0].shape[2] if self.rows else 0

    def get_seq_length(self, layer_idx=0):
        return self.total_tokens

    def get_mask_sizes(self, query_length, layer_idx):
        length = min(self.total_tokens + query_length, self.window)
        return length, self.total_tokens + query_length - length

    def reorder_cache(self, beam_idx):
        self.rows = {layer: tuple(both[beam_idx] for both in held) for layer, held in self.rows.items()}

    def _rotate(self, keys, positions, layer, sign):
        spec, config = self.specs[layer], self.model.config
        nope = getattr(config, "no_rope_layers", None)
        if (nope and not nope[layer]) or (config.model_type == "cohere2" and spec.layer_type == "full_attention"):
            return keys
        rotation, module = self.model.base_model.rotary_emb, sys.modules[type(self.model).__module__]
        typed = "layer_type" in inspect.signature(rotation.forward).parameters
        # Only the angle: what a variant multiplies by has been multiplied already.
        scaling = getattr(rotation, f"{spec.layer_type}_attention_scaling" if typed else "attention_scaling")
        cos, sin = rotation(keys, positions[None], *([spec.layer_type] if typed else []))
        width = cos.shape[-1]
        part = keys[..., :width]
        part = module.apply_rotary_pos_emb(part, part, cos / scaling, sign * sin / scaling)[1]
        return torch.cat([part, keys[..., width:]], dim=-1)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        held = self.rows.get(layer_idx)
        count = key_states.shape[2]
        seen = (0 if held is None else held[0].shape[2]) + count - 1
        assert count == 1 or seen < self.window
        last = seen if self.true_positions else min(seen, self.window - 1)
        new = (self._rotate(key_states, torch.arange(last + 1 - count, last + 1), layer_idx, -1), value_states)
        held = new if held is None else tuple(torch.cat(both, dim=2) for both in zip(held, new, strict=True))
        self.rows[layer_idx] = held
        reach = self.specs[layer_idx].attention_span.size
        tokens = list(range(seen + 1))
        slots = {token: last - (seen - token) for token in tokens}
        if reach is not None and reach <= self.window:
            tokens = tokens[-reach:]
        elif seen >= self.window:
            first, begin = tokens[: self.sinks], last + 1 - self.window
            tokens = first + tokens[seen + 1 - self.window + self.sinks :]
            slots |= {token: begin + token for token in first}
        keys, values = held[0][:, :, tokens], held[1][:, :, tokens]
        return self._rotate(keys, torch.tensor([slots[token] for token in tokens]), layer_idx, 1), values


@torch.no_grad()
def oracle(model, ids, window=W, sinks=S, new=NEW):
    """Sequences [1, prompt + new] and the logits [new, vocabulary] of a row without pads."""
    cache, logits, fed = SlotPositions(model, window, sinks), [], 0
    kinds = caches.mask_kinds(model.config)
    masks = None if isinstance(kinds, str) else dict.fromkeys(kinds)
    for _ in range(new):
        for column in range(fed, ids.shape[1]):
            positions = torch.tensor([[min(column, window - 1)]])
            inputs = dict(input_ids=ids[:, column : column + 1], position_ids=positions, attention_mask=masks)
            out = model(**inputs, past_key_values=cache)
        fed = ids.shape[1]
        logits.append(out.logits[0, -1])
        ids = torch.cat([ids, out.logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids, torch.stack(logits)


def generate(model, inputs, **options):
    options = SINK | {"max_new_tokens": NEW, "output_logits": True} | options
    return engine.generate(model, inputs, **options)


def rows_alone(model, inputs, **options):
    """The oracle on each row without its pads: new tokens [rows, new] and logits [new, rows, vocabulary]."""
    found = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        real = ids[mask != 0][None]
        sequences, logits = oracle(model, real, **options)
        found.append((sequences[0, real.shape[1] :], logits))
    return torch.stack([new for new, _ in found]), torch.stack([logits for _, logits in found], dim=1)


def check_equal(out, expected):
    tokens, logits = expected
    assert torch.equal(out.tokens if isinstance(out.tokens, torch.Tensor) else torch.tensor(out.tokens), tokens)
    torch.testing.assert_close(torch.stack(out.logits), logits, atol=2e-3, rtol=1e-3)


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("tokens", [4, 23], ids=["short prompt", "prompt longer than the window"])
@pytest.mark.parametrize("name", MODELS)
def test_text_and_logits_are_those_of_placing_all_keys_anew(name, tokens):
    """Also with pads, and whether the prompt is read in long pieces or in short ones."""
    model = model_of(name)
    inputs = prompt(tokens=tokens, pads=tokens // 2)
    expected = rows_alone(model, inputs)
    plain = engine.generate(model, inputs, max_new_tokens=NEW)
    for chunk in (None, 3):
        generator = engine.Generator(model, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
        check_equal(generator.generate(inputs, **SINK, max_new_tokens=NEW, output_logits=True), expected)
    assert not torch.equal(plain.sequences[:, tokens:], expected[0])


def test_several_turns():
    model, inputs = model_of("llama"), prompt(pads=4)
    first = generate(model, inputs, max_new_tokens=9)
    ids = torch.cat([first.sequences, prompt(tokens=5, pads=0, seed=3)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 13, dtype=torch.long)], dim=1)
    for given in ({"input_ids": ids, "attention_mask": mask}, ids):
        second = engine.generate(model, given, cache=copy.deepcopy(first.cache), max_new_tokens=NEW, output_logits=True)
        check_equal(second, rows_alone(model, {"input_ids": ids, "attention_mask": mask}))


@pytest.mark.parametrize("bound", [True, False], ids=["with its config", "without"])
def test_the_classic_name(bound):
    model, inputs = model_of("llama"), prompt(pads=0)
    cache = caches.SinkCache(W, S, config=model.config if bound else None)
    assert (cache.get_max_length(), cache.get_max_cache_shape(), cache.get_seq_length()) == (W, W, 0)
    assert cache.get_usable_length(3) == 0
    out = generate(model, inputs, cache=cache, cache_config=None)
    check_equal(out, rows_alone(model, inputs))
    assert cache is out.cache
    assert cache.get_usable_length(3) == W - 3


def test_inside_the_generate_of_transformers():
    model, inputs = model_of("yarn"), prompt(tokens=6, pads=3)
    expected, _ = rows_alone(model, inputs)
    cache = caches.SinkCache(W, S, config=model.config, pads=[3, 0])
    arguments = dict(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, **arguments)[:, 6:], expected)
    first_known_column = model.generate(
        **inputs, past_key_values=caches.SinkCache(W, S, config=model.config), **arguments
    )
    assert not torch.equal(first_known_column[0, 6:], expected[0])
    with pytest.raises(caches.StepError, match=r"padding was set for 3 rows, but the step has 2"):
        model.generate(**inputs, past_key_values=caches.SinkCache(W, S, model.config, [1, 0, 0]), **arguments)
    with pytest.raises(caches.StepError, match="further back than the window of 10"):
        model.generate(**prompt(), past_key_values=caches.SinkCache(W, S, model.config), **arguments)
    with pytest.raises(caches.StepError, match=r"first tokens have to be rotated .*build it with config=model\.config"):
        model.generate(**prompt(tokens=6, pads=0), past_key_values=caches.SinkCache(W, S), **arguments)


def test_beams_inside_the_generate_of_transformers():
    """BeamState take each other's places, and their sinks with them, which differ while most of the text is sinks."""
    model, inputs = model_of("llama"), prompt(tokens=1, pads=0, rows=5, seed=1)
    found = [
        model.generate(**inputs, past_key_values=cache, num_beams=6, do_sample=False, max_new_tokens=12)
        for cache in (
            SlotPositions(model, 7, 6, true_positions=True),
            caches.SinkCache(7, 6, config=model.config),
            transformers.DynamicCache(),
        )
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_memory_stays_constant_and_positions_are_no_limit():
    model, inputs = model_of("llama"), prompt()
    sizes = {generate(model, inputs, max_new_tokens=new).stats.cache_bytes for new in (5, 50, 300)}
    assert len(sizes) == 1
    generate(model, prompt(tokens=300), max_new_tokens=3)
    with pytest.raises(engine.InputError, match="the model has 256"):
        generate(model, inputs, cache_config={"window_length": 300}, max_new_tokens=300)
    with pytest.raises(engine.InputError, match="the model has 256"):
        generate(model, inputs, cache="dynamic", cache_config=None, max_new_tokens=300)


def test_it_stays_exact_in_bfloat16_however_long_the_text():
    """Keys are rotated from how they were fed, never from how they were rotated before."""
    model = copy.deepcopy(model_of("llama")).to(torch.bfloat16)
    cache = generate(model, prompt(rows=1, pads=0), max_new_tokens=300).cache
    delta = torch.tensor([[cache.total_tokens + 1 - W]])
    must = cache.view.rotations[0].rotated(cache.layers[0].keys[:, :, :S].float(), delta)
    cache.begin(1)
    shown, _ = cache.update(*[torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)] * 2, 0)
    assert (shown[:, :, :S].float() - must).norm() / must.norm() < 0.004


@pytest.mark.parametrize(
    "name", ["gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "cohere2"))]
)
def test_a_compiled_step(name):
    model, inputs = model_of(name), prompt(tokens=12, pads=5)
    generator = engine.Generator(model, config=engine.EngineConfig(compile="aot_eager"))
    out = generator.generate(inputs, **SINK, max_new_tokens=NEW, output_logits=True)
    check_equal(out, rows_alone(model, inputs))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "no window was given: give window_length"),
        ({"window_length": 4}, "window_length=4 is a window smaller than the sinks: num_sink_tokens=4 .* or more"),
        ({"window_length": 3, "num_sink_tokens": 5}, "smaller than the sinks.*window_length=6"),
        ({"window_length": 0, "num_sink_tokens": 0}, "window_length=0, but it has to be at least 1"),
        ({"window_length": 5, "num_sink_tokens": -1}, "num_sink_tokens=-1"),
    ],
)
def test_impossible_windows(options, match):
    with pytest.raises((configs.ConfigError, caches.UnsupportedLayerError), match=match):
        caches.build("sink", tiny_model("llama").config, **options)


_DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
_LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, rope_theta=10000.0,
             original_max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gpt2", {}, r"keys of layer 0 \(full_attention\) have no rotation that the code of 'gpt2' shows"),
        ("opt", {}, "have no rotation"),
        ("bloom", {}, "have no rotation"),
        ("falcon_alibi", {}, "ALiBi"),
        ("deepseek_v3", {}, "latent"),
        ("deepseek_v32", {}, "keeps an index"),
        ("mamba", {}, "the model has none: cache='mamba'"),
        ("llama4_text", {}, "looks at chunks"),
        ("mistral", {}, f"own window of {WINDOW}.*Use cache='sliding_window'"),
        ("llama", dict(rope_parameters=_DYNAMIC), "depend on the length of the text .rope_type='dynamic'"),
        ("llama", dict(rope_parameters=_LONG), "rope_type='longrope'"),
        ("llama", dict(alibi=True), "ALiBi"),
    ],
)
def test_models_whose_first_tokens_cannot_be_moved(name, changes, match):
    """They are as usable afterwards as before."""
    model = copy.deepcopy(tiny_model(name))
    usual = engine.generate(model, prompt(), max_new_tokens=5).sequences
    for field, value in changes.items():
        setattr(model.config, field, value)
    with pytest.raises(caches.UnsupportedLayerError, match=match):
        generate(model, prompt())
    for field in changes:
        setattr(model.config, field, getattr(tiny_model(name).config, field, None))
    assert torch.equal(engine.generate(model, prompt(), max_new_tokens=5).sequences, usual)


def test_models_with_an_encoder_or_with_images():
    with pytest.raises(caches.UnsupportedLayerError, match="have no rotation"):
        engine.generate(tiny_encoder_decoder("t5"), **source("t5"), max_new_tokens=3, **SINK)
    with pytest.raises(caches.UnsupportedLayerError, match="are rotated by positions in several dimensions"):
        engine.generate(seeing_model("qwen2_vl"), seen_prompt("qwen2_vl"), max_new_tokens=3, **SINK)


def test_keys_that_turn_otherwise_than_the_configuration_says():
    """Found out before the first token, by executor the model."""
    model = copy.deepcopy(tiny_model("llama"))
    model.model.rotary_emb.inv_freq *= 0.5
    with pytest.raises(
        caches.UnsupportedLayerError, match=r"layer 0 .* LlamaForCausalLM are not rotated as .* off by \d+%"
    ):
        generate(model, prompt())


def test_rows_that_ended_early_do_not_go_on_together():
    model, inputs = model_of("llama"), prompt(pads=0)
    ends, other = generate(model, inputs, max_new_tokens=9).tokens
    end = next(token for token in ends[:6] if token not in other)
    first = generate(model, inputs, max_new_tokens=9, eos_token_id=end)
    ids = torch.nn.functional.pad(first.sequences, (0, 1), value=5)
    with pytest.raises(engine.InputError, match="row 0 has padding between its tokens"):
        engine.generate(model, ids, cache=first.cache, max_new_tokens=3)


def test_gaps_in_a_text_are_refused():
    model, inputs = model_of("llama"), prompt(pads=2)
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    check_equal(generate(model, inputs | {"position_ids": positions}), rows_alone(model, inputs))
    with pytest.raises(engine.InputError, match="do not count the tokens one by one"):
        generate(model, inputs | {"position_ids": positions * 2})
    inputs["attention_mask"][1, 5] = 0
    with pytest.raises(engine.InputError, match="padding after the first token of row 1"):
        generate(model, inputs)


def test_a_model_without_keys_and_values_told_later():
    """A `SinkCache` that is built without a configuration learns of its layers with the first call."""
    with pytest.raises(caches.UnsupportedLayerError, match="no layer of this model keeps any"):
        engine.generate(tiny_model("mamba2"), torch.tensor([[3, 4, 5]]), cache=caches.SinkCache(W, S))


@pytest.mark.parametrize("move", [caches.convert, caches.migrate])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"name": "sink", "num_sink_tokens": S}, {"name": "sliding_window"}),
        ({"name": "sliding_window"}, {"name": "sink", "num_sink_tokens": S}),
        ({"name": "sink", "num_sink_tokens": S}, {"name": "sink", "num_sink_tokens": S - 1}),
    ],
    ids=lambda options: f"{options['name']} {options.get('num_sink_tokens', 0)}",
)
def test_a_window_that_has_moved_goes_to_no_backend_with_other_sinks(move, old, new):
    model, ids = tiny_model("llama"), prompt(rows=1, pads=0)["input_ids"]
    for tokens, moves in ((W - 4, True), (W + 4, False)):
        window = {"window_length": W}
        config = configs.CacheConfig.from_dict(old | window)
        cache = engine.generate(model, ids[:, :2], cache=config, max_new_tokens=tokens).cache
        if moves:
            assert move(cache, **new | window).total_tokens == tokens + 1
            continue
        with pytest.raises(caches.StepError, match=r"the first \d tokens of each row, and the other .* the first \d"):
            move(cache, **new | window)
        assert cache.total_tokens == tokens + 1  # it stays as it is
        if old["name"] == "sink":
            with pytest.raises(caches.StepError, match="are missing"):
                move(cache, "dynamic")
