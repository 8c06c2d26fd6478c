"""Dynamic and longrope positions: keys of texts beyond a length depend on it, so they are neither shared nor cut."""

import copy
import functools

import architectures
import pytest
import torch
from architectures import randomised, tiny_model
from fallbacks import OutAt
from transformers import AutoTokenizer

import engine
from engine.model.rope_frequencies import plain_tokens, starts_again

PLAIN = 24  # tokens up to which keys depend on positions alone
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [6.0, 4.0, 10.0, 8.0]}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": PLAIN, **FACTORS},
}
KINDS = ["dynamic", "longrope", "phi3"]  # phi3 reads all tokens again where a text gets longer
NEW = 5


@functools.lru_cache
def model_of(kind):
    family, sizes = ("Phi3", {"sliding_window": None, "pad_token_id": 0}) if kind == "phi3" else ("Llama", {})
    sizes |= {"original_max_position_embeddings": PLAIN} if kind == "phi3" else {}
    sizes |= {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    rope = ROPES["longrope" if kind == "phi3" else kind]
    most = {"max_position_embeddings": PLAIN if kind == "dynamic" else 512}
    return randomised(f"{family}Config", sizes | most | {"rope_parameters": rope})


def ids_of(tokens, seed=0):
    return architectures.ids_of(tokens, seed) % 97


def alone(kind, ids, new=NEW):
    return engine.generate(copy.deepcopy(model_of(kind)), ids, max_new_tokens=new).tokens


def differs_by_length(kind):
    """Whether the rotation shows in the text: else the tests below could not fail."""
    short, long = ids_of(12), torch.cat([ids_of(12), ids_of(40, 1)], dim=1)
    model = copy.deepcopy(model_of(kind))
    keys = [engine.generate(model, ids, max_new_tokens=1).cache.layers[1].keys[0, :, :12] for ids in (short, long)]
    return not torch.allclose(*keys, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_longer_texts_are_others(kind):
    assert differs_by_length(kind)


@pytest.mark.parametrize(
    ("name", "again"), [("phi3", True), ("phimoe", True), ("phi4_multimodal", True), ("llama", False)]
)
def test_which_models_read_all_tokens_again_is_tried(name, again):
    config = copy.deepcopy(tiny_model(name).config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = {name: values[:1] * (width // 2) for name, values in FACTORS.items()}
    scales = {"partial_rotary_factor": 1.0, "short_mscale": 1.0, "long_mscale": 1.0}
    config.rope_parameters = ROPES["longrope"] | factors | scales
    config.original_max_position_embeddings = PLAIN
    assert starts_again(type(tiny_model(name))(config)) == again
    assert not starts_again(tiny_model(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(40, 8), (8, 40), (8, 12), (22, 60, 9, 31)])
def test_prompts_of_several_lengths_at_once(kind, lengths):
    prompts = [ids_of(tokens, seed) for seed, tokens in enumerate(lengths)]
    generator = engine.Generator(copy.deepcopy(model_of(kind)))
    found = {out.index: out.result().tokens for out in generator.generate_many(prompts, max_new_tokens=NEW)}
    assert [found[number] for number in range(len(prompts))] == [alone(kind, ids) for ids in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_may_be_read_in_pieces(kind):
    lengths = (40, 20, 60)
    with engine.Generator(copy.deepcopy(model_of(kind))).batch(piece_tokens=8) as batch:
        found = [batch.submit(ids_of(tokens), max_new_tokens=NEW) for tokens in lengths]
        assert [one.result().tokens for one in found] == [alone(kind, ids_of(tokens)) for tokens in lengths]


def test_short_texts_of_longrope_are_joined_and_long_ones_say_why_not():
    generator = engine.Generator(copy.deepcopy(model_of("longrope")))
    with generator.batch() as batch:
        for one in [batch.submit(ids_of(tokens), max_new_tokens=17 - tokens) for tokens in (6, 9)]:
            one.result()
        assert batch.counts.alone_steps == 0
        batch.submit(ids_of(40), max_new_tokens=NEW).result()
        assert batch.counts.why_alone == {"behind 24 tokens its position embeddings depend on the length of the text"}


@pytest.mark.parametrize("kind", KINDS)
def test_stored_prefixes_are_those_of_short_texts(kind, monkeypatch):
    monkeypatch.setattr("engine.reuse.prefix_store.LEAST_TOKENS", 4)
    config = engine.EngineConfig(prefix_store_bytes=10**7)
    generator, common = engine.Generator(copy.deepcopy(model_of(kind)), config=config), ids_of(10, 5)
    reused = []
    for seed, tokens in enumerate((40, 4, 6, 50, 5)):
        ids = torch.cat([common, ids_of(tokens, seed)], dim=1)
        out = generator.generate(ids, max_new_tokens=NEW)
        assert out.tokens == alone(kind, ids), seed
        reused.append(out.stats.cached_tokens)
    assert reused[2] >= 10  # the second short text begins as the first one
    assert reused[0] == reused[1] == reused[3] == 0


@pytest.fixture
def chats():
    """From a kind of model to a function that begins a chat with it."""

    def of(kind):
        tokenizer = copy.deepcopy(AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL))
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        model = copy.deepcopy(model_of(kind))
        model.resize_token_embeddings(len(tokenizer))
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            torch.nn.init.normal_(table.weight, std=0.3, generator=torch.Generator().manual_seed(0))
        generator = engine.Generator(model, tokenizer)
        return lambda **arguments: generator.chat(max_new_tokens=3, **arguments)

    return of


LONG = " ".join(["import os"] * 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_chat_that_gets_shorter(kind, fails, chats):
    begin = chats(kind)
    chat, fresh = begin(), begin()
    chat.send("a b")
    chat.send(LONG)
    assert chat.cache.total_tokens > PLAIN
    chat.undo()
    if fails:
        with pytest.raises(engine.OptionError, match="temperature"):
            chat.send(LONG + "x", temperature=0.5)
    chat.send("c")
    fresh.send("a b")
    fresh.send("c")
    assert chat.cache.total_tokens <= PLAIN
    assert [one["content"] for one in chat.messages] == [one["content"] for one in fresh.messages]
    tokens = chat.cache.total_tokens
    for one, expected in zip(chat.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(one.keys[:, :, :tokens], expected.keys[:, :, :tokens])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_chat_with_a_window_reads_long_texts_at_once(kind, chats):
    window = {"cache": "sliding_window", "cache_config": {"window_length": 200}}
    chat = chats(kind)(system="a b c d", **window)
    out = chat.send(LONG)
    assert chat.cache.total_tokens > PLAIN
    expected = engine.generate(copy.deepcopy(chat._generator.model), out.sequences[:, :-3], max_new_tokens=3, **window)
    assert out.tokens == expected.tokens


def test_the_lengths_of_each_type_of_layers():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **FACTORS}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    for ropes, expected in (
        ({"sliding_attention": plain, "full_attention": rope}, 24),
        ({"sliding_attention": plain, "full_attention": plain}, None),
    ):
        model = randomised("Gemma3TextConfig", sizes | layers | {"rope_parameters": ropes})
        assert plain_tokens(model) == expected
    assert [plain_tokens(model_of(kind)) for kind in KINDS] == [PLAIN] * 3
    for kind in ("dynamic", "longrope"):  # of code from elsewhere
        rope = torch.nn.Module()
        rope.rope_type = kind
        assert plain_tokens(rope) == 0


def test_a_long_chat_of_a_model_that_starts_again_goes_back_without_reading_all(chats):
    chat = chats("phi3")()
    chat.send(LONG)
    chat.retry()
    assert chat.last.stats.cached_tokens > PLAIN
    chat.undo()
    out = chat.send(LONG + "x")
    assert out.stats.cached_tokens > PLAIN
    model = copy.deepcopy(chat._generator.model)
    assert out.tokens == engine.generate(model, out.sequences[:, :-3], max_new_tokens=3).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_the_callers_own(kind):
    ids, positions = ids_of(16), torch.arange(0, 48, 3)[None]
    generator = engine.Generator(copy.deepcopy(model_of(kind)))
    expected = generator.generate(ids, position_ids=positions, max_new_tokens=NEW).tokens
    with engine.Generator(copy.deepcopy(model_of(kind))).batch(piece_tokens=4) as batch:
        assert batch.submit(ids, position_ids=positions, max_new_tokens=NEW).result().tokens == expected


def out_of_memory(kind, fallback, pads=25):
    """The text of a run whose first forward runs out of memory, and that of an undisturbed one."""
    ids = torch.cat([ids_of(40), ids_of(40, 1)])
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    inputs, model = {"input_ids": ids, "attention_mask": mask}, copy.deepcopy(model_of(kind))
    expected = engine.generate(copy.deepcopy(model), inputs, max_new_tokens=NEW)
    with OutAt(model, [0]):
        return engine.generate(model, inputs, max_new_tokens=NEW, on_oom=[fallback]), expected


@pytest.mark.parametrize(("kind", "fallback", "pads"), [("phi3", "chunk", 25), *((kind, "split", 0) for kind in KINDS)])
def test_fallbacks_that_do_not_change_the_text(kind, fallback, pads):
    """A model that starts again may be read in smaller chunks, and rows of equal length apart."""
    out, expected = out_of_memory(kind, fallback, pads)
    assert torch.equal(out.sequences, expected.sequences)
    assert [one.name for one in out.stats.fallbacks] == [fallback]


@pytest.mark.parametrize(
    ("kind", "fallback", "why"),
    [
        *((kind, "split", "depend on the longest one that is read with them") for kind in KINDS),
        *((kind, "chunk", "depend on how many tokens are read at once") for kind in ("dynamic", "longrope")),
    ],
)
def test_fallbacks_that_would_change_the_text_say_why_not(kind, fallback, why):
    with pytest.raises(engine.OutOfMemoryError, match=f"could not be taken: {fallback} .*{why}"):
        out_of_memory(kind, fallback)
