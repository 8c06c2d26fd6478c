"""A cache, and beside it an oracle in plain Python: what every operation must leave behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from contract import (
    CROSS,
    KERNEL,
    KINDS,
    SIZE,
    Tokens,
    build,
    columns_of,
    forward_layer,
    keys_of,
    last_read,
    recurrent_of,
    states_of,
)

import caches
from caches.attention.kv_view import plain
from caches.layers.layer_spec import INDEX, KV


class Trial:
    """A cache, and beside it in plain Python what it must hold: the tokens of every row."""

    def __init__(self, backend: str, kind: str, rows: int = 3, **options):
        self.backend, self.kind = backend, KINDS[kind]
        self.cache = build(backend, self.kind, **options)
        self.feeds = 0
        self.look = plain  # what a model does with what it is handed
        self.room_for_rows = options.get("max_batch_size", rows) if self.cache.fixed else None
        self.forget(rows)

    def forget(self, rows: int) -> None:
        """Nothing is held; the next step has so many rows."""
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.encoded: list[list[int]] | None = None
        self.last_step = 0  # tokens of it that can be taken back from states

    def holding(self, cache: caches.EngineCache, rows: Sequence[int] | None = None) -> Trial:
        """A trial of another cache that has to hold the same, or some of the rows."""
        other = copy.copy(self)
        index = range(len(self.tokens)) if rows is None else rows
        other.cache, other.tokens, other.last_step = cache, [list(self.tokens[row]) for row in index], 0
        other.encoded = None if self.encoded is None else [self.encoded[row] for row in index]
        other.room_for_rows = len(other.tokens) if cache.fixed else None
        return other

    @property
    def total_tokens(self) -> int:
        return len(self.tokens[0])

    @property
    def limit(self) -> int | None:
        """Tokens it can hold."""
        sized = caches.recipe(self.cache.name).has_a_size
        return SIZE if sized and (None in self.kind.bounds or not self.kind.bounds) else None

    @property
    def narrow(self) -> int | None:
        """A window that only our own loop can hide the tokens before: in other loops steps beyond it are refused."""
        return self.kind.window

    @property
    def last_layer(self) -> int:
        """The last that keeps anything: a forward that has reached it is whole."""
        return max(layer for layer, spec in enumerate(self.kind.specs) if spec.components)

    @property
    def own(self) -> caches.Cache:
        """What the layers of a decoder get."""
        return self.cache.self_attention_cache if self.kind.cross else self.cache

    @property
    def all_layers(self) -> list:
        return [*self.own.layers, *(self.cache.cross_attention_cache.layers if self.kind.cross else [])]

    def fresh(self, count: int, rows: int | None = None) -> list[list[int]]:
        """Tokens never fed before: which feed, row and position they are."""
        self.feeds += 1
        rows = len(self.tokens) if rows is None else rows
        begin = 1_000_000 * self.feeds + self.total_tokens
        return [[begin + 10_000 * row + column for column in range(count)] for row in range(rows)]

    # Steps.

    def forward(self, tokens: Tokens, layers: Sequence[int] | None = None) -> None:
        """What a model does in one step, on some of its layers; checks what it is told and handed."""
        count = len(tokens[0])
        together = [old + list(new) for old, new in zip(self.tokens, tokens, strict=True)]
        encoder = self.fresh(CROSS, len(tokens)) if self.encoded is None else self.encoded
        for layer in range(len(self.kind.specs)) if layers is None else layers:
            spec = self.kind.specs[layer]
            length, offset = self.own.get_mask_sizes(count, layer)
            handed = {name: self.look(read) for name, read in forward_layer(self.own, spec, layer, tokens).items()}
            if not self.own.is_compileable:  # a compiled step reads the whole room
                assert not spec.keeps_kv or (length, offset) == self.mask_sizes(layer, count)
            for name in handed.keys() & {"keys", "values", "index"}:
                read, first = handed[name], max(0, self.total_tokens - self.held(layer))
                assert read.isfinite().all()
                read = self.without_copies(read, layer, name, together)
                assert read.shape[2] == length
                sinks = self.kind.sinks_of(spec) if first else 0
                must = [self.shown(row, first, sinks if count == 1 else 0) for row in together]
                read, must = (
                    read[:, :, first - offset : self.total_tokens + count - offset],
                    columns_of(must, layer, name),
                )
                hidden = sinks if count > 1 else 0  # the copies are looked at instead
                assert torch.equal(read[:, :, hidden:], must[:, :, hidden:])
            for name in handed.keys() - {"keys", "values", "index"}:
                width = handed[name].shape[-1]
                assert width >= max(count, KERNEL)
                assert torch.equal(handed[name], last_read(together, layer, int(name.split()[1]), width))
            if self.kind.cross:
                self._forward_cross(layer, encoder)
        self._encoder = encoder

    @staticmethod
    def shown(row: list[int], first: int, sinks: int) -> list[int]:
        """The tokens from `first` on, where the first `sinks` of the row take the places of as many."""
        return row[:sinks] + row[first + sinks :]

    def without_copies(self, read: torch.Tensor, layer: int, name: str, together: Tokens) -> torch.Tensor:
        """What is handed out after the copies of first tokens, that come once for each token of a long step."""
        sinks, count = self.kind.sinks_of(self.kind.specs[layer]), len(together[0]) - self.total_tokens
        if not sinks or count == 1 or self.total_tokens + count <= self.narrow:
            return read
        must = columns_of([row[:sinks] * count for row in together], layer, name)
        assert torch.equal(read[:, :, : sinks * count], must)
        return read[:, :, sinks * count :]

    def _forward_cross(self, layer: int, encoder: Tokens) -> None:
        cross = self.cache.cross_attention_cache
        assert self.cache.is_updated.get(layer) == (self.encoded is not None)
        if self.cache.is_updated.get(layer):
            keys, values = cross.layers[layer].keys, cross.layers[layer].values
        else:
            keys, values = cross.update(keys_of(encoder, layer), -keys_of(encoder, layer), layer)
            self.cache.is_updated[layer] = True
        assert torch.equal(self.look(keys), keys_of(encoder, layer))
        assert torch.equal(self.look(values), -keys_of(encoder, layer))

    def commit(self, tokens: Tokens, rejected: int = 0) -> None:
        """The oracle's side of a step that was settled."""
        kept = len(tokens[0]) - rejected
        self.tokens = [old + list(new[:kept]) for old, new in zip(self.tokens, tokens, strict=True)]
        self.last_fed = len(tokens[0])
        self.last_step, self.encoded = kept, self._encoder if self.kind.cross else None

    def step(self, count: int, rejected: int = 0, graph: bool = False) -> None:
        tokens = self.fresh(count)
        self.cache.begin(count, graph)
        self.forward(tokens)
        self.cache.commit(rejected)
        self.commit(tokens, rejected)

    def step_whole(self, count: int) -> None:
        """A step of a model that cannot work on views of pieces."""
        self.look = torch.clone
        self.step(count)
        self.look = plain

    def feed(self, count: int) -> None:
        """A step of a loop that neither begins nor settles."""
        tokens = self.fresh(count)
        self.forward(tokens)
        self.commit(tokens)

    def select_rows(self, index: Sequence[int]) -> None:
        self.cache.select_rows(torch.tensor(index))
        self.tokens = [list(self.tokens[row]) for row in index]
        self.encoded = None if self.encoded is None else [self.encoded[row] for row in index]

    def fork(self, times: int) -> None:
        self.cache.fork(times)
        repeated = [row for row in range(len(self.tokens)) for _ in range(times)]
        self.tokens = [list(self.tokens[row]) for row in repeated]
        self.encoded = None if self.encoded is None else [self.encoded[row] for row in repeated]

    def crop(self, tokens: int) -> None:
        self.cache.crop(tokens)
        removed = max(0, self.total_tokens - tokens) if tokens > 0 else min(-tokens, self.total_tokens)
        self.last_step = 0 if removed == self.total_tokens else max(0, self.last_step - removed)
        if self.total_tokens and removed == self.total_tokens:
            self.encoded = None  # the next source may be another one
        self.tokens = [row[: len(row) - removed] for row in self.tokens]

    # What must be so.

    def can_reject(self, rejected: int, count: int) -> bool:
        return rejected in (0, count) or self._in_part(count)

    def _in_part(self, count: int) -> bool:
        """Whether a step of so many tokens can be taken back in part: what long ones read is not kept."""
        return self.kind.takes_back_in_part and (count <= 64 or not self.kind.has_states)

    def can_crop(self, removed: int) -> bool | None:
        """Whether so many of the last tokens can be removed; None where it depends on what a window has overwritten."""
        if removed == 0 or removed >= self.total_tokens:
            return True
        whole = removed == self.last_step or (removed < self.last_step and self._in_part(self.last_fed))
        if self.kind.has_states and not whole:
            return False
        lost = [bound is not None and self.total_tokens > bound for bound in self.kind.bounds]
        return None if any(lost) else True

    def held(self, layer: int) -> int:
        bound = self.kind.bound(self.kind.specs[layer])
        return self.total_tokens if bound is None else min(self.total_tokens, bound)

    def mask_sizes(self, layer: int, count: int) -> tuple[int, int]:
        return self.held(layer) + count, self.total_tokens - self.held(layer)

    def expected(self) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        """Of every layer: what it says it holds, and what it must hold."""
        for layer, spec in enumerate(self.kind.specs if self.total_tokens else ()):
            first = self.total_tokens - self.held(layer)
            sinks = self.kind.sinks_of(spec)
            kept = [self.shown(row, first, sinks if first else 0) for row in self.tokens]
            names = ["keys", "values"] * (KV in spec.components) + ["index"] * (INDEX in spec.components)
            must = {name: columns_of(kept, layer, name) for name in names}
            convolutions, recurrent = states_of(spec)
            must |= {f"conv {number}": last_read(self.tokens, layer, number, KERNEL) for number in range(convolutions)}
            if recurrent:
                must["recurrent 0"] = recurrent_of(self.tokens, layer)
            yield self.own.layers[layer].dense_state(), must
        for layer in range(len(self.kind.specs) if self.encoded is not None else 0):
            must = {name: columns_of(self.encoded, layer, name) for name in ("keys", "values")}
            yield self.cache.cross_attention_cache.layers[layer].dense_state(), must

    def check(self) -> None:
        """The cache holds what it must, and says so."""
        cache, seen = self.cache, self.total_tokens
        assert (cache.total_tokens, cache.get_seq_length(), cache.max_tokens) == (seen, seen, self.limit)
        assert cache.batch_size == (len(self.tokens) if seen else -1)
        for layer, spec in enumerate(self.kind.specs):
            assert not spec.keeps_kv or cache.get_mask_sizes(3, layer) == self.mask_sizes(layer, 3)
        for part in cache.parts:
            part.finish_step()
        for found, must in self.expected():
            assert found.keys() == must.keys()
            for name, held in found.items():
                assert torch.equal(held, must[name]), f"{name}: {held} instead of {must[name]}"
        padding = self.own.stack.hook.state_dict(len(self.tokens))
        assert padding.keys() == ({"left_padding"} if self.kind.sinks is not None else set())
        assert all(counts.tolist() == [0] * len(self.tokens) for counts in padding.values())
        if not seen:
            assert not any(layer.dense_state() for layer in self.own.layers)
        if self.encoded is None and self.kind.cross:
            kept = [layer.committed("keys") for layer in self.cache.cross_attention_cache.layers]
            assert all(keys is None or keys.shape[2] == 0 for keys in kept)


def with_room(backend: str, kind: str, rows: int) -> Trial:
    """A trial of two rows, with room for so many."""
    has_rooms = "max_batch_size" in caches.recipe(backend).options.option_names()
    return Trial(backend, kind, 2, **({"max_batch_size": rows} if has_rooms else {}))


def refused(trial, operation, *arguments, error=caches.StepError, match=None):
    """The operation raises, and changes nothing."""
    with pytest.raises(error, match=match):
        operation(*arguments)
    trial.cache.abort()
    trial.check()


def storage(cache) -> dict[int, int]:
    """Bytes of all storage that the layers hold on to, by its address."""
    found, seen = {}, set()

    def look(thing):
        if id(thing) in seen or type(thing).__name__.endswith("Timeline"):  # a clock and a few indices are no content
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            list(map(look, thing.values()))
        elif isinstance(thing, (list, tuple)):
            list(map(look, thing))
        elif any(base.__module__.startswith("caches.") for base in type(thing).__mro__):  # a plug-in's store has such
            look(vars(thing))

    look([part.layers for part in cache.parts])
    return found
