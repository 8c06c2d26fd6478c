"""Conversations: every turn gives the text that reading the whole history again gives, and reads little."""

import copy
import random
import signal
import threading

import pytest
from chats import PLAIN, THINKING, TOKENS, check_turn, generator_of, history_of
from covering import graded
from transformers import GenerationConfig, TextIteratorStreamer

import caches
import engine
from engine.decoding.loop import DecodingLoop


@pytest.fixture
def tokenizer(tokenizer):
    """One of its own, whose template is changed."""
    return copy.deepcopy(tokenizer)


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


def test_the_tokenizer_of_a_chat_is_that_of_its_generator(tokenizer):
    generator = generator_of("llama", tokenizer)
    with pytest.raises(engine.OptionError, match="tokenizer cannot apply to a chat, which has that of its generator"):
        generator.chat(tokenizer=tokenizer)
    with pytest.raises(engine.OptionError, match="tokenizer cannot apply to a chat"):
        generator.chat(max_new_tokens=3).send("a", tokenizer=tokenizer)


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


@pytest.mark.parametrize("seeds", graded((), [range(100, 140)], [range(140, 300)]), ids=len)
def test_many_random_conversations(seeds, tokenizer, tmp_path):
    for seed in seeds:
        random_conversation(seed, tokenizer, tmp_path)
