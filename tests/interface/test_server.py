"""The server: OpenAI's own client against it, field by field, and what it refuses."""

import copy
import json
import logging
import re
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai")

import httpx
import openai
import torch
from architectures import tiny_model
from injection import failing
from served import NAME, served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import engine
from engine.server.listening import allowed_hosts, host_name

PROMPT = "def read_lines(path):\n"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def gen():
    return engine.Generator(engine.SHIPPED_MODEL, config=engine.EngineConfig(prefix_store_bytes=2**27))


@pytest.fixture(scope="module")
def server(gen):
    with served(gen) as found:
        yield found


def chat(server, messages=MESSAGES, **options):
    extra = {"engine": options.pop("engine")} if "engine" in options else None
    return server.openai.chat.completions.create(
        model=NAME, messages=messages, extra_body=extra, **{"max_tokens": 12, "temperature": 0} | options
    )


def complete(server, prompt=PROMPT, **options):
    extra = {"engine": options.pop("engine")} if "engine" in options else None
    return server.openai.completions.create(
        model=NAME, prompt=prompt, extra_body=extra, **{"max_tokens": 12, "temperature": 0} | options
    )


class TestChat:
    def test_every_field_of_an_answer(self, server, gen):
        expected = gen.generate([MESSAGES], max_new_tokens=12)
        found = chat(server, user="someone", metadata={"run": "1"})
        assert found.id.startswith("chatcmpl-")
        assert (found.object, found.model) == ("chat.completion", NAME)
        assert abs(found.created - time.time()) < 60
        [choice] = found.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text[0])
        prompt_tokens = len(gen.tokenizer(PROMPT)["input_ids"])
        assert found.usage.prompt_tokens == prompt_tokens
        assert (found.usage.completion_tokens, found.usage.total_tokens) == (12, prompt_tokens + 12)
        assert found.usage.prompt_tokens_details.cached_tokens == 0

    def test_a_stream_says_the_same(self, server):
        expected = chat(server).choices[0]
        chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
        assert len(chunks) > 6
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])

    def test_several_texts_and_seeds(self, server):
        options = {"n": 3, "temperature": 1.2, "top_p": 0.9, "logit_bias": {"0": -100}}
        first, again = (chat(server, seed=5, **options) for _ in range(2))
        other = chat(server, seed=6, **options)
        texts = [[choice.message.content for choice in found.choices] for found in (first, again, other)]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        assert texts[0] == texts[1] != texts[2]
        assert len(set(texts[0])) == 3
        assert first.usage.completion_tokens == 36
        streamed = {}
        for chunk in chat(server, seed=5, stream=True, **options):
            [choice] = chunk.choices
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        assert [streamed[index] for index in range(3)] == texts[0]

    def test_log_probabilities(self, server, gen):
        expected = gen.generate([MESSAGES], max_new_tokens=12, output_logits=True)
        found = chat(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert "".join(one.token for one in found) == expected.text[0]
        for one, token, logits in zip(found, expected.tokens[0], expected.logits, strict=True):
            logprobs = logits[0].log_softmax(dim=-1)
            assert one.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            best = logprobs.topk(3)
            assert [top.token for top in one.top_logprobs] == [gen.tokenizer.decode([i]) for i in best.indices]
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert bytes(one.bytes).decode() == one.token
        streamed = [chunk.choices[0].logprobs for chunk in chat(server, logprobs=True, stream=True)]
        pieces = [one for part in streamed if part is not None for one in part.content]
        assert [one.logprob for one in pieces] == pytest.approx([one.logprob for one in found], abs=1e-4)
        assert all(one.top_logprobs == [] for one in pieces)

    @pytest.mark.parametrize("stop", ['"""', ["\n\n", '"""']])
    def test_stop(self, server, stop):
        text = chat(server, max_tokens=60).choices[0].message.content
        assert '"""' in text
        found = chat(server, max_tokens=60, stop=stop).choices[0]
        assert found.finish_reason == "stop"
        assert text.startswith(found.message.content)
        assert '"""' not in found.message.content

    def test_response_format(self, server):
        schema = {
            "type": "object",
            "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["name", "size"],
            "additionalProperties": False,
        }
        asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        found = chat(server, response_format=asked, max_tokens=60).choices[0]
        value = json.loads(found.message.content)
        assert found.finish_reason == "stop"
        assert set(value) == {"name", "size"}
        assert value["name"] in "ab"
        assert value["size"] in range(10)
        as_object = chat(server, response_format={"type": "json_object"}, max_tokens=24).choices[0]
        assert as_object.message.content.startswith("{")
        assert chat(server, response_format={"type": "text"}).choices[0].message.content

    def test_max_completion_tokens(self, server):
        found = chat(server, max_tokens=openai.omit, max_completion_tokens=5)
        assert found.usage.completion_tokens == 5

    def test_penalties_and_bias(self, server, gen):
        plain = chat(server, max_tokens=40).choices[0].message.content
        for penalty in ("frequency_penalty", "presence_penalty"):
            found = chat(server, max_tokens=40, logprobs=True, **{penalty: 2}).choices[0]
            assert found.message.content != plain
        token = gen.tokenizer.encode(plain)[0]
        biased = chat(server, logit_bias={str(token): -100}).choices[0].message.content
        assert gen.tokenizer.encode(biased)[:1] != [token]

    def test_a_second_turn_reads_only_what_is_new(self, server):
        long = [{"role": "user", "content": PROMPT * 20}]
        first = chat(server, long)
        again = chat(server, long)
        assert first.usage.prompt_tokens == again.usage.prompt_tokens
        assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
        assert again.choices[0].message.content == first.choices[0].message.content
        assert server.metric("prefix_hits_total") >= 1

    def test_tools_reach_the_template(self, gen):
        template = (
            "{% for tool in tools or [] %}# {{ tool.function.name }} {{ colour or 'grey' }}\n{% endfor %}"
            "{% for message in messages %}{{ message.content }}{{ message.tool_call_id }}{% endfor %}"
        )
        tokenizer = copy.deepcopy(gen.tokenizer)
        tokenizer.chat_template = template
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
        messages = [*MESSAGES, {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "x = 1"}]}]
        with served(engine.Generator(gen.model, tokenizer)) as server:
            for options, text in [
                ({"tools": tools}, f"# look_up grey\n{PROMPT}x = 17"),
                ({"tools": tools, "tool_choice": "none"}, f"{PROMPT}x = 17"),
                ({"tools": tools, "engine": {"chat_template_kwargs": {"colour": "red"}}},
                 f"# look_up red\n{PROMPT}x = 17"),
            ]:  # fmt: skip
                found = chat(server, messages, **options)
                assert found.usage.prompt_tokens == len(gen.tokenizer(text)["input_ids"])
                assert found.choices[0].message.content == gen.generate(text, max_new_tokens=12).text[0]
            tokenizer.chat_template = "{{ raise_exception('roles alternate') }}"
            with pytest.raises(openai.BadRequestError, match="roles alternate"):
                chat(server)
            tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
            with pytest.raises(openai.BadRequestError, match="SecurityError"):
                chat(server)
            tokenizer.chat_template = None
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                chat(server)

    def test_tool_calls_reach_the_template_as_objects(self, gen):
        tokenizer = copy.deepcopy(gen.tokenizer)
        as_json = (
            "{% for one in messages %}{{ one.content }}{% if 'tool_calls' in one %}"
            "{{ one.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
        )
        as_text = as_json.replace("one.tool_calls", "'' + one.tool_calls").replace(" | tojson", "")
        call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
        messages = [MESSAGES[0] | {"tool_calls": None}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
        with served(engine.Generator(gen.model, tokenizer)) as server:
            for template, arguments, written in [
                (as_json, '{"x": [1, 2]}', '{"x": [1, 2]}'),
                (as_json, "no JSON", '"no JSON"'),
                (as_text, '{"x":1}', '{"x":1}'),
            ]:
                tokenizer.chat_template = template
                call["function"]["arguments"] = arguments
                found = chat(server, messages)
                text = f"{PROMPT}a{written}"
                assert found.choices[0].message.content == gen.generate(text, max_new_tokens=12).text[0]


def test_a_completion_begins_with_the_space_of_its_first_word():
    """Where a tokenizer leaves out the space that a text begins with."""
    made = Tokenizer(models.WordLevel({f"\u2581w{number}": number for number in range(101)}, unk_token="\u2581w0"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=made)
    words.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    generator = engine.Generator(tiny_model("llama"), words)
    asked = "w5 w6 w7"
    said = generator.generate(asked, max_new_tokens=12).text[0]
    assert said.startswith("w")
    with served(generator) as server:
        for choice in complete(server, asked, logprobs=0, n=2, temperature=1, seed=1).choices:
            assert choice.text[:2] == " w"
            assert "".join(choice.logprobs.tokens) == choice.text
        assert complete(server, asked).choices[0].text == f" {said}"
        assert complete(server, asked, echo=True).choices[0].text == f"{asked} {said}"
        assert "".join(one.choices[0].text for one in complete(server, asked, stream=True)) == f" {said}"
        assert complete(server, asked, stop=said[:3]).choices[0].text == ""
        assert chat(server, [{"role": "user", "content": asked}]).choices[0].message.content == said


class TestCompletions:
    def test_every_field_of_an_answer(self, server, gen):
        found = complete(server)
        assert found.id.startswith("cmpl-")
        assert (found.object, found.model) == ("text_completion", NAME)
        [choice] = found.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
        assert choice.text == gen.generate(PROMPT, max_new_tokens=12).text[0]
        assert found.usage.completion_tokens == 12
        assert complete(server, max_tokens=openai.omit).usage.completion_tokens == 16

    @pytest.mark.parametrize("stream", [False, True])
    def test_several_prompts_in_all_forms(self, server, gen, stream):
        prompts = [PROMPT, "import ", "x = [1, 2"]
        expected = [gen.generate(prompt, max_new_tokens=12).text[0] for prompt in prompts]
        ids = [gen.tokenizer(prompt)["input_ids"] for prompt in prompts]
        for given, wanted in ((prompts, expected), (ids, expected), (ids[1], expected[1:2])):
            found = complete(server, given, stream=stream)
            if not stream:
                assert [choice.text for choice in found.choices] == wanted
                assert found.usage.completion_tokens == 12 * len(wanted)
                continue
            texts = dict.fromkeys(range(len(wanted)), "")
            for chunk in found:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert list(texts.values()) == wanted

    def test_best_of_is_a_search(self, server, gen):
        found = complete(server, best_of=4, n=2)
        expected = gen.generate(PROMPT, num_beams=4, num_return_sequences=2, max_new_tokens=12)
        assert [choice.text for choice in found.choices] == expected.text

    @pytest.mark.parametrize("stream", [False, True])
    def test_echo(self, server, stream):
        said, echoed = complete(server).choices[0].text, complete(server, echo=True, stream=stream)
        pieces = [chunk.choices[0].text for chunk in echoed] if stream else [echoed.choices[0].text]
        assert pieces[0].startswith(PROMPT)
        assert "".join(pieces) == PROMPT + said

    def test_the_models_own_settings_hinder_neither_scores_nor_greedy_search(self, gen):
        model = copy.deepcopy(gen.model)
        model.generation_config.stop_strings = ["\n"]
        model.generation_config.num_beams = 4
        with served(engine.Generator(model, gen.tokenizer)) as server:
            scored = complete(server, "import os\nimport sys", echo=True, logprobs=0, max_tokens=0).choices[0]
            assert scored.logprobs.token_logprobs[0] is None
            assert len(scored.logprobs.token_logprobs) == len(gen.tokenizer("import os\nimport sys")["input_ids"])
            greedy = gen.generate("import os", max_new_tokens=12, stop_strings=["\n"]).text[0]
            for more in ({}, {"logprobs": 1}):
                assert complete(server, "import os", **more).choices[0].text.strip() == greedy.strip()
            complete(server, "import os", logprobs=1, temperature=None)
            searched = gen.generate(
                "import os", max_new_tokens=12, stop_strings=["\n"], num_beams=4, length_penalty=2.0
            )
            found = complete(server, "import os", engine={"length_penalty": 2.0}).choices[0].text
            assert found.strip() == searched.text[0].strip()

    def test_echo_scores_the_prompt(self, server, gen):
        prompt = PROMPT * 9
        ids = gen.tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert ids.shape[1] > 70  # more than is scored at once
        with torch.no_grad():
            logprobs = gen.model(ids).logits.float().log_softmax(dim=-1)[0]
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        found = complete(server, prompt, echo=True, logprobs=2).choices[0]
        tokens = found.logprobs.tokens
        assert "".join(tokens) == found.text
        assert found.logprobs.token_logprobs[0] is None
        assert found.logprobs.top_logprobs[0] is None
        assert found.logprobs.token_logprobs[1 : ids.shape[1]] == pytest.approx(expected, abs=1e-3)
        assert len(tokens) == ids.shape[1] + 12
        starts = [
            found.text.startswith(token, at) for token, at in zip(tokens, found.logprobs.text_offset, strict=True)
        ]
        assert all(starts)
        counted = server.metric("prompt_tokens_total")
        scored = complete(server, prompt, echo=True, logprobs=0, max_tokens=0)
        server.wait_until_idle()
        assert server.metric("prompt_tokens_total") - counted == ids.shape[1]
        assert scored.choices[0].text == prompt
        assert scored.choices[0].logprobs.token_logprobs == found.logprobs.token_logprobs[: ids.shape[1]]
        assert scored.usage.completion_tokens == 0
        [only] = complete(server, prompt, echo=True, logprobs=0, max_tokens=0, stream=True)
        assert (only.choices[0].text, only.choices[0].finish_reason) == (prompt, "length")
        streamed = list(complete(server, prompt, echo=True, logprobs=2, stream=True))
        flat = [one for chunk in streamed for one in chunk.choices[0].logprobs.token_logprobs]
        assert flat[1:] == pytest.approx(found.logprobs.token_logprobs[1:], abs=1e-3)
        offsets = [one for chunk in streamed for one in chunk.choices[0].logprobs.text_offset]
        assert offsets == found.logprobs.text_offset


class TestOptionsOfOurs:
    @pytest.mark.covering("values", "pairs")
    @pytest.mark.parametrize("cache", ["static", "quantized", "offloaded", "sink", "none"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}, {"prompt_lookup_num_tokens": 5},
         {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3}],
        ids=["greedy", "beams", "contrastive", "lookup", "processors"],
    )  # fmt: skip
    def test_caches_and_strategies(self, server, gen, cache, options):
        sizes = {"window_length": 64, "num_sink_tokens": 4} if cache == "sink" else {}
        try:
            expected = gen.generate(PROMPT, cache=cache, cache_config=sizes or None, max_new_tokens=12, **options)
        except engine.EngineError as error:
            refused = str(error)
        else:
            refused = None
        if refused is not None:
            with pytest.raises(openai.BadRequestError) as raised:
                complete(server, engine={"cache": cache, "cache_config": sizes} | options)
            assert raised.value.body["message"] == refused
            return
        sampling = {"temperature": openai.omit} if "penalty_alpha" in options else {}
        found = complete(server, engine={"cache": cache, "cache_config": sizes} | options, **sampling)
        assert found.choices[0].text == expected.text[0]

    def test_what_the_models_list_says(self, server):
        [model] = server.openai.models.list().data
        assert model.id == NAME
        assert server.openai.models.retrieve(NAME).id == NAME
        assert {"static", "quantized"} <= set(model.engine["caches"])
        assert not {"mamba", "encoder_decoder", "sliding_window"} & set(model.engine["caches"])  # not of this model
        assert "contrastive" in model.engine["strategies"]
        with pytest.raises(openai.NotFoundError, match="this server has 'shipped'"):
            server.openai.models.retrieve("gpt")


# Each wrong field, and what the answer says of it.
WRONG = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, r"messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    (CHAT, {"n": 9, "temperature": 1}, "n=9 rows at once, but this server computes 8"),
    (CHAT, {"n": 2, "temperature": 0}, "same text"),
    (CHAT, {"max_completion_tokens": 4}, "same thing"),
    (CHAT, {"max_token": 3}, "max_token: Extra inputs"),
    (CHAT, {"top_logprobs": 2}, "logprobs: true"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream: true"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, "Invalid type"),
    (CHAT, {"tool_choice": "required", "tools": []}, "tool_choice"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias: token id 99999 is outside"),
    (CHAT, {"logit_bias": {str(2**70): 1}}, "logit_bias"),
    (CHAT, {"stop": ["x"] * 17}, "17 stop strings, and this server reads 16"),
    (CHAT, {"stop": [7]}, "stop is a text or a list of texts"),
    (CHAT, {"stop": ""}, "at least one character"),
    (CHAT, {"stop": ["x" * 300, "y" * 300]}, "400 together"),
    (CHAT, {"temperature": 1e-40}, "so small"),
    (CHAT, {"tools": [{"type": "function"}]}, "no place for tools"),
    (CHAT, {"engine": {"chat_template_kwargs": {"colour": "red"}}}, "no place for colour"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format has schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 20_000]}}}}, "16,384"),
    (CHAT, {"engine": {"grammar": "start: a\n" * 2000}}, "grammar"),
    (CHAT, {"engine": {"min_new_tokens": 99}}, "min_new_tokens=99 is more than max_tokens=12"),
    (CHAT, {"engine": {"min_new_tokens": 9, "choices": ["a"]}}, "min_new_tokens cannot apply"),
    (CHAT, {"logit_bias": {f"k{number}": 0 for number in range(50_000)}}, "logit_bias: 50,000 entries"),
    (CHAT, {"metadata": {f"k{number}": 0 for number in range(50_000)}}, "metadata: 50,000 entries"),
    (CHAT, {"engine": {"cache_config": {f"k{number}": [] for number in range(50_000)}}}, "config: 50,000 entries"),
    (CHAT, {f"k{number}": 0 for number in range(50_000)}, "50,000 unknown fields"),
    (CHAT, {"engine": {f"k{number}": 0 for number in range(50_000)}}, "50,000 unknown fields"),
    (CHAT, {"response_format": {"type": "json_object", "\ud800": 1}}, "response_format has"),
    (CHAT, {"engine": {"chat_template_kwargs": {"\ud800": 1}}}, "no place for"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "\ud800": 1}]}]}, "a part with"),
    (CHAT, {"\ud800": 1}, "valid string"),
    (CHAT, {"engine": {"cache": "sliding_window", "cache_config": {"window_length": 10**6}}}, "window_length=1000000"),
    (CHAT, {"engine": {"cache": "static", "cache_config": {"max_batch_size": 10**6}}}, "cannot set max_batch_size"),
    (CHAT, {"engine": {"cache": "encoder_decoder", "cache_config": {"self_cache": {"name": "dynamic"}}}}, "self_cache"),
    (CHAT, {"messages": [0] * 100_000}, "messages"),
    (CHAT, {"engine": {"cache": "nothing"}}, "nothing"),
    (CHAT, {"engine": {"cache": "offloaded", "cache_config": {"residency": "disk", "folder": "/etc"}}}, "folder"),
    (CHAT, {"engine": {"cache": "static", "cache_config": {"max_cache_len": 10**12}}}, "context has 2048"),
    (CHAT, {"engine": {"logits_processor": []}}, "logits_processor: Extra inputs"),
    (CHAT, {"engine": {"strategy": "assisted"}}, "assistant_model"),
    (CHAT, {"engine": {"num_beams": 64}}, "num_beams=64 rows"),
    (CHAT, {"engine": {"penalty_alpha": 0.6, "top_k": 4000}}, "top_k=4000 rows"),
    (CHAT, {"engine": {"num_beams": 2}, "logprobs": True}, "logprobs cannot apply to a beam search"),
    (CHAT, {"engine": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "chat_template cannot be set"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "no text"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": ""}, "empty"),
    (COMPLETION, {"prompt": [5000]}, "5000"),
    (COMPLETION, {"prompt": [-1]}, "prompt"),
    (COMPLETION, {"prompt": [5, 5000, 6], "echo": True, "logprobs": 0}, "token id 5000"),
    (COMPLETION, {"prompt": [5, 5000, 6], "echo": True, "logprobs": 0, "max_tokens": 0}, "token id 5000"),
    (COMPLETION, {"prompt": [5000], "echo": True, "logprobs": 0, "max_tokens": 0}, "token id 5000"),
    (COMPLETION, {"prompt": "x " * 3000}, r"the prompt has 3,001 tokens, .* context has 2,048"),
    (COMPLETION, {"prompt": ["x"] * 100}, "100 prompts in one request"),
    (COMPLETION, {"best_of": 1, "n": 2}, "raise best_of"),
    (COMPLETION, {"best_of": 2, "logprobs": 1}, "logprobs cannot apply to a beam search"),
    (COMPLETION, {"best_of": 2, "engine": {"num_beams": 2}}, "leave one out"),
    (COMPLETION, {"max_tokens": 0}, "generates nothing"),
    (COMPLETION, {"max_tokens": 0, "echo": True, "logprobs": 1, "stop": "x"}, "so stop cannot apply"),
    (COMPLETION, {"prompt": [1, "2"]}, "a prompt is"),
    (COMPLETION, {"prompt": [[1], [2**70]]}, "a prompt is"),
    (COMPLETION, {"prompt": [{}] * 100_000}, "a prompt is"),
    (COMPLETION, {"prompt": [[5] * 2000] * 30, "echo": True, "logprobs": 20, "max_tokens": 1}, "log probabilities"),
    (COMPLETION, {"suffix": "x"}, "suffix"),
    (COMPLETION, {"logprobs": 30}, "logprobs"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{path[4:]} {str(one)[:60]}" for path, one, _ in WRONG])
def test_wrong_fields(server, number):
    path, fields, said = WRONG[number]
    stream = number % 3 == 0
    own = {"messages": MESSAGES, "max_tokens": 12} if path == CHAT else {"prompt": PROMPT}
    body = {"model": NAME} | own | fields
    body |= {"stream": stream} if "stream_options" not in fields else {}
    answer = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(said, error["message"]), error["message"]


def test_other_wrong_requests(server):
    post = server.http.post
    assert post(CHAT, json={"model": "gpt", "messages": MESSAGES}).status_code == 404
    assert post(CHAT, content="{", headers={"Content-Type": "application/json"}).status_code == 400
    assert post(CHAT, content="[" * 10**5, headers={"Content-Type": "application/json"}).status_code == 400
    assert post(CHAT, content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert post(CHAT, json={"messages": ["x" * 2**20]}).status_code == 413
    chunked = (b"x" * 2**16 for _ in range(20))
    assert post(CHAT, content=chunked, headers={"Content-Type": "application/json"}).status_code == 413
    for path in ("/v1/completion", "/v1/embeddings"):  # the path, whatever else may be wrong
        nowhere = post(path, content="x", headers={"Content-Encoding": "gzip"})
        assert (nowhere.status_code, path in nowhere.json()["error"]["message"]) == (404, True)
    assert post("/v1/models", content="x").status_code == 405
    assert server.http.get("/nothing").status_code == 404
    assert server.http.get("/v1/chat/completions").status_code == 405
    assert server.http.get("/docs").status_code == 404
    assert server.http.get("/health", headers={"Host": "elsewhere.example"}).status_code == 403
    assert server.http.get("/health").json() == {"status": "ok"}


def test_null_is_the_default(server):
    names = (
        "logprobs",
        "top_logprobs",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "engine",
        "tools",
        "logit_bias",
    )
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, "temperature": 0} | dict.fromkeys(names)
    assert server.http.post(CHAT, json=body).status_code == 200
    body["engine"] = {"cache_config": None, "chat_template_kwargs": None}
    assert server.http.post(CHAT, json=body).status_code == 200


def test_a_wrong_prompt_leaves_no_run_behind(server):
    """The first prompt was submitted when the second is refused."""
    fields = {"prompt": ["def f", "x " * 3000], "max_tokens": 200}
    assert server.http.post(COMPLETION, json={"model": NAME} | fields).status_code == 400
    answer = server.http.post(COMPLETION, json={"model": NAME, "prompt": [[5, 6], [2**31 - 1]]})
    assert answer.status_code == 400
    server.wait_until_idle(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_batch_is_no_healthy_server(gen, monkeypatch):
    monkeypatch.setattr("engine.serving.scheduler.Scheduler.turn", lambda self: 1 / 0)
    with served(gen) as server:
        assert server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES}).status_code == 503
        server.wait_for(lambda: not server.service.is_alive)
        assert server.http.get("/health").status_code == 503
        failed = server.metric('requests_total{outcome="failed"}')
        assert server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES}).status_code == 503
        assert server.metric('requests_total{outcome="failed"}') == failed + 1


def test_a_key(gen):
    with served(gen, api_key="secret") as server:
        assert chat(server).choices[0].message.content
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/metrics"):
                answer = httpx.get(server.url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert "secret" not in answer.text
        assert httpx.get(server.url + "/v1/models", headers={"Authorization": "bearer  secret"}).status_code == 200
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/").status_code == 200


@pytest.mark.parametrize(
    ("given", "name"),
    [("Proxy.example", "proxy.example"), ("proxy.example:443", "proxy.example"), ("[::1]:8000", "::1"), ("::1", "::1"),
     ("fe80::1", "fe80::1"), ("127.0.0.1:80", "127.0.0.1"), ("proxy.example.:80", "proxy.example"),
     ("[0:0:0:0:0:0:0:1]:80", "::1"), ("FE80:0::1", "fe80::1")],
)  # fmt: skip
def test_a_host_may_be_named_with_its_port(given, name):
    assert allowed_hosts("0.0.0.0", [given]) == (name,)
    assert host_name(given) == name


@pytest.mark.parametrize("host", ["LocalHost", "localhost.", "127.0.0.2", "0:0:0:0:0:0:0:1"])
def test_a_server_for_this_machine_alone_goes_by_its_names(host):
    assert {"localhost", "127.0.0.1", "::1", host_name(host)} == set(allowed_hosts(host))


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/nothing", COMPLETION])
def test_what_is_asked_for_the_head_alone(server, path):
    """As a balancer or `curl -I` asks, on a connection that goes on."""
    head, whole = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.text) == (whole.status_code, "")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_the_page_is_complete(server):
    page = server.http.get("/")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in ("page.css", "page.js"):
        assert name in page.text
        found = server.http.get(f"/{name}")
        assert found.status_code == 200
        assert "http://" not in found.text
        assert "https://" not in found.text
    icon = server.http.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml; charset=utf-8")


def stream_lines(server, **fields):
    body = {"model": NAME, "messages": MESSAGES, "stream": True, "temperature": 0} | fields
    return server.http.stream("POST", CHAT, json=body)


def test_leaving_ends_a_request(gen):
    with served(gen, max_tokens=2000) as server:
        asked = {"max_tokens": 1900, "logit_bias": {str(gen.tokenizer.eos_token_id): -100}}
        with stream_lines(server, **asked) as answer:
            lines = answer.iter_lines()
            for _ in range(9):
                next(lines)
            assert server.service._open
        server.wait_until_idle(5)
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES} | asked, timeout=0.5)
        server.wait_until_idle(5)
        assert server.metric('requests_total{outcome="cancelled"}') == 2
        assert 0 < server.metric("generated_tokens_total") < 1900


def leave_soon(server, asked):
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES} | asked, timeout=2)


def test_a_full_queue(gen):
    with served(gen, max_rows=1, max_queue=2, max_tokens=2000) as server:
        asked = {"max_tokens": 1900, "logit_bias": {str(gen.tokenizer.eos_token_id): -100}}
        waiting = [threading.Thread(target=leave_soon, args=(server, asked)) for _ in range(2)]
        with stream_lines(server, **asked) as first:
            lines = first.iter_lines()
            next(lines)
            for thread in waiting:
                thread.start()
            server.wait_for(lambda: len(server.service._open) == 3)
            refused = server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES})
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            server.wait_for(lambda: server.metric('requests_in_state{state="running"}') == 1)
        for thread in waiting:
            thread.join()
        server.wait_until_idle()
        assert chat(server).choices[0].message.content
        assert server.metric('requests_total{outcome="full"}') == 1


def test_clients_at_once_get_their_own_texts(gen):
    prompts = [f"def function_{number}(a, b):\n    " for number in range(10)]
    expected = [gen.generate(prompt, max_new_tokens=8).text[0] for prompt in prompts]
    with served(gen) as server:
        found = [None] * len(prompts)

        def ask(number):
            found[number] = complete(server, prompts[number], max_tokens=8).choices[0].text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected
        assert server.metric("time_to_first_token_seconds_count") == len(prompts)
        assert server.metric("time_between_tokens_seconds_count") == 7 * len(prompts)
        assert server.metric("generated_tokens_total") == 8 * len(prompts)


def test_memory_that_is_out(gen):
    """The live cache goes to a file and the text is the same; without a fallback the answer has what there is."""
    with served(gen) as server:
        expected = complete(server, max_tokens=20).choices[0].text
        with failing(gen.model, [(5, 2)]):
            assert complete(server, max_tokens=20).choices[0].text == expected
        assert sum(server.metric(f'fallbacks_total{{name="{name}"}}') for name in ("release", "chunk", "offload")) > 0
        with failing(gen.model, [(forward, 2) for forward in range(5, 12)]) as failures:
            body = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 20}
            refused = server.http.post(COMPLETION, json=body)
            while failures.raised < 7:  # what is left is of no consequence
                assert server.http.post(COMPLETION, json=body).status_code in (200, 503)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "5"
        assert refused.json()["error"]["code"] == "out_of_memory"
        assert expected.startswith(refused.json()["partial"][0])
        assert complete(server, max_tokens=20).choices[0].text == expected


def test_errors_of_our_own_show_nothing(gen, monkeypatch, caplog):
    """An error that the engine does not know is named, but its message, which may hold a text, is not shown."""
    with served(gen) as server, caplog.at_level(logging.DEBUG, "engine"):
        monkeypatch.setattr(gen._builder, "start", lambda *_, **__: (_ for _ in ()).throw(KeyError("canary")))
        for stream in (False, True):
            answer = server.http.post(CHAT, json={"model": NAME, "messages": MESSAGES, "stream": stream})
            assert answer.status_code == 500
            assert "KeyError" in answer.text
            assert "canary" not in answer.text
        monkeypatch.undo()
        assert chat(server).choices[0].message.content
    assert "canary" not in caplog.text
    assert "KeyError" in caplog.text


def test_logs_show_no_texts(gen, caplog, capsys):
    with caplog.at_level(logging.DEBUG, "engine"), served(gen) as server:
        for fields in ({}, {"n": 2, "temperature": 1}, {"temperature": "canary"}, {"engine": {"cache": "canary"}}):
            body = {"model": NAME, "messages": [{"role": "user", "content": "canary = 1\n"}], "max_tokens": 5} | fields
            server.http.post(CHAT, json=body)
    said = capsys.readouterr()
    assert "canary" not in caplog.text + said.out + said.err


def test_the_tokenizer_is_needed():
    with pytest.raises(engine.OptionError, match="tokenizer"), served(engine.Generator(tiny_model("llama"))):
        pass
