"""Facts in a long text, and how many of them a model finds again: the text is read once, questions go on from it."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import engine

_WORDS = {
    "Anna": "mango", "Bruno": "violin", "Carla": "zebra", "David": "copper", "Elena": "lantern", "Felix": "walnut",
    "Greta": "anchor", "Henry": "saffron", "Irene": "pelican", "Jonas": "velvet", "Karen": "cactus", "Louis": "harbor",
    "Maria": "pepper", "Niels": "comet", "Olga": "marble", "Peter": "basket", "Rosa": "tiger", "Simon": "pillow",
    "Tanya": "glacier", "Victor": "button",
}  # fmt: skip
FACTS = [f"The secret word of {name} is {word}." for name, word in _WORDS.items()]
_QUESTIONS = [f"\n\nThe secret word of {name} is" for name in _WORDS]  # also models without a chat template go on here
_NEW = 6  # tokens of an answer


def text_with_facts(texts: list[str], tokenizer: Any, tokens: int) -> str:
    """About so many tokens of the texts, with the facts between their sentences at even distances."""
    room = tokens - sum(len(tokenizer(fact)["input_ids"]) for fact in FACTS)
    chosen: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(" ".join(texts).split())):
        room -= len(tokenizer(sentence + " ")["input_ids"])
        if room < 0:
            break
        chosen.append(sentence)
    sentences = len(chosen)
    for number, fact in reversed(list(enumerate(FACTS))):
        chosen.insert((2 * number + 1) * sentences // (2 * len(FACTS)), fact)
    return " ".join(chosen)


def facts_found(generator: engine.Generator, text: str, **cache: Any) -> int:
    """How many answers begin with the right word. cache: `cache` and `cache_config`, as of `generate`."""
    prefix = generator.prefill(text, prefill_chunk_size=64, **cache)
    by_length: dict[int, list[tuple[list[int], str]]] = defaultdict(list)  # windows take no padding in a continuation
    for question, word in zip(_QUESTIONS, _WORDS.values(), strict=True):
        ids = generator.tokenizer(question, add_special_tokens=False)["input_ids"]
        by_length[len(ids)].append((ids, word))
    found = 0
    for asked in by_length.values():
        answers = prefix.generate([ids for ids, _ in asked], max_new_tokens=_NEW, do_sample=False).text
        found += sum(word in answer for answer, (_, word) in zip(answers, asked, strict=True))
    return found
