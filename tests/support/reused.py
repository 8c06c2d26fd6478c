"""Random histories of calls and conversations that share beginnings, on a generator that keeps the caches of calls.

Every text is compared with that of a generator which keeps nothing. Run as a program to make many:
`python tests/support/reused.py 10000`.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, MORE_ARCHITECTURES, randomised
from transformers import AutoTokenizer

import engine
from engine.reuse import prefix_store
from engine.reuse.conversation import flat

NEW, LEAST = 3, 6
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}" \
           "{% if add_generation_prompt %}<assistant>{% endif %}"  # fmt: skip
KINDS = {
    "llama": ["dynamic"] * 4 + ["static", "offloaded", "offloaded_static", "sliding_window", "sink"],
    "gemma2": ["dynamic", "hybrid"],
    "lfm2": ["dynamic"],
}
OPTIONS = {
    "static": {"max_cache_len": 512},
    "offloaded_static": {"max_cache_len": 512},
    "hybrid": {"max_cache_len": 512},
    "sliding_window": {"window_length": 16},
    "sink": {"window_length": 16, "num_sink_tokens": 2},
}
MESSAGES = ("import os", "def main():", "x = [1, 2]", "class A:", "y", "return self.x")


@cache
def tokenizer():
    found = copy.deepcopy(AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL))
    found.chat_template = TEMPLATE
    return found


@cache
def model_of(kind):
    config_class, arguments = (ARCHITECTURES | MORE_ARCHITECTURES)[kind]
    layers = {"num_hidden_layers": 2} if kind == "llama" else {}
    return randomised(config_class, arguments | {"vocab_size": len(tokenizer())} | layers)


class History:
    """One history. counts: what happened in it."""

    def __init__(self, seed: int, folder: Path):
        self.draw = random.Random(seed)
        self.kind = self.draw.choice(["llama"] * 4 + ["gemma2", "lfm2"])
        self.model = self.new_model()
        self.options = self.backend()
        self.folder = folder
        self.config = engine.EngineConfig(
            prefix_store_bytes=self.draw.choice([40_000, 120_000, 10**7]),
            prefix_store_folder=str(folder) if self.draw.random() < 0.3 else None,
            linears="default",
        )
        self.counts: Counter[str] = Counter()
        self.texts: list[list[int]] = []
        self.chats: list[engine.Chat] = []
        self.begin()

    def new_model(self):
        return model_of(self.kind)

    def begin(self) -> None:
        """As a process that starts."""
        self.generator = engine.Generator(self.model, tokenizer(), self.config)
        self.plain = engine.Generator(self.model, tokenizer(), engine.EngineConfig(linears="default"))

    def backend(self) -> dict:
        backend = self.draw.choice(KINDS[self.kind])
        return {"cache": backend, "cache_config": OPTIONS.get(backend)}

    def ids(self, most: int) -> list[int]:
        return [self.draw.randrange(3, 200) for _ in range(self.draw.randint(1, most))]

    def run(self, operations: int) -> Counter[str]:
        beginnings = [self.ids(20) for _ in range(2)]
        for _ in range(operations):
            operation = self.draw.choice(_OPERATIONS)
            self.counts[operation.__name__] += 1
            operation(self, beginnings)
        return self.counts

    def check(self, ids: list[int]) -> list[int]:
        """Generate from the ids, on both generators. Returns the new tokens of the first text."""
        strategy = self.draw.choice([{}] * 5 + [{"num_beams": 2}, {"do_sample": True, "seed": 1},
                                    {"do_sample": True, "seed": 2, "num_return_sequences": 2}])  # fmt: skip
        options = self.options if self.draw.random() < 0.7 else self.backend()
        if self.draw.random() < 0.1 and options["cache"] == "dynamic" and self.kind == "llama":
            strategy = {"prompt_lookup_num_tokens": 2}
        arguments = {"max_new_tokens": NEW, **options, **strategy}
        inputs = _unpadded(torch.tensor([ids]))
        out = self.generator.generate(inputs, **arguments)
        expected = self.plain.generate(inputs, **arguments)
        assert out.tokens == expected.tokens, (self.kind, options, strategy, out.stats.cached_tokens, ids)
        self.counts["cached tokens"] += out.stats.cached_tokens
        store = self.generator._store
        assert store.bytes <= self.config.prefix_store_bytes
        assert store.bytes == _bytes(store)
        return out.tokens[0]

    def check_chat(self, chat: engine.Chat) -> None:
        ids = flat(chat._conversation.segments)
        ids = torch.tensor([ids[: len(ids) - len(chat.last.tokens[0])]])
        expected = self.plain.generate(_unpadded(ids), **self.options, max_new_tokens=NEW)
        assert chat.last.tokens == expected.tokens, (self.kind, self.options, ids.tolist())
        self.counts["cached tokens of chats"] += chat.last.stats.cached_tokens


def _unpadded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _bytes(store) -> int:
    """Counted anew."""
    found = {}
    for index in store._kinds.values():
        for entry in index:
            if entry.cache is not None:
                for layer in entry.cache.layers:
                    for tensor in layer.tensors():
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def other_prompt(history: History, beginnings) -> None:
    ids = history.draw.choice([[], *beginnings]) + history.ids(12)
    history.texts.append(ids + history.check(ids))


def turn(history: History, beginnings) -> None:
    if history.texts:
        at = history.draw.randrange(len(history.texts))
        ids = history.texts[at] + history.ids(8)
        history.texts[at] = ids + history.check(ids)


def edit(history: History, beginnings) -> None:
    if history.texts:
        text = history.draw.choice(history.texts)
        ids = text[: history.draw.randint(1, len(text))]
        history.texts.append(ids + history.check(ids))


def again(history: History, beginnings) -> None:
    if history.texts:
        history.check(history.draw.choice(history.texts))


def forget(history: History, beginnings) -> None:
    history.generator._store.clear()


def restart(history: History, beginnings) -> None:
    history.generator._store.clear()
    history.begin()
    history.chats = []


def write_weights(history: History, beginnings) -> None:
    """The caches of before are of other weights."""
    with torch.no_grad():
        weight = history.model.get_input_embeddings().weight
        weight[3 : history.draw.randrange(4, 200)] *= -1


def new_chat(history: History, beginnings) -> None:
    system = history.draw.choice([None, "Be brief. Be correct. Be kind."])
    chat = history.generator.chat(system, **history.options, max_new_tokens=NEW)
    chat.send(history.draw.choice(MESSAGES))
    history.check_chat(chat)
    history.chats.append(chat)


def chat_turn(history: History, beginnings) -> None:
    if not history.chats:
        return
    chat = history.draw.choice(history.chats)
    action = history.draw.choice([chat.send, chat.send, chat.edit, chat.retry, chat.undo])
    is_answered = bool(chat.messages) and chat.messages[-1]["role"] == "assistant"
    if action != chat.send and not is_answered:
        return
    if action == chat.undo:
        chat.undo()
        return
    action(*([] if action == chat.retry else [history.draw.choice(MESSAGES)]))
    history.check_chat(chat)


def chat_fork(history: History, beginnings) -> None:
    if history.chats:
        history.chats.append(history.draw.choice(history.chats).fork())


def chat_save(history: History, beginnings) -> None:
    if history.chats:
        path = history.folder / "chat"
        history.draw.choice(history.chats).save(path)
        history.chats.append(history.generator.chat(resume=path, max_new_tokens=NEW))


_OPERATIONS = [*[other_prompt, turn, edit] * 4, *[again, new_chat, chat_turn] * 2, chat_turn, chat_fork, chat_save,
               forget, restart, write_weights]  # fmt: skip


def run(seeds, operations: int = 8, kind: type[History] = History) -> Counter[str]:
    """Run these histories, with a store that also keeps short beginnings. Returns how often what happened."""
    total: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_store, "LEAST_TOKENS", LEAST)
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(seed)
                try:
                    total += kind(seed, Path(folder)).run(operations)
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {error}") from error
    return total


if __name__ == "__main__":
    begin = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(run(range(begin, begin + int(sys.argv[1]))))
