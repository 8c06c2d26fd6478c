"""The cache of a conversation: in other backends, in files, in forks, as it grows, and where it cannot go back."""

import copy

import pytest
import torch
from chats import TOKENS, check_turn, generator_of, history_of
from transformers import DynamicCache, TextIteratorStreamer

import caches
import engine
from engine.reuse.conversation import flat


@pytest.fixture
def tokenizer(tokenizer):
    """One of its own, whose template is changed."""
    return copy.deepcopy(tokenizer)


def test_live_caches(tokenizer):
    generator = generator_of("llama", tokenizer)
    with pytest.raises(engine.OptionError, match="a chat keeps a cache of this package"):
        generator.chat(cache=DynamicCache())
    chat = generator.chat(cache=caches.build("dynamic", generator.model.config), max_new_tokens=TOKENS)
    other = chat.fork()
    check_turn(generator, chat, chat.send("import os"), {})
    check_turn(generator, other, other.send("x"), {})


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
