"""Conversations: every turn gives the text that reading the whole history again gives, and reads little."""

import copy
import random
import signal
import threading

import pytest
import torch
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, randomised
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, TextIteratorStreamer

import caches
import engine
from engine.chat_template import TemplateOptions, chat_ends
from engine.decoding.loop import DecodingLoop
from engine.reuse.conversation import flat

TOKENS = 7
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}" \
        "{% if add_generation_prompt %}<assistant>{% endif %}"  # fmt: skip
# What models that think do: the beginning of an answer is not part of the history, and thoughts are dropped from it.
THINKING = "{% for m in messages %}<{{ m.role }}>" \
           "{{ m.content.split('e')[-1] if m.role == 'assistant' else m.content }}" \
           "\n{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"  # fmt: skip


@pytest.fixture
def tokenizer():
    return copy.deepcopy(AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL))


def generator_of(name, tokenizer, template=PLAIN):
    config_class, arguments = (ARCHITECTURES | MORE_ARCHITECTURES)[name]
    tokenizer.chat_template = template
    model = randomised(config_class, arguments | {"vocab_size": len(tokenizer)})
    return engine.Generator(model, tokenizer)


def history_of(chat):
    """The ids of the last turn's prompt."""
    ids = flat(chat._conversation.segments)
    ids = torch.tensor([ids[: len(ids) - len(chat.last.tokens[0])]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_turn(generator, chat, out, backend, **arguments):
    ends = chat_ends(generator.tokenizer, generator.model.generation_config.eos_token_id)
    fresh = generator.generate(history_of(chat), **backend, eos_token_id=ends, max_new_tokens=TOKENS, **arguments)
    assert out.tokens == fresh.tokens
    assert out.text == fresh.text


SMALL = {"static": {"max_cache_len": 40}, "offloaded_static": {"max_cache_len": 512}, "hybrid": {"max_cache_len": 512},
         "quantized": {"residual_length": 4}, "offloaded_quantized": {"residual_length": 4},
         "sink": {"window_length": 24, "num_sink_tokens": 2}, "sliding_window": {"window_length": 24},
         "quantized_sink": {"window_length": 24, "num_sink_tokens": 2, "residual_length": 4}}  # fmt: skip
LOSSY = ("quantized", "offloaded_quantized", "quantized_sink")  # what was encoded when depends on the steps


def conversations():
    for backend in caches.names():
        if backend in ("encoder_decoder", "mamba", *LOSSY):
            continue
        yield "gemma2" if backend == "hybrid" else "llama", backend, {}
    for name in ("gemma2", "lfm2", "mamba", "jamba"):
        yield name, "dynamic", {}
    for strategy in ({"num_beams": 3}, {"do_sample": True, "seed": 3}, {"penalty_alpha": 0.5, "top_k": 3},
                     {"prompt_lookup_num_tokens": 3}):  # fmt: skip
        yield "llama", "dynamic", strategy


@pytest.mark.parametrize(("name", "backend", "strategy"), list(conversations()), ids=str)
def test_a_turn_gives_what_reading_all_gives(name, backend, strategy, tokenizer):
    generator = generator_of(name, tokenizer)
    options = {"cache": backend, "cache_config": SMALL.get(backend)}
    chat = generator.chat("Be brief.", **options, max_new_tokens=TOKENS, **strategy)
    if backend == "static":
        options["cache_config"] = {"max_cache_len": 512}
    read = []
    for message in ("import os", "def main():", "x = [1, 2]"):
        check_turn(generator, chat, chat.send(message), options, **strategy)
        read.append(chat.last.stats.prompt_tokens)
    check_turn(generator, chat, chat.retry(), options, **strategy)
    check_turn(generator, chat, chat.edit("y = 3"), options, **strategy)
    chat.undo()
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == ["import os", "def main():"]
    check_turn(generator, chat, chat.send("class A:"), options, **strategy)
    check_turn(generator, chat, chat.send("import os"), options, **strategy)
    windows = backend in ("sink", "sliding_window") or name == "gemma2"
    if backend != "none" and not windows and name == "llama" and "penalty_alpha" not in strategy:
        assert max(read[1:]) < history_of(chat)["input_ids"].shape[1] / 2


@pytest.mark.parametrize("name", ["llama", "mistral", "mamba"])
def test_stats_count_all_that_a_turn_reads(name, tokenizer):
    chat = generator_of(name, tokenizer).chat(max_new_tokens=TOKENS)
    chat.send("import os")
    before = chat.cache.total_tokens
    out = chat.send("def main(): " * 20)
    read = history_of(chat)["input_ids"].shape[1]
    assert (out.stats.prompt_tokens, out.stats.cached_tokens) == (read - before, before)
    total = chat.cache.total_tokens
    for _ in range(2):  # a state cannot take tokens back: a copy from the end of the last message is kept
        assert chat.retry().stats.prompt_tokens <= (1 if name == "llama" else 8)
        assert chat.cache.total_tokens == total


def test_a_strategy_that_cannot_go_on_from_the_cache_starts_anew_once(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS, cache="static", cache_config={"max_cache_len": 24})
    for message in ("import os", "def main():"):
        chat.send(message)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    out = chat.send("x", streamer=streamer, penalty_alpha=0.5, top_k=3)
    check_turn(generator, chat, out, {}, penalty_alpha=0.5, top_k=3)
    assert "".join(streamer) == out.text[0]


def test_what_is_refused_before_a_turn_ends_its_streamer(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat, prefix = generator.chat(), generator.prefill("import os")
    calls = (
        lambda streamer: chat.send({"no role": 1}, streamer=streamer),
        lambda streamer: chat.retry(streamer=streamer),
        lambda streamer: chat.send("x", cache="static", streamer=streamer),
        lambda streamer: prefix.generate("", streamer=streamer),
        lambda streamer: running.send("x", streamer=streamer),
    )
    running = generator.chat(max_new_tokens=TOKENS)
    first = running.stream("import os")
    next(first)
    for call in calls:
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        with pytest.raises(engine.EngineError):
            call(streamer)
        assert "".join(streamer) == ""


def test_live_caches(tokenizer):
    generator = generator_of("llama", tokenizer)
    with pytest.raises(engine.OptionError, match="a chat keeps a cache of this package"):
        generator.chat(cache=DynamicCache())
    chat = generator.chat(cache=caches.build("dynamic", generator.model.config), max_new_tokens=TOKENS)
    other = chat.fork()
    check_turn(generator, chat, chat.send("import os"), {})
    check_turn(generator, other, other.send("x"), {})


def test_one_turn_at_a_time(tokenizer):
    chat = generator_of("llama", tokenizer).chat(max_new_tokens=TOKENS)
    first, second = chat.stream("import os"), chat.stream("x = 2")
    next(first)
    for call in (lambda: chat.send("def main():"), chat.undo, chat.fork, lambda: chat.use("static")):
        with pytest.raises(engine.EngineError, match="a turn of this chat has not ended"):
            call()
    list(first)
    list(second)
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == ["import os", "x = 2"]
    left = chat.stream("y = 3")
    next(left)
    left.close()
    assert chat.send("z = 4").text


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_template_that_writes_history_in_another_way(name, tokenizer):
    generator = generator_of(name, tokenizer, THINKING)
    chat = generator.chat("s", max_new_tokens=TOKENS)
    for message in ("import os", "def main():", "x", "y"):
        out = chat.send(message)
        check_turn(generator, chat, out, {})
        assert tokenizer.decode(history_of(chat)["input_ids"][0]) == tokenizer.apply_chat_template(
            list(chat.messages[:-1]), tokenize=False, add_generation_prompt=True
        )


def test_ids_are_kept_where_text_would_be_tokenized_in_another_way(tokenizer):
    generator, others = generator_of("llama", tokenizer), 0
    for seed in range(5):
        chat = generator.chat(max_new_tokens=TOKENS, do_sample=True, seed=seed, temperature=3.0)
        said = [chat.send("import os").tokens[0], chat.send("x").tokens[0]]
        ids = flat(chat._conversation.segments)
        for tokens in said:
            assert any(ids[at : at + len(tokens)] == tokens for at in range(len(ids)))
            others += tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"] != tokens
    assert others  # or this test says nothing


def test_without_a_template(tokenizer):
    generator = generator_of("llama", tokenizer, None)
    chat = generator.chat("Be brief.", max_new_tokens=TOKENS)
    chat.send("import os")
    out = chat.send("x")
    check_turn(generator, chat, out, {}, stop_strings=["\nUser:"])
    text = tokenizer.decode(history_of(chat)["input_ids"][0])
    assert text.startswith("Be brief.\n\nUser: import os\nAssistant:")
    assert text.endswith("User: x\nAssistant:")
    with pytest.raises(engine.InputError, match="no chat template, and role='tool'"):
        chat.send({"role": "tool", "content": "x"})


def check_history(chat):
    """The last prompt is what the messages say, and all before it but the end of the last answer was read already."""
    conversation = chat._conversation
    expected = conversation._text(chat.messages[:-1], TemplateOptions())
    assert conversation.tokenizer.decode(history_of(chat)["input_ids"][0]) == expected


@pytest.mark.parametrize("template", [PLAIN, None])
def test_a_stop_string_is_no_part_of_the_conversation(template, tokenizer):
    generator = generator_of("llama", tokenizer, template)
    whole = generator.chat(max_new_tokens=12).send("import os").text[0]
    chat = generator.chat(max_new_tokens=12, stop_strings=whole[4:6])
    out = chat.send("import os")
    assert out.finish_reasons == ["stop_string"]
    assert out.text[0] == whole[: whole.index(whole[4:6])]
    chat.send("x")
    check_history(chat)


@pytest.mark.parametrize("of_model", [False, True])
def test_stop_strings_of_a_configuration_end_answers_without_a_template_too(of_model, tokenizer):
    generator = generator_of("llama", tokenizer, None)
    answer = generator.chat(max_new_tokens=12).send("import os").text[0]
    config = GenerationConfig(stop_strings=[answer[4:6]])
    if of_model:
        generator.model.generation_config.stop_strings = config.stop_strings
    given = {} if of_model else {"generation_config": config}
    out = generator.chat(max_new_tokens=12, **given).send("import os")
    assert (out.text, out.finish_reasons) == ([answer[: answer.index(answer[4:6])]], ["stop_string"])


def test_the_tokenizer_of_a_chat_is_that_of_its_generator(tokenizer):
    generator = generator_of("llama", tokenizer)
    with pytest.raises(engine.OptionError, match="tokenizer cannot apply to a chat, which has that of its generator"):
        generator.chat(tokenizer=tokenizer)
    with pytest.raises(engine.OptionError, match="tokenizer cannot apply to a chat"):
        generator.chat(max_new_tokens=3).send("a", tokenizer=tokenizer)


def test_the_next_question_ends_an_answer_once(tokenizer):
    """Without a template a model goes on with it, also where other strings end an answer too."""
    # What was generated is not read again. A state cannot take back the forced token behind it: it goes on from the end
    # of the question.
    for name, most in (("llama", 12), ("mamba", 18)):
        chat = generator_of(name, tokenizer, None).chat(max_new_tokens=30, stop_strings=["STOP"])
        out = chat.send("x", regex=" fine\nUser: no", eos_token_id=0)
        assert (out.text, out.finish_reasons) == ([" fine"], ["stop_string"])
        out = chat.send("y")
        check_history(chat)
        assert out.stats.prompt_tokens <= most


def test_an_answer_without_a_word_is_taken_back(tokenizer):
    chat = generator_of("llama", tokenizer).chat(max_new_tokens=4)
    chat.send("x", regex="\n\n", eos_token_id=0)
    first = history_of(chat)["input_ids"]
    chat.retry(regex="a", eos_token_id=0)
    assert torch.equal(history_of(chat)["input_ids"], first)


def test_a_template_that_refuses_messages(tokenizer):
    chat = generator_of("llama", tokenizer, "{{ raise_exception('no system message') }}").chat("s")
    with pytest.raises(engine.InputError, match="refuses these messages: TemplateError: no system message"):
        chat.send("x")
    assert len(chat.messages) == 1


def test_a_file_brings_its_cache(tokenizer, tmp_path):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=2, cache="none")
    chat.send("x")
    with pytest.raises(engine.InputError, match="'none' keeps no cache"):
        chat.save(tmp_path / "talk")
    for begin in (generator.chat, generator.prefill):
        with pytest.raises(engine.OptionError, match="leave"):
            begin(resume=tmp_path / "talk", cache_config={"nbits": 4})


def test_a_fork_goes_its_own_way(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send("import os")
    other = chat.fork()
    check_turn(generator, other, other.send("x = 1"), {})
    check_turn(generator, chat, chat.send("y = 2"), {})
    assert other.last.stats.prompt_tokens < 16
    assert [one["content"] for one in other.messages][::2] == ["import os", "x = 1"]


def test_saved_and_resumed(tokenizer, tmp_path):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat("Be brief.", max_new_tokens=TOKENS)
    chat.send("import os")
    with pytest.raises(engine.InputError, match="nothing to save"):
        generator.chat().save(tmp_path / "none")
    chat.save(tmp_path / "chat")
    back = generator.chat(resume=tmp_path / "chat", max_new_tokens=TOKENS)
    assert back.messages == chat.messages
    out = back.send("x")
    check_turn(generator, back, out, {})
    assert out.stats.prompt_tokens < 16
    with pytest.raises(engine.OptionError, match="resume= brings"):
        generator.chat("s", resume=tmp_path / "chat")
    chat.cache.save(tmp_path / "alone")
    with pytest.raises(engine.InputError, match="holds a cache, but no conversation"):
        generator.chat(resume=tmp_path / "alone")


def test_another_backend_in_the_middle(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send("import os")
    for name, options in (("offloaded", {}), ("static", {"max_cache_len": 64}), ("dynamic", {})):
        chat.use(name, **options)
        check_turn(generator, chat, chat.send("x"), {})
        assert (chat.backend, chat.last.stats.cache) == (name, name)
    with pytest.raises(caches.UnknownCacheError):
        chat.use("nothing")
    assert chat.backend == "dynamic"


def test_a_cache_of_fixed_size_grows_in_rows(tokenizer, monkeypatch):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS, cache="static")
    chat.send("import os")
    total = chat.cache.total_tokens
    check_turn(generator, chat, chat.send("x", num_beams=2), {"cache": "static"}, num_beams=2)
    assert chat.last.stats.cached_tokens == total
    assert (chat.cache.max_rows, chat.cache.max_tokens) == (2, 128)
    check_turn(generator, chat, chat.send("y", penalty_alpha=0.5, top_k=3), {}, penalty_alpha=0.5, top_k=3)
    monkeypatch.setattr("engine.reuse.room.with_room", lambda cache, tokens, rows: cache)  # as of a plug-in
    with pytest.raises(caches.CapacityError, match="are to become 5 rows"):
        chat.send("z", num_beams=5)


def test_a_streamer_gets_the_answer_also_where_the_cache_has_to_grow(tokenizer):
    chat = generator_of("llama", tokenizer).chat(
        max_new_tokens=TOKENS, cache="static", cache_config={"max_cache_len": 24}
    )
    for message in ("import os", "def main():"):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        out = chat.send(message, streamer=streamer)
        assert "".join(streamer) == out.text[0]
    assert chat.cache.max_tokens > 24


@pytest.mark.parametrize(
    ("name", "cache", "asked"),
    [("gemma2", "static", {}), ("mistral", "sliding_window", {"num_beams": 2}), ("mistral", "static", {"num_beams": 2}),
     ("mamba", "mamba", {"num_beams": 2})],
)  # fmt: skip
def test_caches_with_windows_and_states_grow_too(name, cache, asked, tokenizer):
    generator = generator_of(name, tokenizer)
    size = {"cache_config": {"max_cache_len": 24}} if cache == "static" else {}
    chat = generator.chat(max_new_tokens=TOKENS, cache=cache, **size)
    for message in ("import os", "def main():", "x"):
        out = chat.send(message, **asked)
        check_turn(generator, chat, out, {}, **asked)


@pytest.mark.parametrize("name", ["mamba", "mistral"])
def test_reading_a_prompt_is_cancelled_and_ends_the_streamer(name, tokenizer):
    chat = generator_of(name, tokenizer).chat(max_new_tokens=TOKENS)
    chat.send("import os")
    before, stop = chat.messages, threading.Event()
    stop.set()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with pytest.raises(engine.GenerationCancelled):
        chat.send("def main():", cancellation=stop, streamer=streamer)
    assert "".join(streamer) == ""
    assert chat.messages == before
    check_turn(generator_of(name, tokenizer), chat, chat.send("x"), {})


def test_a_cache_that_grows_keeps_its_options(tokenizer, tmp_path):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send("import os")
    chat.use("offloaded_static", residency="disk", folder=str(tmp_path), max_cache_len=24)
    check_turn(generator, chat, chat.send("def main():"), {})
    config = chat.cache.stacks[0].layout.config
    assert (config.residency, config.folder, config.max_cache_len) == ("disk", str(tmp_path), 48)


def test_the_backend_before_and_without_a_cache(tokenizer):
    model = generator_of("llama", tokenizer).model
    for given, backend in (("none", "none"), (caches.recipe("static").options(), "static"), (None, "dynamic")):
        chat = engine.Generator(model, tokenizer, engine.EngineConfig(cache=given)).chat(max_new_tokens=2)
        assert chat.backend == backend
        assert chat.send("x").stats.cache == chat.backend == backend
    chat = engine.Generator(model, tokenizer).chat(max_new_tokens=2, use_cache=False)
    assert chat.send("x").stats.cache == chat.backend == "none"
    chat.use("static")
    assert chat.backend == "static"


def test_a_turn_has_one_answer_whatever_a_generation_config_says(tokenizer):
    generator = generator_of("llama", tokenizer)
    two = GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=TOKENS)
    chat = generator.chat(generation_config=two)
    assert len(chat.send("x").tokens) == len(chat.send("y").tokens) == 1
    generator.model.generation_config = two
    chat = generator.chat()
    assert len(chat.send("x").tokens) == len(chat.send("y").tokens) == 1


def test_a_second_ctrl_c_leaves_the_conversation_as_it_was(tokenizer, monkeypatch):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send("import os")
    messages = chat.messages

    def press(ids, scores):
        signal.raise_signal(signal.SIGINT)
        return scores

    def interrupted(loop):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DecodingLoop, "break_off", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.send("x", logits_processor=[press])
    assert chat.messages == messages
    check_turn(generator, chat, chat.send("y"), {})


def test_an_answer_that_is_left_early_is_the_answer(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chunks = chat.stream("import os")
    next(chunks)
    next(chunks)
    chunks.close()
    assert [one["role"] for one in chat.messages] == ["user", "assistant"]
    assert len(chat.last.tokens[0]) < TOKENS
    check_turn(generator, chat, chat.send("x"), {})


def test_an_error_leaves_the_conversation_as_it_was(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send("import os")
    messages = chat.messages

    def fail(ids, scores):
        raise ValueError("broken")

    with pytest.raises(engine.GenerationInterrupted, match="broken"):
        chat.send("x", logits_processor=[fail])
    assert chat.messages == messages
    out = chat.send("x")
    check_turn(generator, chat, out, {})
    assert out.stats.prompt_tokens < 16
    messages = chat.messages
    with pytest.raises(engine.GenerationInterrupted, match="broken"):
        chat.edit("y", logits_processor=[fail])
    assert chat.messages == messages
    check_turn(generator, chat, chat.send("z"), {})


def test_what_cannot_be_a_chat_is_refused(tokenizer):
    generator = generator_of("llama", tokenizer)
    with pytest.raises(engine.OptionError, match="num_return_sequences cannot apply to a chat"):
        generator.chat(num_return_sequences=2)
    with pytest.raises(engine.OptionError, match="num_return_sequences cannot apply to a chat"):
        generator.chat().send("x", num_return_sequences=2)
    for name in ("cache", "cache_config", "inputs"):
        with pytest.raises(engine.OptionError, match=f"{name} cannot apply to a chat"):
            generator.chat().send("x", **{name: "static"})
    with pytest.raises(caches.UnknownCacheError, match=r"no cache named 'statik'; did you mean 'static'\?"):
        generator.chat(cache="statik")
    with pytest.raises(engine.OptionError, match=r"know no input 'max_token'; did you mean 'max_new_tokens'"):
        generator.chat(max_token=4)
    with pytest.raises(engine.OptionError, match="a chat needs a tokenizer"):
        engine.Generator(generator.model).chat()
    for change in (generator.chat().retry, generator.chat().undo):
        with pytest.raises(engine.InputError, match="there is no"):
            change()


def random_conversation(seed, tokenizer, tmp_path, turns=8):
    """Turns, retries, edits, forks, files, other backends: every answer is that of reading all of it again."""
    draw = random.Random(seed)
    generator = generator_of("llama", tokenizer, draw.choice([PLAIN, THINKING, None]))
    chats = [generator.chat(draw.choice([None, "Be brief."]), max_new_tokens=TOKENS)]
    stop = {} if tokenizer.chat_template else {"stop_strings": ["\nUser:"]}
    for turn in range(turns):
        chat = draw.choice(chats)
        kind = draw.choice(["send", "send", "retry", "edit", "undo", "fork", "file", "use"])
        has_answer = bool(chat.messages) and chat.messages[-1]["role"] == "assistant"
        message = draw.choice(["import os", "x", "def f(a):\n    return a", "  y  ", "\u00e9\u20ac", "class A: pass"])
        if kind in ("send", "retry", "edit"):
            if kind != "send" and not has_answer:
                continue
            out = chat.retry() if kind == "retry" else getattr(chat, kind)(message)
            check_turn(generator, chat, out, {}, **stop)
        elif kind == "undo" and has_answer:
            chat.undo()
        elif kind == "fork" and len(chats) < 4:
            chats.append(chat.fork())
        elif kind == "file" and chat.cache is not None:
            chat.save(tmp_path / f"{seed}-{turn}")
            chats[chats.index(chat)] = generator.chat(resume=tmp_path / f"{seed}-{turn}", max_new_tokens=TOKENS)
        elif kind == "use" and chat.cache is not None:
            name = draw.choice(["static", "offloaded", "dynamic"])
            chat.use(name, **({"max_cache_len": 512} if name == "static" else {}))


def test_random_conversations(tokenizer, tmp_path):
    for seed in range(12):
        random_conversation(seed, tokenizer, tmp_path)


@pytest.mark.slow
def test_many_random_conversations(tokenizer, tmp_path):
    for seed in range(100, 300):
        random_conversation(seed, tokenizer, tmp_path)


@pytest.mark.parametrize("name", ["mamba", "lfm2", "gemma2"])
def test_what_cannot_go_back_goes_on_from_a_branch(name, tokenizer):
    """At the end of the system message, of the last answer and of the last message."""
    generator = generator_of(name, tokenizer)
    chat = generator.chat("Be brief. Be correct. Be kind. " * 4, max_new_tokens=TOKENS)
    prompts = []
    for message in ("import os\n" * 4, "def main():", "x = [1, 2]"):
        check_turn(generator, chat, chat.send(message), {})
        prompts.append(history_of(chat)["input_ids"].shape[1])
    check_turn(generator, chat, chat.edit("y"), {})  # from the end of the last answer
    assert chat.last.stats.cached_tokens >= prompts[1]
    check_turn(generator, chat, chat.edit("z"), {})
    assert chat.last.stats.cached_tokens >= prompts[1]
    chat.undo()
    chat.undo()
    check_turn(generator, chat, chat.edit("class A:"), {})  # from the end of the system message, once it was kept
    chat.edit("class B:")
    check_turn(generator, chat, chat.last, {})
    system = len(flat(chat._conversation.ids(chat.messages[:1])))
    assert chat.last.stats.cached_tokens >= system > 20


@pytest.mark.parametrize("backend", ["sink", "sliding_window"])
def test_a_window_talks_for_ever_in_constant_memory(backend, tokenizer):
    generator = generator_of("llama", tokenizer)
    if backend == "sliding_window":  # whose positions grow
        generator.model.config.max_position_embeddings = 10**6
    options = {"window_length": 32} | ({"num_sink_tokens": 2} if backend == "sink" else {})
    chat, sizes, read = generator.chat(cache=backend, cache_config=options, max_new_tokens=TOKENS), [], []
    for turn in range(40):
        chat.send(f"x = {turn}")
        sizes.append(chat.cache.bytes)
        read.append(chat.last.stats.prompt_tokens)
    assert chat.cache.total_tokens > 400
    assert len(set(sizes[10:])) == 1
    assert max(read[1:]) < 20  # the new message, not the conversation


@pytest.mark.parametrize("message", [[{"role": "user", "content": "x"}], {"content": "x"}, ["x"], None, 5], ids=str)
def test_what_is_no_message_is_refused(shipped, message):
    chat = shipped.chat()
    with pytest.raises(engine.InputError, match="a message is a text or a mapping"):
        chat.send(message)
    assert chat.messages == ()
    with pytest.raises(engine.InputError, match="a system message is a text"):
        shipped.chat([{"role": "system", "content": "x"}])


def test_an_end_token_that_is_not_special_is_no_part_of_the_answer(tokenizer):
    tokenizer.add_tokens(["<|im_end|>"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=20, eos_token_id=[end], sequence_bias={(end,): 100.0}, min_new_tokens=3)
    out = chat.send("import os")
    assert out.finish_reasons == ["eos"]
    assert "<|im_end|>" not in chat.messages[-1]["content"]


def test_two_chats_with_one_prefix_store(tokenizer):
    """Without a generation prompt both want to go on from the same place."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model = generator_of("mistral", tokenizer, template).model
    generator = engine.Generator(model, tokenizer, engine.EngineConfig(prefix_store_bytes=10**8))
    asked = "import os\nimport sys\nfrom pathlib import Path\n" * 3
    said = [generator.chat(max_new_tokens=TOKENS).send(asked).tokens for _ in range(3)]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("name", ["mistral", "mamba"])
def test_guided_turns_and_turns_that_record_keep_nothing_on_the_way(name, tokenizer):
    generator = generator_of(name, tokenizer)
    chat = generator.chat(max_new_tokens=TOKENS)
    check_turn(generator, chat, chat.send("import os", guidance_scale=2.0), {}, guidance_scale=2.0)
    check_turn(generator, chat, chat.retry(), {})
    recorded = generator.chat(max_new_tokens=TOKENS).send("import os", output_hidden_states=True)
    assert recorded.hidden_states[0][0].shape[1] == recorded.stats.prompt_tokens


def test_an_ordinary_token_that_ends_an_answer_stays_in_it(tokenizer):
    dot = tokenizer.convert_tokens_to_ids(".")
    generator = generator_of("llama", tokenizer)
    chat = generator.chat(max_new_tokens=20, eos_token_id=[dot], sequence_bias={(dot,): 100.0})
    assert chat.send("import os").text == ["."]
    assert chat.messages[-1]["content"] == "."


def test_a_branch_that_has_no_memory_is_not_kept(tokenizer, monkeypatch):
    generator, faults = generator_of("mamba", tokenizer), []

    def out_once(cache):
        faults.append(cache)
        if len(faults) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return caches.branch(cache)

    monkeypatch.setattr("engine.reuse.resume_points.branch", out_once)
    chat = generator.chat(max_new_tokens=TOKENS)
    check_turn(generator, chat, chat.send("import os"), {})
    assert faults


# What an application has said before, and what is changed between two turns.


def test_a_chat_begins_with_the_history_of_an_application(tokenizer):
    generator = generator_of("llama", tokenizer)
    earlier = generator.chat("Be brief.", max_new_tokens=TOKENS)
    earlier.send("import os")
    chat = generator.chat(messages=list(earlier.messages), max_new_tokens=TOKENS)
    assert (chat.messages, chat.system) == (earlier.messages, "Be brief.")
    assert chat.send("def main():").text == earlier.send("def main():").text
    with_system = generator.chat("Be brief.", messages=earlier.messages[1:], max_new_tokens=TOKENS)
    assert with_system.messages == earlier.messages
    with_system.undo()
    assert with_system.messages == earlier.messages[:3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "hi"}, "messages= is a list of mappings"),
        ({"messages": {"role": "user", "content": "hi"}}, "messages= is a list of mappings"),
        ({"messages": [{"content": "hi"}]}, "a message is a text or a mapping with 'role'"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "has no answer yet: leave it out, and send"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}]}, "the system message was given twice"),
        ({"messages": [], "resume": "file"}, "resume= brings the messages"),
        ({"when_full": "forget"}, "when_full='forget', but it is one of stop, drop"),
    ],
    ids=str,
)
def test_a_history_that_is_none_is_refused(shipped, arguments, message):
    with pytest.raises(engine.EngineError, match=message):
        shipped.chat(**arguments)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_messages_and_parameters_change_between_turns(name, tokenizer):
    generator = generator_of(name, tokenizer)
    chat, other = (generator.chat(system, max_new_tokens=TOKENS) for system in ("Be brief.", "Be long."))
    for message in ("import os", "def main():"):
        chat.send(message)
        other.send(message)
    chat.system = "Be long."
    check_turn(generator, chat, chat.send("x"), {})
    assert [one["content"] for one in chat.messages if one["role"] != "assistant"] == [
        "Be long.", "import os", "def main():", "x"
    ]  # fmt: skip
    chat.clear()
    assert (chat.messages, chat.last) == (({"role": "system", "content": "Be long."},), None)
    assert chat.send("import os").text == generator.chat("Be long.", max_new_tokens=TOKENS).send("import os").text
    chat.system = None
    assert [one["role"] for one in chat.messages] == ["user", "assistant"]
    chat.parameters |= {"max_new_tokens": 2}
    assert len(chat.send("y").tokens[0]) == 2
    with pytest.raises(engine.OptionError, match="cache cannot apply to a chat"):
        chat.parameters = {"cache": "static"}


def test_a_system_message_that_the_template_refuses_changes_nothing(tokenizer):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    chat = generator_of("llama", tokenizer, refuses).chat(max_new_tokens=TOKENS)
    chat.send("import os")
    before = chat.messages
    with pytest.raises(engine.InputError, match="refuses these messages"):
        chat.system = "Be brief."
    assert chat.messages == before


@pytest.mark.parametrize(("name", "backend"), [("llama", "dynamic"), ("llama", "static"), ("gemma2", "dynamic")])
def test_a_full_model_goes_on_without_the_oldest_turns(name, backend, tokenizer):
    generator = generator_of(name, tokenizer)
    positions = generator.model.config.max_position_embeddings
    chat = generator.chat("Be brief.", cache=backend, max_new_tokens=TOKENS, when_full="drop")
    sent, left_out = [], []
    for number in range(12):
        sent.append(f"x{number} = 1 " * (positions // 40))
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        out = chat.send(sent[-1], streamer=streamer)
        assert "".join(streamer) == out.text[0]
        check_turn(generator, chat, out, {})
        left_out.append(chat.left_out)
    first = chat.left_out // 2
    assert 0 < first < len(sent)
    assert left_out == sorted(left_out)
    assert len(set(left_out)) < len(sent) / 2  # not with every turn
    assert chat.system == "Be brief."
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == sent[first:]
    assert chat.fork().left_out == chat.left_out
    assert history_of(chat)["input_ids"].shape[1] + TOKENS - 1 <= positions


def test_a_full_model_stops_with_a_remedy(tokenizer):
    generator = generator_of("llama", tokenizer)
    positions = generator.model.config.max_position_embeddings
    long = "x = 1 " * (positions // 6)
    chat = generator.chat(max_new_tokens=TOKENS)
    chat.send(long)
    before = chat.messages
    with pytest.raises(engine.InputError, match=f"model has {positions}.*undo.. or clear.*when_full='drop'"):
        chat.send(long)
    assert (chat.messages, chat.left_out) == (before, 0)
    dropping = generator.chat(messages=before, max_new_tokens=TOKENS, when_full="drop")
    with pytest.raises(engine.InputError, match="send a shorter message, or ask for a shorter answer"):
        dropping.send(long * 3)
    assert (dropping.messages, dropping.left_out) == (before, 0)


def test_an_answer_that_was_continued_is_known_when_others_were_left_out(tokenizer):
    generator = generator_of("llama", tokenizer)
    chat = generator.chat("Be brief.", max_new_tokens=TOKENS, when_full="drop")
    chat.send("x = 1 " * 40)
    chat.send("y")
    chat.send({"role": "assistant", "content": "Sure, "})
    continued = chat.messages[-1]
    chat.send("z = 1 " * 20)
    assert chat.left_out == 2
    chat.undo()
    assert chat.messages[-1] == continued
    chat.retry()
    assert chat.messages[-1]["content"].startswith("Sure, ")
