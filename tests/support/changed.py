"""Random histories of caches whose model changes: between turns, in the middle of a stream, or for another model.

Weights are written in every way, adapters come and go, buffers and settings change, the model is copied or freed. Live
caches, pickles, files, prefixes, chats and the prefix store go on after that. Every text is that of the model as it is
now, without any cache, or the call is refused with a reason that says what has changed. What has not changed is never
refused. Run as a program to make many: `python tests/support/changed.py 10000`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import peft
import reused
import torch
from reused import NEW, model_of

import caches
import engine

REASONS = {
    "weights": "weights",
    "buffers": "buffers",
    "settings": "settings",
    "adapters": "adapters",
    "object": "another model",
    "freed": "freed|another model",
}
NUMBERS = ("variance_epsilon", "eps", "operator_norm_eps")


@dataclass
class Filled:
    """A live cache or a prefix. ids: of its tokens. begin: how many changes there had been when its model read them."""

    content: Any
    ids: list[int]
    begin: int
    is_pickled: bool = False


class ChangedHistory(reused.History):
    """changes: the kinds of all that has changed so far, names of `REASONS`."""

    def __init__(self, seed: int, folder: Any):
        self.changes: list[str] = []
        self.filled: list[Filled] = []
        self.others: list[Any] = []  # models that are not freed
        self.wrapper: Any = None
        super().__init__(seed, folder)

    def new_model(self) -> Any:
        model = copy.deepcopy(model_of(self.kind))
        if self.kind == "llama" and self.draw.random() < 0.4:
            self.wrapper = peft.get_peft_model(model, _lora()).eval()
        return model

    def backend(self) -> dict:
        while (found := super().backend())["cache"] == "sink":  # which rotates keys as the configuration says
            pass
        return found

    def run(self, operations: int) -> Counter[str]:
        """In turn something is filled or copied, perhaps something changes, and something goes on."""
        beginnings = [self.ids(20) for _ in range(2)]
        live(self, beginnings)
        for _ in range(operations):
            for kinds in (FILL, CHANGE, GO_ON):
                operation = self.draw.choice(kinds)
                self.counts[operation.__name__] += 1
                operation(self, beginnings)
        return self.counts

    def explained(self, refusal: str, changed: set[str]) -> None:
        """The refusal names something that has changed."""
        reasons = "|".join(REASONS[change] for change in changed) or "nothing has changed"
        assert re.search(reasons, refusal), (sorted(changed), refusal)

    def check_reused(self, filled: Filled, ids: list[int], run: Any) -> list[int] | None:
        """The new tokens of `run`, which goes on from what is filled; None where that is refused, with a true reason.

        ids: the whole prompt.
        """
        changed = {change for change in self.changes[filled.begin :] if not (filled.is_pickled and change in _OBJECTS)}
        try:
            out = run()
        except engine.InputError as error:
            self.explained(str(error), changed)
            self.counts[f"refused: {', '.join(sorted(changed))}"] += 1
            return None
        expected = self.plain.generate(reused._unpadded(torch.tensor([ids])), max_new_tokens=NEW, **self.options)
        assert out.tokens == expected.tokens, (sorted(changed), self.kind, self.options)
        self.counts["went on after a change" if changed else "went on"] += 1
        return out.tokens[0]


def _lora() -> Any:
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")


_OBJECTS = {"object", "freed"}

# What is filled, and goes on.


def live(history: ChangedHistory, beginnings: Any) -> None:
    ids, begin = history.draw.choice(beginnings) + history.ids(6), len(history.changes)
    out = history.plain.generate(reused._unpadded(torch.tensor([ids])), max_new_tokens=NEW, **history.options)
    history.filled.append(Filled(out.cache, ids + out.tokens[0], begin))


def live_turn(history: ChangedHistory, beginnings: Any) -> None:
    caches_there = [one for one in history.filled if not isinstance(one.content, engine.Prefix)]
    if not caches_there:
        return
    filled = history.draw.choice(caches_there)
    ids = filled.ids + history.ids(4)
    inputs = reused._unpadded(torch.tensor([ids]))
    tokens = history.check_reused(
        filled, ids, lambda: history.plain.generate(inputs, cache=filled.content, max_new_tokens=NEW)
    )
    if tokens is None:
        history.filled.remove(filled)
    else:
        filled.ids, filled.begin, filled.is_pickled = ids + tokens, len(history.changes), False


def prefix(history: ChangedHistory, beginnings: Any) -> None:
    ids, begin = history.draw.choice(beginnings) + history.ids(6), len(history.changes)
    made = history.plain.prefill(reused._unpadded(torch.tensor([ids])), **history.options)
    history.filled.append(Filled(made, ids, begin))


def prefix_turn(history: ChangedHistory, beginnings: Any) -> None:
    prefixes = [one for one in history.filled if isinstance(one.content, engine.Prefix)]
    if prefixes:
        filled, own = history.draw.choice(prefixes), history.ids(4)
        # Its generator is that of before, of which the model may be another one now.
        generator = filled.content._generator
        if generator.model is history.model:
            history.check_reused(filled, filled.ids + own, lambda: filled.content.generate([own], max_new_tokens=NEW))
        else:
            history.filled.remove(filled)


def many(history: ChangedHistory, beginnings: Any) -> None:
    """Requests in one batch, which go on from stored caches."""
    prompts = [history.draw.choice(beginnings) + history.ids(6) for _ in range(3)]
    inputs = [reused._unpadded(torch.tensor([ids])) for ids in prompts]
    for request in history.generator.generate_many(inputs, max_new_tokens=NEW, **history.options):
        expected = history.plain.generate(inputs[request.index], max_new_tokens=NEW, **history.options)
        assert request.result().tokens == expected.tokens, (history.kind, history.options)
        history.counts["cached tokens of batches"] += request.result().stats.cached_tokens


def stream(history: ChangedHistory, beginnings: Any) -> None:
    """The model changes in the middle: what has read is neither the one nor the other."""
    ids, begin = history.draw.choice(beginnings) + history.ids(6), len(history.changes)
    chunks = history.generator.stream(reused._unpadded(torch.tensor([ids])), max_new_tokens=NEW, **history.options)
    next(chunks)
    history.draw.choice([in_place, through_data, buffers])(history, beginnings)
    for _ in chunks:
        pass
    out = chunks.result()
    history.filled.append(Filled(out.cache, ids + out.tokens[0], begin))


# Copies.


def pickled(history: ChangedHistory, beginnings: Any) -> None:
    for filled in _some(history):
        changed = history.changes[filled.begin :]
        again = copy.copy(filled)
        again.content = pickle.loads(pickle.dumps(filled.content))
        again.is_pickled = not changed  # else nothing is known of it any more
        history.filled.append(again)


def saved(history: ChangedHistory, beginnings: Any) -> None:
    for filled in _some(history):
        path = history.folder / "cache"
        changed = {*history.changes[filled.begin :]} - (_OBJECTS if filled.is_pickled else set())
        try:
            filled.content.save(path, history.model)
            loaded = caches.load(path, history.model)
        except caches.CacheFileError as error:
            history.explained(str(error), changed)
            history.counts["not saved"] += 1
            continue
        history.counts["saved after a change that was taken back"] += bool(changed and not filled.is_pickled)
        history.filled.append(Filled(loaded, filled.ids, len(history.changes)))


def _some(history: ChangedHistory) -> list[Filled]:
    found = [one for one in history.filled if not isinstance(one.content, engine.Prefix)]
    return [history.draw.choice(found)] if found else []


# Changes.


def _weight(history: ChangedHistory) -> torch.Tensor:
    """Not one of an adapter that is not active, which changes nothing."""
    names = history.model.named_parameters()
    return history.draw.choice([one for name, one in names if one.ndim > 1 and ".other." not in name])


def in_place(history: ChangedHistory, beginnings: Any) -> None:
    with torch.no_grad():
        _weight(history)[: history.draw.randint(1, 8)] *= -1
    history.changes.append("weights")


def through_data(history: ChangedHistory, beginnings: Any) -> None:
    """As DeepSpeed, FSDP and code that merges weights do. Nothing counts these."""
    weight = _weight(history)
    way = history.draw.choice(["in place", "replaced", "numpy"])
    if way == "in place":
        weight.data.mul_(-1)
    elif way == "replaced":
        weight.data = -weight.data
    else:
        content = weight.detach().numpy()
        content *= -1
    history.changes.append("weights")


def load_state(history: ChangedHistory, beginnings: Any) -> None:
    state = history.model.state_dict()
    state |= {name: -tensor for name, tensor in state.items() if "mlp" in name or "feed_forward" in name}
    history.model.load_state_dict(state, assign=history.draw.random() < 0.3)
    history.changes.append("weights")


def buffers(history: ChangedHistory, beginnings: Any) -> None:
    found = [table for name, table in history.model.named_buffers() if re.search(r"(?<!original_)inv_freq$", name)]
    if found:
        history.draw.choice(found).data.mul_(1 + history.draw.random())
        history.changes.append("buffers")


def settings(history: ChangedHistory, beginnings: Any) -> None:
    found = [(module, name) for module in history.model.modules() for name in NUMBERS if name in vars(module)]
    module, name = history.draw.choice(found)
    setattr(module, name, getattr(module, name) + history.draw.choice([1, 10, 100]))
    history.changes.append("settings")


def _lora_layers(history: ChangedHistory) -> list[Any]:
    return [one for one in history.model.modules() if isinstance(one, peft.tuners.lora.LoraLayer)]


def adapters(history: ChangedHistory, beginnings: Any) -> None:
    if history.wrapper is None:
        return
    way = history.draw.choice(["anew", "scale", "merged", "loaded"])
    layers = _lora_layers(history)
    if way == "anew":
        if any(layer.merged for layer in layers):  # PEFT deletes no such adapter
            history.wrapper.unmerge_adapter()
        with warnings.catch_warnings():  # that another one is active then
            warnings.simplefilter("ignore")
            history.wrapper.delete_adapter("default")
        history.wrapper.add_adapter("default", _lora())
        history.wrapper.set_adapter("default")
        history.wrapper.eval()
    elif way == "scale":
        for layer in layers:
            layer.set_scale("default", 1 + history.draw.random())
    elif way == "merged":
        merged = any(layer.merged for layer in layers)
        (history.wrapper.unmerge_adapter if merged else history.wrapper.merge_adapter)()
    else:
        state = {name: -tensor for name, tensor in peft.get_peft_model_state_dict(history.wrapper).items()}
        peft.set_peft_model_state_dict(history.wrapper, state)
    history.changes += ["adapters", "weights"]


def other_adapter(history: ChangedHistory, beginnings: Any) -> None:
    """One that is not active is added, or written: that changes nothing."""
    if history.wrapper is not None:
        if "other" not in history.wrapper.peft_config:
            if any(layer.merged for layer in _lora_layers(history)):  # PEFT takes it out of the weights then
                history.changes += ["adapters", "weights"]
            with warnings.catch_warnings():  # that it does so
                warnings.simplefilter("ignore")
                history.wrapper.add_adapter("other", _lora())
            history.wrapper.eval()
        for name, parameter in history.wrapper.named_parameters():
            if ".other." in name:
                parameter.data.mul_(-1)


def other_object(history: ChangedHistory, beginnings: Any) -> None:
    """A copy takes the place of the model, which is freed or lives on."""
    old, history.model = history.model, copy.deepcopy(history.model)
    history.wrapper, is_freed = None, history.draw.random() < 0.5
    history.chats = []  # of a generator with the old model
    history.begin()
    history.filled = [one for one in history.filled if not isinstance(one.content, engine.Prefix)]
    if is_freed:
        del old
        gc.collect()
    else:
        history.others.append(old)
    history.changes.append("freed" if is_freed else "object")


def nothing(history: ChangedHistory, beginnings: Any) -> None:
    """All goes on."""


FILL = [*[live] * 6, prefix, prefix, stream, pickled, pickled, saved, reused.new_chat, reused.chat_fork,
        reused.chat_save, reused.other_prompt, reused.restart]  # fmt: skip
CHANGE = [*[nothing] * 8, in_place, through_data, through_data, load_state, buffers, settings, adapters,
          adapters, other_adapter, other_object]  # fmt: skip
GO_ON = [*[live_turn] * 8, *[prefix_turn] * 4, *[reused.chat_turn] * 3, reused.turn, many]


def run(seeds: Any, operations: int = 5) -> Counter[str]:
    return reused.run(seeds, operations, ChangedHistory)


if __name__ == "__main__":
    begin = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for what, count in sorted(run(range(begin, begin + int(sys.argv[1]))).items()):
        print(f"{count:>8} {what}")
