"""Every form a prompt can have, and every way it can be wrong."""

import copy

import pytest
import torch
import transformers
from architectures import prompt, tiny_model
from encoder_decoders import tiny_encoder_decoder
from transformers import GenerationConfig

import caches
import engine
from configs import ConfigError

TEXT = "import os\n"
OPTIONS = {"max_new_tokens": 5}


def test_all_forms_of_one_prompt(shipped):
    ids = shipped.tokenizer(TEXT, return_tensors="pt")
    expected = shipped.model.generate(**ids, **OPTIONS, do_sample=False)
    forms = [
        TEXT,
        [TEXT],
        ids["input_ids"],
        ids["input_ids"][0],
        ids["input_ids"].tolist(),
        ids,
        dict(ids),
        {"input_ids": ids["input_ids"]},
        ids["input_ids"].numpy(),
        [ids["input_ids"][0]],
        list(ids["input_ids"][0].numpy()),
    ]
    for form in forms:
        assert torch.equal(shipped.generate(form, **OPTIONS).sequences, expected)
    assert torch.equal(shipped.generate(**ids, **OPTIONS).sequences, expected)
    assert shipped.generate(TEXT, **OPTIONS).text == [
        shipped.tokenizer.decode(expected[0, ids["input_ids"].shape[1] :])
    ]


def test_ragged_texts_equal_each_text_alone(shipped):
    texts = [TEXT, "class Path:\n    def joinpath(self, *others):\n", "x"]
    together = shipped.generate(texts, max_new_tokens=20)
    assert together.text == [shipped.generate(text, max_new_tokens=20).text[0] for text in texts]
    pads = (together.sequences[:, :1] == shipped.tokenizer.pad_token_id).sum()
    assert pads == 2  # the longest row has none
    assert together.stats.prompt_tokens == sum(len(shipped.tokenizer(text)["input_ids"]) for text in texts)


def test_ragged_ids_are_padded_as_texts_are(shipped):
    texts = [TEXT, "class Path:\n    def joinpath(self, *others):\n", "x"]
    expected = shipped.generate(texts, **OPTIONS)
    encoded = shipped.tokenizer(texts)  # lists of different lengths, and their masks
    rows = encoded["input_ids"]
    for form in (rows, [torch.tensor(row) for row in rows], tuple(map(tuple, rows)), {"input_ids": rows}, encoded):
        out = shipped.generate(form, **OPTIONS)
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.prompt_tokens == sum(map(len, rows))
    # Without a tokenizer the pads are the model's, and are not read either.
    pad, shipped.model.generation_config.pad_token_id = shipped.model.generation_config.pad_token_id, 7
    try:
        out = engine.generate(shipped.model, rows, **OPTIONS)
    finally:
        shipped.model.generation_config.pad_token_id = pad
    assert out.tokens == expected.tokens
    assert (out.sequences[:, 0] == 7).tolist() == [True, False, True]


def test_token_types_go_with_their_ids():
    """As a tokenizer gives them that was not asked for tensors."""
    model, rows, kinds = tiny_model("gpt2"), [[5, 6, 7], [8, 9]], [[3, 4, 5], [6, 7]]
    padded = {
        "input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "token_type_ids": torch.tensor([[3, 4, 5], [0, 6, 7]]),
    }
    expected = engine.generate(model, padded, **OPTIONS).sequences
    found = engine.generate(model, {"input_ids": rows, "token_type_ids": kinds}, pad_token_id=0, **OPTIONS).sequences
    assert torch.equal(found, expected)
    assert not torch.equal(engine.generate(model, rows, pad_token_id=0, **OPTIONS).sequences, expected)


def test_lists_of_equal_length_are_not_padded():
    model, rows = tiny_model("llama"), [[5, 6, 7], [8, 9, 10]]
    expected = model.generate(torch.tensor(rows), max_new_tokens=5, do_sample=False)
    for form in (rows, [torch.tensor(row) for row in rows]):
        assert torch.equal(engine.generate(model, form, max_new_tokens=5).sequences, expected)


def test_chat_messages(shipped):
    chat = [{"role": "user", "content": "write a loop"}]
    ids = shipped.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = shipped.generate(ids["input_ids"], **OPTIONS).sequences
    assert torch.equal(shipped.generate(chat, **OPTIONS).sequences, expected)
    assert torch.equal(shipped.generate([chat, chat], **OPTIONS).sequences, expected.expand(2, -1))


def test_a_model_given_as_a_path():
    out = engine.generate(engine.SHIPPED_MODEL, TEXT, cache="static", **OPTIONS)
    assert isinstance(out.text[0], str)
    assert next(engine.stream(engine.SHIPPED_MODEL, TEXT, **OPTIONS)).row == 0
    half = engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(dtype="bfloat16"))
    assert half.model.dtype == torch.bfloat16
    assert half.generate(TEXT, **OPTIONS).stats.new_tokens == 5


def test_a_prompt_of_no_tokens_begins_with_bos(shipped):
    expected = shipped.generate(torch.tensor([[0]]), **OPTIONS).sequences
    assert torch.equal(shipped.generate(**OPTIONS).sequences, expected)


def test_extra_model_inputs_reach_the_model():
    """token_type_ids of GPT-2 are embedded: they change the text, and grow with it."""
    model, inputs = tiny_model("gpt2"), prompt(pads=0)
    kinds = torch.ones_like(inputs["input_ids"]) * 7
    expected = model.generate(**inputs, token_type_ids=kinds, max_new_tokens=20, do_sample=False)
    for cache in ("dynamic", "static", "none"):
        out = engine.generate(model, {**inputs, "token_type_ids": kinds}, cache=cache, max_new_tokens=20)
        assert torch.equal(out.sequences, expected)
    assert not torch.equal(engine.generate(model, inputs, max_new_tokens=20).sequences, expected)


def test_contrastive_search_needs_a_position_for_its_last_token_too():
    model, options = tiny_model("gpt2"), {"penalty_alpha": 0.6, "top_k": 4}
    most = model.config.n_positions - IDS.shape[1]
    assert len(engine.generate(model, IDS, max_new_tokens=most + 1).tokens[0]) == most + 1
    assert len(engine.generate(model, IDS, max_new_tokens=most, **options).tokens[0]) == most
    with pytest.raises(engine.InputError, match=f"need {model.config.n_positions + 1} positions"):
        engine.generate(model, IDS, max_new_tokens=most + 1, **options)


def test_positions_of_the_callers_own():
    model, inputs = tiny_model("gpt2"), prompt(pads=0)
    positions = torch.arange(13).expand(2, -1) * 2
    expected = model.generate(**inputs, position_ids=positions, max_new_tokens=20, do_sample=False)
    for cache in ("dynamic", "static", "none"):
        out = engine.generate(model, inputs, position_ids=positions, cache=cache, max_new_tokens=20)
        assert torch.equal(out.sequences, expected)


@pytest.fixture
def longrope():
    """A phi3 whose rotations change at 20 tokens: from there on it wants everything computed again."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 2.0, 5.0, 4.0]}
    changes = {"sliding_window": None, "original_max_position_embeddings": 20, "rope_parameters": rope}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**tiny_model("phi3").config.to_dict() | changes))
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def test_theirs_with_a_model_that_wants_everything_computed_again(longrope):
    inputs = prompt(pads=0)
    expected = longrope.generate(**inputs, max_new_tokens=30, do_sample=False, use_cache=False)
    theirs = transformers.DynamicCache(config=longrope.config)
    assert torch.equal(engine.generate(longrope, inputs, cache=theirs, max_new_tokens=30).sequences, expected)


@pytest.mark.parametrize("tokens", [13, 30])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_a_model_that_wants_everything_computed_again(longrope, cache, chunk, tokens):
    if cache == "none" and chunk:
        return
    inputs = prompt(pads=0, tokens=tokens)
    # Without a cache: with one, transformers 5.17 disagrees with itself here.
    expected = longrope.generate(**inputs, max_new_tokens=30, do_sample=False, use_cache=False)
    generator = engine.Generator(longrope, config=engine.EngineConfig(prefill_chunk_tokens=chunk))
    assert torch.equal(generator.generate(inputs, cache=cache, max_new_tokens=30).sequences, expected)


def test_a_model_that_wants_tokens_that_were_not_given(longrope):
    first = engine.generate(longrope, prompt(pads=0), max_new_tokens=3)
    mask = torch.ones(2, 16)
    with pytest.raises(
        engine.GenerationInterrupted, match="15 in the cache were not given again: give the whole conversation"
    ):
        engine.generate(longrope, first.sequences[:, -1:], attention_mask=mask, cache=first.cache, max_new_tokens=12)


def test_a_model_that_by_default_uses_no_cache():
    model = tiny_model("llama")
    model.generation_config.use_cache = False
    try:
        assert engine.generate(model, IDS, max_new_tokens=3).cache is None
        assert engine.generate(model, IDS, cache="static", max_new_tokens=3).cache.name == "static"
        live = engine.generate(model, IDS, use_cache=True, max_new_tokens=3).cache
        assert live.name == "dynamic"
    finally:
        model.generation_config.use_cache = True
    with pytest.raises(engine.OptionError, match="use_cache=False contradicts the live cache"):
        engine.generate(model, prompt(tokens=30)["input_ids"], cache=live, use_cache=False, max_new_tokens=3)


IDS = prompt(pads=0)["input_ids"]
RIGHT_PADDED = torch.ones_like(IDS).index_fill(1, torch.tensor([12]), 0)

WRONG_INPUTS = {
    "no tokens": ({"inputs": IDS[:, :0]}, "empty"),
    "id too large": ({"inputs": torch.tensor([[4, 101]])}, "token id 101 is outside the model's vocabulary of 101"),
    "negative id": ({"inputs": torch.tensor([[4, -1]])}, "token id -1"),
    "floats": ({"inputs": torch.rand(2, 3)}, "integers"),
    "mask of another shape": ({"inputs": IDS, "attention_mask": torch.ones(2, 12)}, r"shape \[2, 12\].*\[2, 13\]"),
    "right padding": ({"inputs": IDS, "attention_mask": RIGHT_PADDED}, "pad on the left"),
    "beyond the positions": ({"inputs": IDS, "max_new_tokens": 400}, "412 positions, but the model has 256"),
    "text without a tokenizer": ({"inputs": "hello"}, "tokenizer"),
    "prompt twice": ({"inputs": IDS, "input_ids": IDS}, "twice"),
    "a number with a point": ({"inputs": 5.5}, "not a float"),
    "ragged ids of which some are none": ({"inputs": [[1, 2], [3.5]]}, "integers, but row 1 holds 3.5"),
    "ragged ids and nothing": ({"inputs": [[1, 2], []]}, "prompt 1 is empty"),
    "truth values": ({"inputs": [[True, False]]}, "integers"),
    "ids and a text": ({"inputs": [[1, 2], "three"]}, "rectang"),
    "ragged ids and a mask for others": (
        {"inputs": [[1, 2], [3]], "attention_mask": torch.ones(2, 2)},
        r"no entry for each id of 2 lists of \[1, 2\] ids",
    ),
    "a ragged mask": ({"inputs": IDS, "attention_mask": [[1], [1, 1]]}, "attention_mask is a rectang"),
    "bytes": ({"inputs": b"import os"}, "not a bytes"),
    "embeddings that are none": ({"inputs_embeds": [[1.0]]}, "floating-point tensor .*, not list"),
    "positions of another shape": ({"inputs": IDS, "position_ids": torch.zeros(2, 3)}, "position_ids has shape"),
    "positions that are truth values": ({"inputs": IDS, "position_ids": IDS > 3}, "position_ids are integers"),
    "numbers with a point in lists": ({"inputs": [[1.0, 2], [1, 2]]}, "token ids are integers, but row 0 holds 1.0"),
    "no numbers": ({"inputs": [None]}, "token ids, which are integers, but one of these is None"),
    "none among ids": ({"inputs": [[1, None]]}, "token ids are integers, but row 0 holds None"),
    "objects": ({"inputs": [object()]}, "but it begins with <object"),
    "a truth value among ids": ({"inputs": [[4, 5], [True, 2]]}, "token ids are integers, but row 1 holds True"),
    "a truth value in a row": ({"inputs": [True, 2]}, "token ids are integers, but row 0 holds True"),
    "a truth value among ragged ids": ({"inputs": [[4], [True, 2]]}, "token ids are integers, but row 1 holds True"),
    "ids over 64 bits": ({"inputs": [[1, 2**70]]}, "token ids are a rectangular array of integers, but"),
    "ragged ids over 64 bits": ({"inputs": [[1, 2**70], [3]]}, "token ids are a rectangular array of integers, but"),
    "a ragged mask of texts": (
        {"inputs": [[1, 2], [3]], "attention_mask": [["a", "b"], ["c"]]},
        "attention_mask is a rectangular array of integers, but",
    ),
    "a sparse mask": ({"inputs": IDS, "attention_mask": torch.ones(2, 13).to_sparse()}, "layout torch.sparse_coo"),
    "ids without numbers": ({"inputs": IDS.to("meta")}, "token ids are .* on the device 'meta', without numbers"),
    "an empty tensor of another type": ({"inputs": torch.empty(1, 0)}, r"the prompt is empty \(1 rows of 0 tokens\)"),
    "a mask of zeros": (
        {"inputs": IDS, "attention_mask": torch.zeros_like(IDS)},
        "row 0 has no token to begin with: its attention_mask is 0 everywhere",
    ),
    "one message": ({"inputs": {"role": "user", "content": "x"}}, r"this is one message: give \[message\]"),
    "a name that is none": ({"inputs": {"input_ids": IDS, 5: 1}}, "a mapping with 5 among its names"),
    "pads outside the vocabulary": (
        {"inputs": [[1, 2], [3]], "pad_token_id": 4000},
        "pad_token_id, or the id in place of a pad: token id 4000 is outside",
    ),
}

STATIC = transformers.GenerationConfig(cache_implementation="static")
WRONG_OPTIONS = {
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens=0"),
    "negative": ({"max_new_tokens": -3}, "max_new_tokens=-3"),
    "max_length too small": ({"max_length": 9, "max_new_tokens": None}, "max_length"),
    "unknown keyword": ({"max_new_token": 5}, "max_new_tokens"),
    "two caches": ({"cache": "static", "cache_implementation": "dynamic"}, "both choose"),
    "cache without cache": ({"cache": "static", "use_cache": False}, "use_cache=False"),
    "a cache that is none": ({"cache": 7}, "not a int"),
    "stop strings without a tokenizer": ({"stop_strings": ["a"]}, "tokenizer"),
    "pieces without a cache": ({"prefill_chunk_size": 3, "cache": "none"}, "pieces"),
    "config for a live cache": ({"past_key_values": transformers.DynamicCache(), "cache_config": {}}, "live one"),
    "healing": ({"token_healing": True}, "token_healing"),
    "in a mapping: an option": ({"inputs": {"input_ids": IDS, "max_new_tokens": 3}}, "no input 'max_new_tokens'"),
    "in a mapping: a parameter": (
        {"inputs": {"input_ids": IDS, "temperature": 1.0}},
        r"no input 'temperature', which is a parameter of the call: give it as a keyword, generate\(..., temperature=",
    ),
    "in a mapping: what this model does not take": (
        {"inputs": {"input_ids": IDS, "token_type_ids": IDS}},
        "token_type",
    ),
    "in a mapping: what the engine sets": ({"inputs": {"input_ids": IDS, "use_cache": True}}, "set by the engine"),
    "what the engine sets": ({"logits_to_keep": 3}, "set by the engine"),
    "for drafts only": ({"num_assistant_tokens": 7}, "num_assistant_tokens=7 cannot apply"),
    "for sampling only": ({"temperature": 0.7}, "temperature=0.7 applies to sampling, but greedy draws nothing"),
    "not a whole number": ({"max_new_tokens": "3"}, "max_new_tokens='3'"),
    "real values of other arguments": ({"assistant_model": 3}, "assistant_model"),
    "temperature below zero": ({"do_sample": True, "temperature": -1.0}, "temperature"),
    "lookup by a greedy strategy": ({"strategy": "greedy", "prompt_lookup_num_tokens": 3}, "greedy has no use for it"),
    "a config with a cache": ({"cache": "dynamic", "generation_config": STATIC}, "both choose"),
    "a cache option": ({"cache": "dynamic", "cache_config": {"max_cache_len": 5}}, "DynamicCacheConfig has no option"),
}


@pytest.fixture
def idle_model(monkeypatch):
    """Wrong calls are noticed before any work."""
    model = tiny_model("llama")

    def forward(*args, **kwargs):
        raise AssertionError("the model was run")

    monkeypatch.setattr(model.model, "forward", forward)
    return model


@pytest.mark.parametrize(("arguments", "message"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_inputs(arguments, message, idle_model):
    with pytest.raises(engine.InputError, match=message):
        engine.generate(idle_model, **({"max_new_tokens": 5} | arguments))


@pytest.mark.parametrize(("arguments", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options(arguments, message, idle_model):
    with pytest.raises((engine.OptionError, ConfigError, ValueError), match=message) as failure:
        engine.generate(idle_model, **({"inputs": IDS, "max_new_tokens": 5} | arguments))
    assert isinstance(failure.value, (engine.EngineError, caches.CacheError))


def test_a_configuration_for_sampling_serves_greedy_calls_too():
    model, inputs = tiny_model("llama"), prompt()
    config = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=5, pad_token_id=0)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    out = engine.generate(model, inputs, generation_config=config, do_sample=False)
    assert torch.equal(out.sequences, expected)


def test_neutral_values_are_no_options():
    model, inputs = tiny_model("llama"), prompt()
    neutral = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "length_penalty": 1.0}
    neutral |= {"eos_token_id": None, "streamer": None, "use_cache": True, "early_stopping": False}
    neutral |= {"synced_gpus": False, "assistant_model": None, "disable_compile": True}
    expected = model.generate(**inputs, max_new_tokens=5, **neutral)
    for more in ({"inputs_embeds": None, "labels": None}, {"top_k": 0}, {"temperature": 0.0}):
        assert torch.equal(engine.generate(model, inputs, max_new_tokens=5, **neutral | more).sequences, expected)
    own = {"chat_format": "chatml", "max_window_size": 24000}
    config = transformers.GenerationConfig.from_dict(own | {"max_new_tokens": 5, "pad_token_id": 0})
    assert torch.equal(engine.generate(model, inputs, generation_config=config).sequences, expected)
    assert torch.equal(engine.generate(model, inputs, max_new_tokens=5, **neutral).sequences, expected)


def test_wrong_texts(shipped):
    for inputs, message in [
        ("", "prompt 0 is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([], "list of prompts is empty"),
        (["a", 5], "a row of prompts"),
        ([{"content": "x"}], "a row of prompts"),
    ]:
        with pytest.raises(engine.InputError, match=message):
            shipped.generate(inputs, **OPTIONS)
    with pytest.raises(engine.OptionError, match="empty stop string"):
        shipped.generate("a", stop_strings=[""], **OPTIONS)


def test_a_tokenizer_lacks_what_calls_need(tokenizer):
    class Processor:
        def __init__(self):
            self.tokenizer = tokenizer

    class Decodes:
        def decode(self, ids):
            return "x"

    model = tiny_model("llama")
    expected = engine.generate(model, IDS, tokenizer=tokenizer, **OPTIONS)
    assert engine.generate(model, IDS, tokenizer=Processor(), **OPTIONS).text == expected.text
    for wrong, lacks in ((tokenizer.backend_tokenizer, "pad_token_id"), (Decodes(), "__call__, pad_token_id")):
        for make in (lambda one: engine.generate(model, IDS, tokenizer=one), lambda one: engine.Generator(model, one)):
            with pytest.raises(engine.OptionError, match=f"tokenizer is a .* without .*{lacks}.*: give a tokenizer of"):
                make(wrong)


def test_a_chat_without_a_template(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(engine.InputError, match="template refuses these messages: TemplateError: roles must alternate"):
        engine.generate(tiny_model("llama"), [{"role": "user", "content": "x"}], tokenizer=plain)
    plain.chat_template = None
    with pytest.raises(engine.InputError, match="chat_template"):
        engine.generate(tiny_model("llama"), [{"role": "user", "content": "x"}], tokenizer=plain)


def test_a_cache_that_is_too_small(idle_model):
    with pytest.raises(caches.CapacityError, match="at most 15 tokens, but 13 prompt tokens and 5 new ones need 17"):
        engine.generate(idle_model, IDS, cache="static", cache_config={"max_cache_len": 15}, max_new_tokens=5)


def test_a_live_cache_that_does_not_fit_the_prompt():
    model = tiny_model("llama")
    cache = engine.generate(model, IDS, max_new_tokens=5).cache
    other = prompt(pads=0, tokens=20, seed=9)["input_ids"]
    with pytest.raises(engine.InputError, match="17 tokens that do not begin this prompt: they differ from token 0"):
        engine.generate(model, other, cache=cache, max_new_tokens=5)
    with pytest.raises(engine.InputError, match="2 rows, but the prompt has 1"):
        engine.generate(model, other[:1], cache=cache, max_new_tokens=5)
    theirs = model(IDS, use_cache=True).past_key_values
    with pytest.raises(engine.InputError, match="2 rows, but the prompt has 1"):
        engine.generate(model, other[:1], cache=theirs, max_new_tokens=5)
    with pytest.raises(caches.UnsupportedLayerError, match=r"built for 4 layers \(full_attention\), but the model"):
        engine.generate(tiny_model("mistral"), other, cache=cache, max_new_tokens=5)
    twin = copy.deepcopy(cache)
    with pytest.raises(engine.InputError, match="do not begin this prompt"):
        engine.generate(model, other, cache=twin, max_new_tokens=5)
    fixed = caches.build("static", model.config, max_cache_len=40, max_batch_size=2)
    with pytest.raises(engine.InputError, match="room for 2 rows, but the prompt has 4"):
        engine.generate(model, other.repeat(2, 1), cache=fixed, max_new_tokens=5)
    cache.reset()
    expected = engine.generate(model, other[:1], max_new_tokens=5).sequences
    for empty in (cache, fixed):  # fewer rows than there is room for
        assert torch.equal(engine.generate(model, other[:1], cache=empty, max_new_tokens=5).sequences, expected)
    with pytest.raises(engine.InputError, match="nothing is left to feed"):
        engine.generate(model, IDS, cache=cache, max_new_tokens=5)


def test_training_mode():
    model = tiny_model("llama")
    model.train()
    try:
        with pytest.raises(engine.InputError, match="training mode"):
            engine.generate(model, IDS, **OPTIONS)
    finally:
        model.eval()


def test_a_model_without_values():
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config).eval()
    with pytest.raises(engine.InputError, match=r"the model is on the device 'meta'.*from_pretrained"):
        engine.generate(model, IDS, **OPTIONS)
    assert engine.plan(model, prompt_tokens=4, max_new_tokens=4).choice == "dynamic"


def test_a_layer_kind_no_backend_keeps():
    unheard = copy.deepcopy(tiny_model("llama").config)
    unheard.layer_types = ["full_attention"] * 3 + ["telepathy"]
    with pytest.raises(caches.UnsupportedLayerError, match=r"layer 3 \(telepathy\) keeps something unknown"):
        caches.build("static", unheard, max_cache_len=9)
    assert caches.build("none", unheard).handle is None


@pytest.mark.parametrize(("wrong", "kind"), [(None, "None"), ("llama", "a str"), (TEXT.encode(), "a bytes")])
def test_a_cache_is_built_from_a_configuration(wrong, kind):
    with pytest.raises(ConfigError, match=f"has to be a PreTrainedConfig, not {kind}: pass model.config"):
        caches.build("static", wrong, max_cache_len=9)


@pytest.mark.parametrize("rows", [[0, 1], [0], [1]])
def test_pads_are_read_off_the_ids_as_transformers_does(rows):
    model, ids = tiny_model("llama"), prompt()["input_ids"][rows]
    without_mask = engine.generate(model, ids, max_new_tokens=9)
    assert torch.equal(without_mask.sequences, model.generate(ids, max_new_tokens=9, do_sample=False))
    ones = torch.ones_like(ids)
    read = engine.generate(model, ids, attention_mask=ones, max_new_tokens=9)
    assert torch.equal(read.sequences, without_mask.sequences) == (0 not in rows)


def test_a_pad_id_in_the_middle_of_a_row_is_a_pad_and_at_its_end_it_is_refused():
    model, ids = tiny_model("llama"), torch.tensor([[5, 0, 7, 0]])
    middle = engine.generate(model, ids[:, :3], max_new_tokens=9)
    assert torch.equal(middle.sequences, model.generate(ids[:, :3], max_new_tokens=9, do_sample=False))
    with pytest.raises(engine.InputError, match=r"row 0 is padded on the right.* or give attention_mask"):
        engine.generate(model, ids, max_new_tokens=9)
    ones = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=ones, max_new_tokens=9, do_sample=False)
    assert torch.equal(engine.generate(model, ids, attention_mask=ones, max_new_tokens=9).sequences, expected)


def test_the_next_turn_of_a_row_remembers_which_pad_ids_were_tokens():
    model, ids = tiny_model("llama"), torch.tensor([[5, 0, 7, 8]])
    first = engine.generate(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    whole = torch.cat([first.sequences, torch.tensor([[0, 9]])], dim=1)  # what is new has a pad
    second = engine.generate(model, whole, cache=first.cache, max_new_tokens=9)
    assert second.stats.prompt_tokens == 2
    mask = torch.ones_like(whole)
    mask[0, -2] = 0
    expected = model.generate(whole, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(second.sequences, expected)


def test_a_model_with_one_id_for_pads_and_beginnings_needs_no_prompt():
    given = {"bos_token_id": 3, "pad_token_id": 3, "max_new_tokens": 5}
    out = engine.generate(tiny_model("llama"), **given)
    expected = engine.generate(tiny_model("llama"), torch.tensor([[3]]), attention_mask=torch.tensor([[1]]), **given)
    assert torch.equal(out.sequences, expected.sequences)


@pytest.mark.parametrize(
    "options",
    [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}],
    ids=str,
)
def test_penalties_of_ids_that_are_not_known(options):
    """Said in the call they are refused; a whole configuration may hold them."""
    t5, llama = tiny_encoder_decoder("t5"), tiny_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    known = {"encoder_outputs": t5.get_encoder()(ids)}, {"inputs_embeds": llama.get_input_embeddings()(ids)}
    for model, given in zip((t5, llama), known, strict=True):
        with pytest.raises(engine.OptionError, match="compares with the token ids that were read"):
            engine.generate(model, **given, **options, num_beams=2, max_new_tokens=4)
        config = GenerationConfig(**options, num_beams=2, max_new_tokens=4)
        plain = engine.generate(model, **given, num_beams=2, max_new_tokens=4)
        with pytest.warns(UserWarning, match="ignoring the argument"):
            out = engine.generate(model, **given, generation_config=config)
        assert torch.equal(out.sequences, plain.sequences)


def test_half_of_a_character_is_no_text(shipped):
    with pytest.raises(engine.InputError, match="is no text in Unicode"):
        shipped.generate("a\ud800b", max_new_tokens=1)
