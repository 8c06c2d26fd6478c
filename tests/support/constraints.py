"""Logits processors that keep something per row."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from strategies import Crop, Emit, Forward

NEW = 10
END, PAD = 29, 3


class Constraint:
    """Texts of the tokens that their state allows. begin: the first one; step: the next, from a state and a token."""

    def __init__(self, begin, step, allowed):
        self.begin, self.step, self.allowed, self.states = begin, step, allowed, []

    def __call__(self, ids, scores):
        if not self.states:  # a run begins: these are the prompts
            self.prompt, self.states = ids.shape[1], [[self.begin] for _ in ids]
        constrained = torch.full_like(scores, float("-inf"))
        for row, states in enumerate(self.states):
            for token in ids[row, self.prompt + len(states) - 1 :].tolist():
                states.append(self.step(states[-1], token))
            allowed = self.allowed(states[-1])
            constrained[row, allowed] = scores[row, allowed]
        return constrained

    def select_rows(self, index):
        self.states = [list(self.states[row]) for row in index.tolist()]

    def crop(self, columns):  # to none when a run begins
        self.states = [states[: columns - self.prompt + 1] for states in self.states] if columns else []


def choices():
    """Many texts that begin alike."""
    draw = random.Random(3)
    texts, made = [], [[]]
    while len(texts) < 60:
        begin = draw.choice(made)
        text = begin + [draw.choice(range(40, 60))]
        made.append(text)
        texts.append(text + [draw.choice(range(60, 101)) for _ in range(draw.randrange(3))])
    return [text for text in texts if len(text) < NEW]


CHOICES = choices()


def tree():
    root = {}
    for choice in CHOICES:
        node = root
        for token in [*choice, END]:
            node = node.setdefault(token, {})
    return root


def one_of(kind=Constraint):
    return kind(tree(), lambda node, token: node.get(token, {}), lambda node: list(node) or [END])


@dataclass(frozen=True)
class Drafting:
    """Greedy text, as assisted decoding asks for it: wrong tokens are proposed, looked at together and taken back."""

    name, samples = "drafting", False

    def flow(self, task):
        ids, logits = task.ids, (yield Forward(task.ids))
        for step in range(2 * NEW):
            drafted = torch.stack([ids[:, 0] % 9 + 40 + (step + column) % 20 for column in range(3)], dim=1)
            scores = [task.process(torch.cat([ids, drafted[:, :n]], dim=1), logits) for n in range(4)]
            if ids.shape[1] < task.max_columns - 3:
                yield Forward(drafted)
                yield Crop(3)
            ids = yield Emit(scores[0].argmax(dim=-1, keepdim=True), scores[:1])
            logits = yield Forward(ids[:, -1:])
