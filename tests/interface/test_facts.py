"""What is so of a model is tried: the text of every row is that of the row alone, or the call is refused."""

import copy

import pytest
import torch
import transformers
from architectures import (
    _EXPERTS,
    _TINY,
    ARCHITECTURES,
    MORE_ARCHITECTURES,
    RARE_ARCHITECTURES,
    ids_of,
    prompt,
    randomised,
)
from exotic import MODELS
from multimodal import SPECIAL, seeing_model
from pages import check_generated

import caches
import engine
from engine.model import trials
from engine.model.facts import _WHYS

NEW = 5
REFUSALS = (engine.InputError, engine.OptionError, caches.UnsupportedLayerError)
_SMALL = dict(vocab_size=101, hidden_size=32)
MORE = MODELS | {
    "recurrent_gemma": ("RecurrentGemmaConfig", _TINY | dict(
        num_hidden_layers=3, lru_width=32, attention_window_size=64, block_types=["recurrent", "attention"])),
    "minimax": ("MiniMaxConfig", _EXPERTS | dict(block_size=4, layer_types=["full_attention", "linear_attention"])),
    "cpmant": ("CpmAntConfig", _SMALL | dict(
        num_attention_heads=4, dim_head=8, dim_ff=64, num_hidden_layers=2, position_bias_num_buckets=32,
        position_bias_max_distance=64, prompt_types=8, prompt_length=4, segment_types=8)),
    "xlnet": ("XLNetConfig", dict(vocab_size=101, d_model=32, n_layer=2, n_head=4, d_inner=64)),
    "paligemma": None,
}  # fmt: skip
EVERY = ARCHITECTURES | MORE_ARCHITECTURES | RARE_ARCHITECTURES | MORE
USUAL = ("llama", "gemma2", "gpt_neo", "mpt", "jamba", "mamba2", "recurrent_gemma", "paligemma", "xlnet")
ALONE = ("recurrent_gemma", "paligemma")  # of these two prompts at once, too: that plans, which takes seconds
_made = {}


def made(name):
    if name not in _made:
        if name == "paligemma":
            _made[name] = seeing_model(name)
        else:
            if not hasattr(transformers, EVERY[name][0]):
                pytest.skip("this release of transformers does not know it yet")
            _made[name] = randomised(*EVERY[name])
    return _made[name]


class Calls:
    """Calls of one model, each of one row of ids [1, tokens]."""

    def __init__(self, model):
        self.generator = engine.Generator(model)
        takes_one = self.generator._runner.takes_cache and model.config.model_type != "cpmant"  # which writes more
        self.cache = "dynamic" if takes_one else "none"
        # A text without pad ids: without a mask they would be pads.
        unwanted = [0, *SPECIAL] if model.config.model_type == "paligemma" else [0]
        self.options = {"cache": self.cache, "max_new_tokens": NEW, "suppress_tokens": unwanted}

    def text(self, ids, **more):
        return self.generator.generate(ids, **self.options | more).tokens[0]

    def rest(self, ids, cache, **more):
        return self.generator.generate(ids, **self.options | {"cache": cache} | more)


def ragged_prefix(calls):
    first, rows = ids_of(9, 0), [[5, 6, 7, 8], [9]]
    options = {name: value for name, value in calls.options.items() if name != "cache"}
    out = calls.generator.prefill(first, cache=calls.cache).generate(rows, **options)
    return out.tokens, [calls.text(torch.cat([first, torch.tensor([row])], dim=1)) for row in rows]


def prompt_in_pieces(calls):
    return [calls.text(ids_of(13, 1), prefill_chunk_size=4)], [calls.text(ids_of(13, 1))]


def batch(calls):
    rows = [ids_of(12, 2), ids_of(7, 3)]
    requests = list(calls.generator.generate_many(rows, slots=2, **calls.options))
    texts = {request.index: request.result().tokens[0] for request in requests}
    return [texts[0], texts[1]], [calls.text(ids) for ids in rows]


def turn_after_an_early_end(calls):
    rows = torch.cat([ids_of(8, 4), ids_of(8, 5)])
    alone = [calls.text(row[None]) for row in rows]
    end = next((token for token in alone[0][:-1] if token not in alone[1]), None)
    if end is None:
        pytest.skip("no row can end before the other")
    out = calls.generator.generate(rows, **calls.options | {"eos_token_id": end, "pad_token_id": 0})
    told = [out.tokens[0], out.tokens[1]]
    assert len(told[0]) < len(told[1])
    new = torch.tensor([[7, 8, 9], [4, 5, 6]])
    texts = calls.rest(torch.cat([out.sequences, new], dim=1), out.cache).tokens
    whole = [torch.cat([rows[row], torch.tensor(told[row]), new[row]])[None] for row in (0, 1)]
    return texts, [calls.text(ids) for ids in whole]


def next_turn(calls):
    first = calls.generator.generate(ids_of(8, 6), **calls.options)
    calls.text(ids_of(6, 7))
    ids = torch.cat([first.sequences, ids_of(4, 8)], dim=1)
    return [calls.rest(ids, first.cache).tokens[0]], [calls.text(ids)]


def interrupted_stream(calls):
    expected = calls.text(ids_of(9, 9))
    stream = calls.generator.stream(ids_of(9, 9), **calls.options)
    next(stream)
    calls.text(ids_of(6, 7))
    list(stream)
    return [stream.result().tokens[0]], [expected]


def prompt_lookup(calls):
    ids = torch.cat([ids_of(6, 10)] * 2, dim=1)
    return [calls.text(ids, prompt_lookup_num_tokens=3)], [calls.text(ids)]


OPERATIONS = [
    ragged_prefix,
    prompt_in_pieces,
    batch,
    turn_after_an_early_end,
    next_turn,
    interrupted_stream,
    prompt_lookup,
]


def _marks(number, name, operation):
    """Of a rare model the full run has two operations, by its number, the nightly run all."""
    if name in USUAL:
        return pytest.mark.slow if operation is batch and name not in ALONE else ()
    place = (OPERATIONS.index(operation) - number) % len(OPERATIONS)
    return pytest.mark.slow if place < 2 else pytest.mark.product


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        pytest.param(name, operation, marks=_marks(number, name, operation))
        for number, name in enumerate(EVERY)
        for operation in OPERATIONS
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_row_has_the_text_that_it_has_alone_or_is_refused(name, operation):
    calls = Calls(made(name))
    if calls.cache == "none" and operation in (turn_after_an_early_end, next_turn, prompt_lookup):
        pytest.skip("there is no cache to go on from, and logits behind the last token alone")
    try:
        texts, expected = operation(calls)
    except REFUSALS:
        texts = expected = None  # before any work: later errors are others
    assert texts == expected
    assert texts is not None or name != "llama"


_STACK = dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2,
    max_position_embeddings=256,
)  # fmt: skip
_BYTES = _STACK | dict(vocab_size=101, hidden_size_global=32, k=2, cross_attn_k=1)
BLT = ("BltConfig", dict(
    vocab_size=101, max_position_embeddings=256, cross_attn_k=1, encoder_hash_byte_group_size=[3],
    encoder_hash_byte_group_vocab=50, encoder_hash_byte_group_nb_functions=1,
    patcher_config=_STACK | dict(vocab_size=101), encoder_config=_BYTES, decoder_config=_BYTES, global_config=_STACK,
))  # fmt: skip
DIVERSE = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
TOKENS_PROPOSED = [{"prompt_lookup_num_tokens": 3}, {"penalty_alpha": 0.5, "top_k": 3}]


@pytest.mark.parametrize("options", [{"num_beams": 3}, DIVERSE, *TOKENS_PROPOSED], ids=str)
@pytest.mark.parametrize("name", ["cpmant", "blt", "xlnet"])
def test_what_a_model_cannot_do_is_refused_before_any_token(name, options):
    model = made(name) if name != "blt" else randomised(*BLT)
    if name == "xlnet" and options not in TOKENS_PROPOSED:
        pytest.skip("which it can")
    with pytest.raises(REFUSALS, match=r"logits behind the last|keeps more|how many layers"):
        engine.generate(model, ids_of(8, 1), max_new_tokens=NEW, **options)


class Forwards:
    """Counts the forwards of a model."""

    def __init__(self, model):
        self.count, self._forward = 0, model.forward
        model.forward = self

    def __call__(self, *arguments, **named):
        self.count += 1
        return self._forward(*arguments, **named)


@pytest.fixture
def llama(monkeypatch, tmp_path):
    """A new model, of which nothing is known."""
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    return randomised(*ARCHITECTURES["llama"])


@pytest.mark.parametrize("more", [{}, {"cache": "static"}, {"do_sample": True, "seed": 1}], ids=str)
def test_a_plain_call_tries_nothing(llama, more):
    generator = engine.Generator(llama)
    forwards = Forwards(llama)
    for _ in range(2):
        generator.generate(prompt(), max_new_tokens=NEW, **more)
    assert forwards.count == 2 * NEW


@pytest.fixture
def tried(monkeypatch):
    """The trials that are made."""
    made, start = [], trials.Text.__init__

    def init(text, *arguments):
        made.append(text)
        start(text, *arguments)

    monkeypatch.setattr(trials.Text, "__init__", init)
    return made


def test_what_was_tried_once_is_not_tried_again(llama, tried):
    for model in (llama, llama, randomised(*ARCHITECTURES["llama"])):
        assert engine.Generator(model).facts.why_not_cut is None
    assert len(tried) == 1
    assert engine.Generator(randomised(*ARCHITECTURES["llama"]).bfloat16()).facts.why_not_cut is None
    assert len(tried) == 2
    changed = randomised(*ARCHITECTURES["llama"])
    changed.register_forward_hook(lambda *_: None)
    assert engine.Generator(changed).facts.why_not_cut is None
    assert len(tried) == 3


FACTS = ("several", "cut", "padded", "in_cache", "reordered", "joined")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("llama", "jamba") else pytest.mark.slow) for name in EVERY],
)
def test_in_half_precision_the_answers_are_those_in_float32(name, dtype, tmp_path, monkeypatch):
    """There rounding hides what a trial looks for, the more so the deeper the model."""
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    model, half = made(name), copy.deepcopy(made(name)).to(dtype)
    facts = [engine.Generator(each).facts for each in (model, half)]
    answers, in_half = ({fact: getattr(of, f"why_not_{fact}") for fact in FACTS} for of in facts)
    if any("same dtype" in reason for reason in in_half.values() if reason is not None):
        pytest.skip("transformers does not compute it in 16 bits")
    assert in_half == answers


def test_prompts_of_a_deep_model_in_half_precision_are_computed_together():
    class_name, options = ARCHITECTURES["llama"]
    model = randomised(class_name, options | {"num_hidden_layers": 12}).bfloat16()
    generator = engine.Generator(model)
    with generator.batch() as batch:
        requests = [batch.submit(ids_of(tokens, tokens), max_new_tokens=4) for tokens in (5, 9)]
        texts = [request.result().tokens[0] for request in requests]
    assert batch.counts.steps > 0
    assert batch.counts.why_alone == set()
    assert all(map(len, texts))


def test_a_file_that_says_nothing_is_not_believed(llama, tried, tmp_path):
    assert engine.Generator(llama).facts.why_not_cut is None
    (file,) = (tmp_path / "facts").iterdir()
    for content in ("", "[1]", '{"cut": 3}'):
        file.write_text(content)
        assert engine.Generator(randomised(*ARCHITECTURES["llama"])).facts.why_not_cut is None
    assert len(tried) == 4


def test_logits_that_say_nothing(llama, tmp_path):
    """Where earlier tokens change nothing, nothing is known: refused, and not kept."""
    for layer in llama.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(engine.OptionError, match="rounding changes logits as much as earlier tokens do"):
        engine.Generator(llama).prefill(ids_of(9, 0))
    assert not (tmp_path / "facts").exists()


def both_directions(module, args, output):
    """The mean of all tokens that are read at once is added to each."""
    return output + 3 * output.mean(dim=1, keepdim=True)


def test_what_was_tried_with_a_hook_is_not_so_without(llama):
    generator = engine.Generator(llama)
    hook = llama.model.layers[0].mlp.register_forward_hook(both_directions)
    with pytest.raises(engine.OptionError, match="with the tokens behind it in mind"):
        generator.prefill(ids_of(9, 0))
    with pytest.raises(engine.OptionError, match="with the tokens behind it in mind"):
        generator.generate(ids_of(9, 0), prefill_chunk_size=4, max_new_tokens=NEW)
    hook.remove()
    assert generator.generate(ids_of(9, 0), prefill_chunk_size=4, max_new_tokens=NEW).tokens
    assert generator.prefill(ids_of(9, 0)).ids.shape == (1, 9)


def test_a_trial_that_failed_is_made_again_when_its_model_has_changed(llama, tmp_path):
    generator, weights = engine.Generator(llama), [layer.self_attn.o_proj.weight for layer in llama.model.layers]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        torch.nn.init.zeros_(weight)
    with pytest.raises(engine.OptionError, match="rounding changes logits as much as earlier tokens do"):
        generator.prefill(ids_of(9, 0))
    with torch.no_grad():
        for weight, values in zip(weights, before, strict=True):
            weight.copy_(values)
    assert generator.prefill(ids_of(9, 0)).ids.shape == (1, 9)


def test_states_of_several_kinds_per_token_are_not_compared(tmp_path, monkeypatch):
    """Layers of Gemma 3n hand on four states of every token."""
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    options = {"penalty_alpha": 0.6, "top_k": 3, "max_new_tokens": NEW}
    with pytest.raises(engine.OptionError, match=r"contrastive compares .* another form than \[rows, tokens, width\]"):
        engine.generate(made("gemma3n_text"), ids_of(9, 0), **options)
    for name in ("llama", "mamba2"):
        assert engine.generate(made(name), ids_of(9, 0), **options).tokens


def test_a_plan_says_what_was_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    model = randomised(*MORE_ARCHITECTURES["mamba2"])
    assert engine.plan(model, prompt_tokens=8, max_new_tokens=8).not_so == ()
    why = engine.Generator(model).facts.why_not_padding_between(caches.build("dynamic", model.config))
    plan = engine.plan(model, prompt_tokens=8, max_new_tokens=8)
    assert plan.not_so == (why,)
    assert why in " ".join(str(plan).split())
    model.save_pretrained(tmp_path / "model")
    assert engine.plan(tmp_path / "model", prompt_tokens=8, max_new_tokens=8, device="cpu").not_so == (why,)


FOLLOWS = {
    "several": "what comes behind a cache is read token by token",
    "cut": "prompts in pieces, `prefill` and live caches are refused; batches and chats read whole texts",
    "padded": "guidance that compares texts of other lengths is refused",
    "padding between": "continuations of other lengths of a prefix and turns behind rows that ended early are refused",
    "in cache": "a text is read again after another one was computed, tokens were taken back, or rows changed places",
    "rows": "several beams or samples of a prompt are refused",
    "all logits": "drafts, prompt lookup and contrastive search are refused",
    "states": "contrastive search is refused",
    "joined": "prompts of a batch take their steps one by one",
}


def not_so_of(name):
    generator = engine.Generator(made(name))
    facts = generator.facts
    whys = {"padded": facts.why_not_padded, "all logits": facts.why_not_all_logits, "states": facts.why_not_states}
    if generator._runner.takes_cache:
        whys |= {"several": facts.why_not_several, "cut": facts.why_not_cut, "in cache": facts.why_not_in_cache}
        whys["padding between"] = facts.why_not_padding_between(caches.build("dynamic", generator.model.config))
        whys |= {"rows": facts.why_not_reordered, "joined": facts.why_not_joined}
    return {fact for fact, why in whys.items() if why is not None}


@pytest.mark.slow
def test_the_documentation_states_what_was_tried():
    if not all(entry is None or hasattr(transformers, entry[0]) for entry in EVERY.values()):
        pytest.skip("this release of transformers does not know all of them")
    not_so = {name: not_so_of(name) for name in sorted(EVERY)}
    lines = ["| it may be that | then | architectures |", "|---|---|---|"]
    for fact, follows in FOLLOWS.items():
        names = ", ".join(f"`{name}`" for name, facts in not_so.items() if fact in facts)
        lines.append(f"| {_WHYS[fact]} | {follows} | {names} |")
    check_generated("facts", "\n".join(lines) + "\n")
