"""Random histories of a live cache: turns, edits, crops, chosen rows, copies, other loops, other models.

After every operation the cache is given a conversation, its own or another one. Either the text is that of the model
without any cache, or the call is refused, and names the first token that differs or says that it cannot be checked.
Run as a program to make many: `python tests/support/histories.py 10000`.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from architectures import _TINY, VOCABULARY, randomised
from encoder_decoders import START, tiny_encoder_decoder
from helpers import cache_argument
from injection import decoder_layers
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

import caches
import engine
from configs import ConfigError

WINDOW, ROOM, NEW = 8, 48, 2
_TWO = _TINY | dict(num_hidden_layers=2)
_WINDOWS = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": ("LlamaConfig", _TWO),
    "mistral": ("MistralConfig", _TWO | dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2Config", _TWO | _WINDOWS | dict(query_pre_attn_scalar=8)),
    "qwen3": ("Qwen3Config", _TWO | dict(use_sliding_window=False)),
    "full_first": ("Qwen3Config", _TWO | dict(use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW,
                                              layer_types=["full_attention", "sliding_attention"])),
    "lfm2": ("Lfm2Config", _TWO | dict(layer_types=["conv", "full_attention"], block_multiple_of=16)),
    "mamba": ("MambaConfig", _TWO | dict(state_size=8, time_step_rank=4)),
    "bart": None,
    "t5": None,
}  # fmt: skip
THEIRS = ["DynamicCache", "StaticCache"]
PREFIX_IS_KNOWN = {"llama", "qwen3", "full_first", "bart", "t5"}  # the first layer keeps all keys


@cache
def generator(name: str, other: bool = False) -> engine.Generator:
    """Of the model, or of another one with the same configuration."""
    if MODELS[name] is None:
        model: PreTrainedModel = tiny_encoder_decoder(name)
    else:
        model = randomised(*MODELS[name])
    if other:
        model = copy.deepcopy(model)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return engine.Generator(model)


@cache
def backends(name: str) -> list[str]:
    """The lossless ones that are for this model, whatever is registered, and transformers' own classes."""
    return [one for one in caches.names() if _is_lossless(name, one)] + THEIRS


@cache
def pairs() -> list[tuple[str, str]]:
    """Every model with every backend for it: histories take them in turn."""
    return [(name, backend) for name in MODELS for backend in backends(name)]


def _is_lossless(name: str, backend: str) -> bool:
    try:
        built = new_cache(name, backend)
    except (caches.UnsupportedLayerError, ConfigError):
        return False
    imposes = any(part.view.imposes_windows for part in getattr(built, "parts", ()))
    return built.handle is not None and not built.is_quantized and not imposes


def new_cache(name: str, backend: str) -> Any:
    config = generator(name).model.config
    if backend not in THEIRS:
        options = {"max_cache_len": ROOM} if caches.recipe(backend).has_a_size else {}
        return caches.build(backend, config, **options)
    kind = {"DynamicCache": DynamicCache, "StaticCache": lambda config: StaticCache(config=config, max_cache_len=ROOM)}
    own = kind[backend](config=config)
    return EncoderDecoderCache(own, DynamicCache()) if config.is_encoder_decoder else own


@dataclass
class Content:
    """What a cache holds in truth: of every row and column the id, its mask, its position, and which model read it."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    readers: torch.Tensor

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether rows begin with pads if they have any, and have two tokens at least."""
        return bool((self.mask.diff(dim=1) >= 0).all() and (self.mask.sum(dim=1) > 1).all())

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.ids, self.mask, self.positions, self.readers

    def first(self, columns: int) -> Content:
        return Content(*(part[:, :columns] for part in self.parts))

    def select_rows(self, index: torch.Tensor) -> Content:
        return Content(*(part[index] for part in self.parts))

    def then(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, reader: int) -> Content:
        new = ids, mask, positions, torch.full_like(ids, reader)
        return Content(*(torch.cat(both, dim=1) for both in zip(self.parts, new, strict=True)))

    def begins(self, ids: torch.Tensor, mask: torch.Tensor) -> bool:
        """Whether it is the beginning of what the model is to read."""
        given = ids, mask, places(mask)
        same = (torch.equal(part, one[:, : self.columns]) for part, one in zip(self.parts, given, strict=False))
        return all(same) and not self.readers.any()

    def differs(self, ids: torch.Tensor, mask: torch.Tensor) -> set[int]:
        """The first columns with another id, and with another id, position or reader where no pad is claimed."""
        other = self.ids != ids[:, : self.columns]
        moved = other | (self.positions != places(mask)[:, : self.columns]) | (self.readers != 0)
        real = mask[:, : self.columns] != 0
        wrong = [(part.any(dim=0)).nonzero().flatten() for part in (other & (real | (self.mask != 0)), moved & real)]
        return {int(columns[0]) for columns in wrong if len(columns)}


def places(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


class History:
    """One live cache of one model, and what it holds in truth. counts: what was done, and how it ended."""

    def __init__(self, seed: int):
        self.random, self.counts = random.Random(seed), Counter()
        self.name, self.backend = pairs()[seed % len(pairs())]
        self.model = generator(self.name).model
        self.is_encoder_decoder = self.model.config.is_encoder_decoder
        self.has_states = self.name in ("lfm2", "mamba")
        self.numbers = torch.Generator().manual_seed(seed)
        self.row_count = self.random.choice([1, 2, 3])
        self.sources = [self._ids(5) for _ in range(2)]
        self.done: list[str] = [f"{self.name}, {self.backend}, {self.row_count} rows"]
        self.cache: Any = new_cache(self.name, self.backend)
        self.content = Content(*(torch.zeros(self.row_count, 0, dtype=torch.long) for _ in range(4)))
        self.kept: list[tuple[Any, Content, list[torch.Tensor]]] = []
        self.last: torch.Tensor | None = None  # the sequences of the last turn, as they were returned

    def run(self, operations: int) -> None:
        self.start()
        for _ in range(operations):
            operation = self.random.choice(self.operations)
            self.done.append(operation)
            self.counts[operation] += 1
            if getattr(self, operation)() is False:
                return
            self.turn()

    @property
    def operations(self) -> list[str]:
        return ["nothing", "crop", "select", "copy", "back", "plain", "plain", "theirs", "theirs", "careless", "dies",
                "other_model", "roll_back"]  # fmt: skip

    def _ids(self, columns: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (self.row_count, columns), generator=self.numbers)

    # What happens to a cache. False: it is spoilt, and nothing more is asked of it.

    def start(self) -> None:
        """The first tokens, by our engine or another loop, padded on the left."""
        columns = self.random.randint(3, 6)
        ids, mask = self._ids(columns), torch.ones(self.row_count, columns, dtype=torch.long)
        if self.row_count > 1 and not self.is_encoder_decoder:
            mask[0, : self.random.randint(0, 2)] = 0
        ids[mask == 0] = 0
        if self.is_encoder_decoder:
            ids[:, 0] = START
        ways = [self._turn_of, self._feed, self._generate]
        self.random.choice(ways[:2] if self.is_encoder_decoder else ways)(ids, mask)

    def nothing(self) -> None:
        """Two turns in succession."""

    def crop(self) -> bool | None:
        if self.content.columns < 2:
            return None
        tokens = self.random.randint(1, self.content.columns - 1)
        try:
            self.cache.crop(-tokens)
        except Exception as error:
            if isinstance(error, caches.CacheError):
                return None
            return False  # transformers' own layers may have been cropped in part
        self.content = self.content.first(self.content.columns - tokens)
        return None

    def select(self) -> bool | None:
        rows = len(self.content.ids)
        index = torch.tensor([self.random.randrange(rows) for _ in range(self.random.choice([rows, 1]))])
        choose = self.cache.batch_select_indices if len(index) != rows else self.cache.reorder_cache
        try:
            choose(index)
        except caches.CacheError:
            return None
        except Exception:
            return False  # transformers' fixed and state layers cannot
        self.content = self.content.select_rows(index)
        self.sources = [source[index] for source in self.sources]
        self.row_count = len(index)
        return None

    def copy(self) -> None:
        self.kept.append((self.cache, self.content, self.sources))
        self.cache = copy.deepcopy(self.cache)

    def back(self) -> None:
        """To a cache that was copied, as it was then."""
        if self.kept:
            (self.cache, self.content, self.sources), self.kept = self.kept[-1], self.kept[:-1]
            self.row_count = len(self.content.ids)

    def plain(self) -> None:
        new = self._ids(1 if self.has_states or self.content.columns >= WINDOW - 2 else self.random.randint(1, 3))
        self._feed(new, torch.ones_like(new))

    def careless(self) -> None:
        """Plain calls that say nothing of pads or positions."""
        new = self._ids(1)
        self._feed(new, torch.ones_like(new), careless=True)

    def theirs(self) -> None:
        self._generate(self._ids(1), torch.ones(self.row_count, 1, dtype=torch.long))

    def other_model(self) -> None:
        new = self._ids(1)
        self._feed(new, torch.ones_like(new), other=True)

    def dies(self) -> bool | None:
        """A forward that fails half-way. In caches of ours that leaves no trace."""

        def fail(*arguments: Any) -> None:
            raise ZeroDivisionError

        handle = decoder_layers(self.model)[1].register_forward_pre_hook(fail)
        content = self.content
        try:
            self._feed(self._ids(1), torch.ones(self.row_count, 1, dtype=torch.long))
        except ZeroDivisionError:
            self.content = content
        finally:
            handle.remove()
        return None if self.backend not in THEIRS else False

    def roll_back(self) -> None:
        self.cache.reset()
        self.content = self.content.first(0)
        if self.backend in THEIRS:  # what a reset of transformers' leaves is another matter
            self.cache = new_cache(self.name, self.backend)
        self.start()

    def _inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Of a plain call, of which `mask` is for all columns."""
        if self.is_encoder_decoder:
            return {"input_ids": self.sources[0], "decoder_input_ids": ids}
        if self.name == "mamba":
            return {"input_ids": ids} | ({"attention_mask": mask} if ids.shape == mask.shape else {})
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": places(mask).clamp(min=0)[:, -ids.shape[1] :],
        }

    @torch.no_grad()
    def _feed(self, new: torch.Tensor, mask: torch.Tensor, careless: bool = False, other: bool = False) -> None:
        whole = torch.cat([self.content.mask, mask], dim=1)
        inputs, positions = self._inputs(new, whole), places(whole)[:, -new.shape[1] :]
        if careless:
            inputs = {name: inputs[name] for name in inputs if name.endswith("input_ids")}
            positions = torch.arange(whole.shape[1] - new.shape[1], whole.shape[1]).expand_as(new)
        model = generator(self.name, other).model
        model(**inputs, **{cache_argument(model): self.cache}, use_cache=True)
        self.content = self.content.then(new, mask, positions, int(other))

    @torch.no_grad()
    def _generate(self, new: torch.Tensor, mask: torch.Tensor) -> None:
        if self.is_encoder_decoder:  # transformers begins such a text itself
            return self._feed(new, mask)
        ids = torch.cat([self.content.ids, new], dim=1)
        whole = torch.cat([self.content.mask, mask], dim=1)
        given = {cache_argument(self.model): self.cache}
        if self.name == "mamba" and self.content.columns:  # it would begin anew
            return self._feed(new, mask)
        out = self.model.generate(ids, attention_mask=whole, do_sample=False, max_new_tokens=NEW, **given)
        added = out[:, self.content.columns : -1]
        whole = torch.cat([whole, whole.new_ones(len(out), NEW - 1)], dim=1)
        added_mask, positions = (part[:, -added.shape[1] :] for part in (whole, places(whole)))
        self.content = self.content.then(added, added_mask, positions, 0)
        return None

    # What is asked of it.

    def turn(self) -> None:
        """Its own conversation, or another one."""
        new = self._ids(self.random.randint(1, 2))
        ids = torch.cat([self.content.ids, new], dim=1)
        mask = torch.cat([self.content.mask, torch.ones_like(new)], dim=1)
        what = self.random.choice(["own", "own", "own", "edited", "shorter", "pads", "rows", "source", "in place"])
        self.done.append(f"turn: {what}")
        self.counts[f"turn: {what}"] += 1
        columns, source, first = ids.shape[1] - new.shape[1], 0, int(self.is_encoder_decoder)
        if what == "edited" and columns > first:
            row, column = self.random.randrange(self.row_count), self.random.randrange(first, columns)
            ids[row, column] = (ids[row, column] + self.random.randint(1, 90)) % 97 + 2
        elif what == "shorter" and columns > first:
            column = self.random.randrange(first, columns)
            ids = torch.cat([ids[:, :column], ids[:, column + 1 :], self._ids(1)], dim=1)
        elif what == "pads" and not self.is_encoder_decoder:
            mask[self.random.randrange(self.row_count), : self.random.randint(1, 2)] ^= 1
        elif what == "rows":
            ids, mask = ids.flip(0), mask.flip(0)
        elif what == "source" and self.is_encoder_decoder:
            source = 1
        elif what == "in place" and self.last is not None and self.last.shape[0] == self.row_count:
            # What the last turn returned is the caller's: he may write into it.
            self.last[:, self.random.randrange(first, self.last.shape[1])] = self.random.randint(3, 99)
            ids = torch.cat([self.last, self._ids(2)], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(mask), ids.shape[1])], dim=1)[:, : ids.shape[1]]
        if bool((mask.sum(dim=1) == 0).any()) or ids.shape[1] <= columns:
            return
        self._turn_of(ids, mask, source)

    def _turn_of(self, ids: torch.Tensor, mask: torch.Tensor, source: int = 0) -> None:
        own = self.content.begins(ids, mask) and source == 0
        out = self._text(ids, mask, source, trust=False)
        if isinstance(out, str):
            how = self._explained(out, self.content.differs(ids, mask), mask, source)
            self.counts[f"refused: {how}"] += 1
            self.done.append(f"refused: {how}")
            if not own or how.startswith("no room"):
                return
            if how == "another mask" and not self.content.is_plain:
                return  # windows and states remember pads
            assert how == "cannot be checked", f"refused although it is right: {out}"
            could = self.name in PREFIX_IS_KNOWN and (self.is_encoder_decoder or self.content.is_plain)
            assert not could, f"refused although it could be checked: {out}"
            out = self._text(ids, mask, source, trust=True)  # the caller knows that it is right
            assert not isinstance(out, str), f"refused although it was trusted: {out}"
        self.counts["right" if own else "another conversation, right"] += 1
        self._check(out, ids, mask, source)
        self.last = out.sequences
        whole = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], dim=1)
        self.content = self.content.first(0).then(self.last[:, :-1].clone(), whole, places(whole), 0)

    def _text(self, ids: torch.Tensor, mask: torch.Tensor, source: int, trust: bool) -> engine.Generation | str:
        """What comes of the call: a generation, or why it is refused."""
        given: dict[str, Any] = {"attention_mask": mask} if not self.is_encoder_decoder else {"decoder_input_ids": ids}
        inputs = self.sources[source] if self.is_encoder_decoder else ids
        given |= {"trust_cache": True} if trust else {}
        try:
            return generator(self.name).generate(inputs, cache=self.cache, max_new_tokens=NEW, **given)
        except (engine.InputError, caches.CacheError) as error:
            return str(error)
        except engine.GenerationInterrupted as error:  # what a cache says at its first step
            if not isinstance(error.__cause__, caches.CacheError):
                raise
            return str(error)

    def _explained(self, refusal: str, first: set[int], mask: torch.Tensor, source: int) -> str:
        """Which refusal it is; it has to be true."""
        named = re.search(r"differ from token (\d+) on", refusal)
        if named is not None:
            assert int(named[1]) in first, f"in truth they differ from {first or 'no token'} on: {refusal}"
            return "names the token"
        if "cannot be checked" in refusal:
            return "cannot be checked"
        if "another source" in refusal:
            assert source == 1, refusal
            return "another source"
        if "attention_mask says something else" in refusal or "padding between its tokens" in refusal:
            return "another mask"
        if "has ended and is filled up" in refusal:
            assert not mask[:, -1].all(), refusal
            return "ends with pads"
        assert "at most" in refusal or "does not say how many" in refusal or "cannot take" in refusal, refusal
        return "no room, or transformers' states"

    @torch.no_grad()
    def _check(self, out: engine.Generation, ids: torch.Tensor, mask: torch.Tensor, source: int) -> None:
        """Every new token is the best one for the model without a cache."""
        sequences = out.sequences[:, :-1]
        whole = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], dim=1)
        inputs = self._inputs(sequences, whole)
        if self.is_encoder_decoder:
            inputs["input_ids"] = self.sources[source]
        logits = self.model(**inputs, use_cache=False).logits[:, -NEW:]
        new = out.sequences[:, -NEW:]
        behind = logits.amax(dim=-1) - logits.gather(2, new[..., None])[..., 0]
        assert float(behind.max()) < 1e-3, f"another text: {new.tolist()}, behind by {behind.tolist()}"
        assert torch.equal(out.sequences[:, : ids.shape[1]], ids)


def play(seed: int) -> Counter:
    """One history. Raises `AssertionError` with the seed and what was done."""
    history = History(seed)
    try:
        history.run(operations=2)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {' > '.join(history.done)}: {type(error).__name__}: {error}") from error
    return history.counts


def main(number: int) -> None:
    logging.getLogger("caches").setLevel(logging.ERROR)  # forwards die here on purpose
    began, counts, failures = time.time(), Counter(), []
    for seed in range(number):
        try:
            counts += play(seed)
        except AssertionError as error:
            failures.append(seed)
            print(error, flush=True)
        if (seed + 1) % max(1, number // 20) == 0:
            print(f"{seed + 1} of {number} histories, {len(failures)} failed, {time.time() - began:.0f} s", flush=True)
    for what, count in sorted(counts.items()):
        print(f"{count:>8} {what}")
    print(f"failed: {failures}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
