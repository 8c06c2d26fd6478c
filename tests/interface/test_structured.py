"""Texts that follow a schema, a pattern, a list or a grammar, with every strategy and cache."""

import builtins
import copy
import json
import re
from random import Random
from typing import Annotated

import pytest
import torch
import transformers
from architectures import randomised, tiny_model
from chat_templates import sentencepiece
from covering import graded
from encoder_decoders import ENCODER_DECODERS
from injection import failing
from tokenizers import AddedToken
from transformers import AutoTokenizer, LogitsProcessorList

import engine
from engine.reuse.conversation import flat

pytest.importorskip("llguidance", reason="the extra grammar is not installed")
pytest.importorskip("jsonschema")

from schemas import CACHES, NEW, STRATEGIES, VOCABULARY, generator, grammar_of, model, play, random_schema, tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier_of_the_thing": {"type": "integer", "minimum": 0, "maximum": 9},
        "colour": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["identifier_of_the_thing", "colour", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # so that keys with their blanks are certain
}
PROMPT = "import os\n"


def ids_of(text, prompt=PROMPT):
    return tokenizer()(prompt + text, return_tensors="pt")["input_ids"]


@pytest.mark.covering("values", "pairs")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", graded(range(8), (), range(8, 20)))
def test_random_schemas(seed, strategy, cache):
    play(seed, strategy, cache)


def test_most_random_schemas_have_complete_texts():
    """Else the test above would show little."""
    ends = sum((play(seed, "greedy", "dynamic") for seed in range(10)), start=play(0, "sampling", "dynamic"))
    assert ends["eos"] >= 0.8 * sum(ends.values())


# The same as without a cache, states and tokens that are read at once.


def reference(schema, new, seed=None):
    """Greedy (or drawn) by one forward of the whole text for each token, with a grammar that knows nothing before."""
    ids = ids_of("")
    columns = ids.shape[1]
    drawn = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(new):
        with torch.no_grad():
            logits = model()(ids, use_cache=False).logits[:, -1].float()
        scores = grammar_of(columns=columns, json_schema=schema)(ids, logits)
        if drawn is None:
            token = scores.argmax(dim=-1)
        else:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=drawn)[:, 0]
        ids = torch.cat([ids, token[:, None]], dim=1)
        if int(token) == 0:
            break
    return ids[0, columns:].tolist()


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "assisted", "prompt_lookup"])
@pytest.mark.parametrize("seed", [None, 3, 8])
def test_the_same_text_as_without_cache(strategy, seed):
    schema = SCHEMA if seed is None else random_schema(seed)
    options = dict(STRATEGIES[strategy])
    if strategy == "assisted":
        options["assistant_model"] = model(layers=1)
    out = generator().generate(PROMPT, json_schema=schema, seed=5, max_new_tokens=60, **options)
    assert out.tokens[0] == reference(schema, 60, seed=5 if strategy == "sampling" else None)
    if seed is None:
        assert out.stats.accepted_tokens > 8  # the keys
        assert out.finish_reasons == ["eos"]


def test_beams_are_those_of_transformers():
    """Its own search asks the same processor, without a cache."""
    ids = ids_of("")
    options = dict(num_beams=4, num_return_sequences=3, max_new_tokens=48, do_sample=False)
    processors = LogitsProcessorList([grammar_of(columns=ids.shape[1], json_schema=SCHEMA)])
    theirs = model().generate(ids, use_cache=False, logits_processor=processors, **options)
    ours = generator().generate(ids, json_schema=SCHEMA, **options)
    width = max(theirs.shape[1], ours.sequences.shape[1])
    pad = lambda found: torch.nn.functional.pad(found, (0, width - found.shape[1]))  # noqa: E731
    assert pad(ours.sequences).equal(pad(theirs))


@pytest.mark.parametrize("seeds", graded([range(100, 106)], [range(1000, 1025)], [range(1025, 1100)]), ids=len)
def test_states_answer_as_if_the_text_were_read_from_its_beginning(seeds):
    """Texts of random lengths in random order: longer, shorter, others, several at once. 40 times for each schema."""
    draw = Random(0)
    for seed in seeds:
        schema = random_schema(seed)
        kept = grammar_of(columns=0, json_schema=schema)
        texts = [_random_text(schema, draw) for _ in range(4)]
        for _ in range(40):
            cut = draw.randint(0, max(map(len, texts)))
            some = [text[:cut] for text in texts if len(text) >= cut][: draw.randint(1, 4)]
            scores = torch.zeros(len(some), VOCABULARY)
            ids = torch.tensor(some, dtype=torch.long).view(len(some), cut)
            fresh = [grammar_of(columns=0, json_schema=schema)(row[None], scores[:1]) for row in ids]
            assert kept(ids, scores).equal(torch.cat(fresh)), (seed, some)


def _random_text(schema, draw):
    """Tokens that the schema allows, at random, to the end or 40 of them."""
    grammar, text = grammar_of(columns=0, json_schema=schema), []
    while len(text) < 40 and 0 not in text:
        scores = grammar(torch.tensor([text], dtype=torch.long).view(1, -1), torch.zeros(1, VOCABULARY))
        text.append(draw.choice((scores[0] == 0).nonzero().flatten().tolist()))
    return text


def test_a_text_that_has_left_its_grammar_goes_on_with_nothing():
    grammar = grammar_of(columns=0, choices=["yes", "no"])
    wrong = tokenizer()("maybe")["input_ids"]
    for ids in (wrong, [*wrong, 7]):
        assert (grammar(torch.tensor([ids]), torch.zeros(1, VOCABULARY)) == -torch.inf).all()
    right = tokenizer()("yes")["input_ids"]
    assert grammar(torch.tensor([right]), torch.zeros(1, VOCABULARY))[0, 0] == 0  # the end


# What can be asked.


def test_every_way_to_ask():
    gen = generator()
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    by_dict = gen.generate(PROMPT, json_schema=SCHEMA, max_new_tokens=NEW)
    for same in ({"json_schema": json.dumps(SCHEMA)}, {"response_format": asked}):
        assert gen.generate(PROMPT, **same, max_new_tokens=NEW).tokens == by_dict.tokens
    assert set(by_dict.parsed[0]) == set(SCHEMA["properties"])
    out = gen.generate(PROMPT, choices=["one", "two words", "drei"], num_beams=5, num_return_sequences=5)
    assert set(out.text) == {"drei", "one", "two words"}  # a text has several spellings in tokens
    out = gen.generate(PROMPT, choices=["a", "b", "c"], num_beams=5, num_return_sequences=5)
    assert set(out.text) == {"a", "b", "c"}  # as in transformers, beams without a text of their own repeat one
    assert out.parsed == [None] * 5
    out = gen.generate(PROMPT, regex=r"[0-9]{3}-[a-c]", do_sample=True, seed=1)
    assert len(out.text[0]) == 5
    assert out.text[0][3:] in ("-a", "-b", "-c")
    out = gen.generate(PROMPT, grammar='start: "(" NAME ")"\nNAME: /[a-z]{2}/')
    assert out.text[0][0] + out.text[0][-1] == "()"
    assert gen.generate(PROMPT, response_format={"type": "text"}, max_new_tokens=5).parsed is None


def test_models_of_pydantic():
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=99)
        on: bool

    out = generator().generate(PROMPT, json_schema=Point, max_new_tokens=NEW)
    assert isinstance(out.parsed[0], Point)
    assert out.parsed[0].model_dump_json() == "".join(out.text[0].split())


def test_a_text_that_a_validator_refuses():
    """The schema does not know of it. The texts stay, in a batch too, where the others go on."""
    pydantic = pytest.importorskip("pydantic")

    class Never(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=99)

        @pydantic.field_validator("x")
        @classmethod
        def refuse(cls, value):
            raise ValueError("never")

    gen = generator()
    out = gen.generate(PROMPT, json_schema=Never, max_new_tokens=NEW)
    assert (out.finish_reasons, out.parsed) == (["eos"], [None])
    assert json.loads(out.text[0])["x"] >= 0
    prompts = [{"prompt": PROMPT, "json_schema": Never}, {"prompt": PROMPT, "json_schema": SCHEMA}]
    found = {one.index: one.result().parsed for one in gen.generate_many(prompts, max_new_tokens=NEW)}
    assert found[0] == [None]
    assert set(found[1][0]) == set(SCHEMA["properties"])


def test_beams_that_have_ended_stay_in_the_grammar():
    """For want of others they go on, and repeat a text."""
    long = "a text of many tokens, so that the others wait for it"
    out = generator().generate(PROMPT, choices=["a", long], num_beams=3, num_return_sequences=3, max_new_tokens=24)
    assert set(out.text) <= {"a", long}


def test_what_the_model_says_of_every_text_is_left_out():
    """A least length, or a first token, that no text of this form has."""
    own = copy.deepcopy(model())
    own.generation_config.update(min_length=40, no_repeat_ngram_size=1, forced_bos_token_id=7)
    gen = engine.Generator(own, tokenizer())
    assert gen.generate(PROMPT, choices=["yes", "no"]).text[0] in ("yes", "no")
    plain = gen.generate(PROMPT, response_format={"type": "text"}, max_new_tokens=8)
    assert plain.tokens == gen.generate(PROMPT, max_new_tokens=8).tokens
    with pytest.raises(engine.InvalidLogitsError, match="choices set all"):
        gen.generate(PROMPT, choices=["yes", "no"], min_new_tokens=12)


def test_one_for_each_prompt():
    gen, prompts = generator(), [PROMPT, "class A:\n", "def f(x):"]
    each = [SCHEMA, None, random_schema(5)]
    out = gen.generate(prompts, json_schema=each, max_new_tokens=40)
    alone = [
        gen.generate(text, json_schema=schema, max_new_tokens=40) for text, schema in zip(prompts, each, strict=True)
    ]
    assert out.tokens == [one.tokens[0] for one in alone]
    assert out.parsed[0] == alone[0].parsed[0]
    mixed = gen.generate(prompts, json_schema=[SCHEMA, None, None], regex=[None, "[ab]{4}", None], max_new_tokens=40)
    assert mixed.tokens[0] == out.tokens[0]
    assert set(mixed.text[1]) <= {"a", "b"}
    samples = gen.generate(prompts, json_schema=each, max_new_tokens=40, do_sample=True, num_return_sequences=2)
    assert all(
        json.loads(text)
        for text, reason in zip(samples.text[:2], samples.finish_reasons, strict=False)
        if reason == "eos"
    )


def test_many_prompts_with_and_without():
    gen = generator()
    requests = [{"prompt": PROMPT, "json_schema": random_schema(seed)} for seed in range(4)]
    requests += [{"prompt": PROMPT, "regex": "[0-9]{5}", "num_beams": 2}, PROMPT]
    found = {one.index: one.result() for one in gen.generate_many(requests, max_new_tokens=40, slots=4)}
    for index, request in enumerate(requests):
        own = dict(request) if isinstance(request, dict) else {"prompt": request}
        alone = gen.generate(own.pop("prompt"), **own, max_new_tokens=40)
        assert found[index].tokens == alone.tokens
        assert found[index].parsed == alone.parsed


def test_turns_of_a_chat():
    """Each turn has a form of its own, and gives the text that reading the whole conversation gives."""
    words = copy.deepcopy(tokenizer())
    words.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}<assistant>"
    gen = engine.Generator(model(), words)
    chat = gen.chat("Be brief.", max_new_tokens=NEW)
    for message, asked in ((PROMPT, dict(json_schema=SCHEMA)), ("x", {}), ("def f(x):", dict(regex="[0-9]{4}"))):
        most = {} if asked else {"max_new_tokens": 8}
        out = chat.send(message, **asked, **most)
        read = flat(chat._conversation.segments)[: -len(out.tokens[0])]
        alone = gen.generate(torch.tensor([read]), **asked, **{"max_new_tokens": NEW, **most})
        assert (out.tokens, out.parsed) == (alone.tokens, alone.parsed)
        if "regex" in asked:
            assert re.fullmatch("[0-9]{4}", out.text[0])
    assert re.fullmatch("[ab]{4}", chat.retry(regex="[ab]{4}").text[0])
    assert set(json.loads(chat.messages[2]["content"])) == set(SCHEMA["properties"])


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beam"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders(name, strategy):
    """The constraint is on what the decoder writes, after its first token."""
    config_class, arguments = ENCODER_DECODERS[name]
    config = getattr(transformers, config_class)(**arguments | dict(vocab_size=VOCABULARY, eos_token_id=0))
    own = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    out = engine.generate(own, ids_of(""), tokenizer=tokenizer(), json_schema=SCHEMA, max_new_tokens=NEW,
                          **STRATEGIES[strategy])  # fmt: skip
    assert set(out.finish_reasons) == {"eos"}
    for text, parsed in zip(out.text, out.parsed, strict=True):
        assert json.loads(text) == parsed
        assert set(parsed) == set(SCHEMA["properties"])


def test_other_processors_and_streams():
    gen = generator()
    out = gen.generate(PROMPT, json_schema=SCHEMA, repetition_penalty=1.5, guidance_scale=1.5, max_new_tokens=NEW)
    assert out.finish_reasons == ["eos"]
    assert json.loads(out.text[0]) == out.parsed[0]
    assert next(gen.stream(PROMPT, choices=["os"], max_new_tokens=4)).text == "os"


@pytest.mark.parametrize("strategy", ["greedy", "beam", "assisted"])
def test_when_memory_is_out(strategy):
    options = dict(STRATEGIES[strategy]) | ({"assistant_model": model(layers=1)} if strategy == "assisted" else {})
    call = dict(json_schema=SCHEMA, max_new_tokens=60, **options)
    expected = generator().generate(PROMPT, **call)
    with failing(model(), at=[(2, 1), (4, 0)]):
        out = generator().generate(PROMPT, **call)
    assert out.tokens == expected.tokens
    assert out.parsed == expected.parsed
    assert out.stats.fallbacks


def test_too_few_tokens():
    out = generator().generate(PROMPT, json_schema=SCHEMA, max_new_tokens=16)
    assert out.finish_reasons == ["length"]
    assert out.parsed == [None]
    with pytest.raises(engine.OptionError, match=r"takes \d+ tokens or more.*leaves 3: raise it"):
        generator().generate(PROMPT, json_schema=SCHEMA, max_new_tokens=3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"enum": [10**20 + 1]}}, "enum has 100000000000000000001, which a grammar of JSON rounds"),
        ({"json_schema": "{"}, "is a text that is no JSON"),
        ({"json_schema": 5}, "a JSON schema as a dict"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable schema: minimum"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"json_schema": {"type": "string", "format": "iri"}}, "Unknown format: iri: leave it out"),
        (
            {"json_schema": {"minProperties": 3, "required": ["a"]}},
            "minProperties=3 with 1 required ones cannot be kept",
        ),
        ({"json_schema": {"type": "integer", "minimum": 2**63}}, "more than the 64 bits"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": [{}, {}]}, "a list of 2, and there are 1 prompts"),
        ({"response_format": {"type": "yaml"}}, "response_format=.*json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format=.*json_object"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"choices": []}, "is empty"),
        ({"choices": "yes"}, "a list of texts"),
        ({"choices": ["a", 5]}, "a list of texts"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices both constrain prompt 0"),
        ({"regex": "a", "eos_token_id": []}, "this call has none: give eos_token_id"),
        ({"regex": "a", "forced_eos_token_id": 0}, "forced_eos_token_id=0 would break the form"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_work(asked, message):
    with failing(model(), at=[]) as seen, pytest.raises(engine.OptionError, match=message):
        generator().generate(PROMPT, **asked)
    assert seen.forwards == 0


def test_a_tokenizer_that_does_not_fit():
    ids = torch.tensor([[5, 6]])
    with pytest.raises(engine.OptionError, match=r"about the text: pass tokenizer"):
        engine.generate(model(), ids, regex="a")
    with pytest.raises(engine.OptionError, match=r"4096 tokens and the model scores of 101"):
        engine.generate(tiny_model("llama"), ids, tokenizer=tokenizer(), regex="a", eos_token_id=0)


def of_words(kind):
    """A tokenizer as of sentencepiece, with bytes for what it does not know, or one with added tokens."""
    if kind == "sentencepiece":
        pieces = ["<unk>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"0123456789-abc"]
        return sentencepiece([*pieces, "12", "ab"], [("1", "2"), ("a", "b")], eos_token="</s>", pad_token="<pad>")
    found = AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    found.add_tokens(["<think>", AddedToken("<end>", special=True)])
    return found


@pytest.mark.parametrize("kind", ["sentencepiece", "added tokens"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"num_beams": 3, "do_sample": False}], ids=str)
def test_other_tokenizers(kind, options):
    """The model has more scores than the tokenizer has tokens, and the text two ends."""
    words, vocabulary = of_words(kind), VOCABULARY + 40
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    large = randomised(
        "LlamaConfig", dict(vocab_size=vocabulary, eos_token_id=None, max_position_embeddings=256) | sizes
    )
    ends = [words.eos_token_id, len(words) - 1]
    out = engine.generate(
        large,
        "12",
        tokenizer=words,
        regex="[0-9]{2}-(ab|c|ü){1,3}",
        eos_token_id=ends,
        pad_token_id=2,
        max_new_tokens=40,
        **options,
    )
    assert out.finish_reasons == ["eos"]
    assert out.tokens[0][-1] in ends
    assert re.fullmatch("[0-9]{2}-(ab|c|ü){1,3}", words.decode(out.tokens[0][:-1]).strip())


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(engine.OptionError, match=r"regex needs the library llguidance.*kvengine\[grammar\]"):
        generator().generate(PROMPT, regex="a")


def test_on_the_command_line(cli, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    done = cli(["generate", PROMPT, "--json-schema", str(tmp_path / "schema.json"), "-n", "60"])
    assert (done.exit_code, set(json.loads(done.stdout))) == (0, set(SCHEMA["properties"])), done.stderr
    assert cli(["generate", PROMPT, "--choice", "os", "--choice", "re"]).stdout.strip() in ("os", "re")
    assert cli(["generate", PROMPT, "--regex", "[0-9]{4}"]).stdout.strip().isdigit()
    assert cli(["generate", PROMPT, "--json-schema", str(tmp_path / "none.json")]).exit_code == 2


FORMS_WITH_ADDED_TOKENS = [
    ({"choices": ["x = '<|endoftext|>'"]}, "x = '<|endoftext|>'"),
    ({"regex": r"say <\|endoftext\|> now"}, "say <|endoftext|> now"),
    ({"json_schema": {"type": "object", "properties": {"<|pad|>": {"const": 1}}, "required": ["<|pad|>"],
                      "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}}, '{"<|pad|>": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), FORMS_WITH_ADDED_TOKENS, ids=str)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_a_text_that_has_to_come_may_hold_that_of_an_added_token(shipped, form, text, options):
    out = shipped.generate("import os", **form, **options, max_new_tokens=40)
    assert (out.text, out.finish_reasons) == ([text], ["eos"])


def test_an_end_token_that_is_not_special_is_no_part_of_the_form(shipped):
    dot = shipped.tokenizer.convert_tokens_to_ids(".")
    out = shipped.generate("x", choices=["yes", "no"], eos_token_id=[dot], max_new_tokens=20)
    assert (out.text[0] in ("yes", "no"), out.tokens[0][-1], out.finish_reasons) == (True, dot, ["eos"])
    assert "".join(one.text for one in shipped.stream("x", choices=["no"], eos_token_id=[dot])) == "no"


def test_a_dict_with_keys_of_a_pattern_is_closed(shipped):
    pydantic = pytest.importorskip("pydantic")
    key = Annotated[str, pydantic.Field(pattern="^[a-c]$")]
    kind = pydantic.create_model("Marks", marks=(dict[key, bool], pydantic.Field(max_length=2)))
    found = [
        shipped.generate("x", json_schema=kind, do_sample=True, seed=seed, max_new_tokens=160) for seed in range(2)
    ]
    assert all(one.parsed[0] is not None for one in found)
