"""The interface that the decoding loop needs of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache as TransformersCache

from caches.errors import StepError, UnsupportedLayerError
from caches.layers.layer_spec import LayerSpec
from caches.layers.read_by import ReadBy
from caches.layers.rope import RopeRotation


@dataclass(frozen=True)
class TokenLog:
    """The tokens of a cache and those that come after them, as far as the engine knows them.

    ids, mask: [rows, tokens], at least those that the cache holds; mask is 0 at padding.
    positions: [kinds, rows, tokens] where the model computes them itself (an image takes fewer than it has tokens),
    else None. source: the encoder's output [rows, tokens, width], else None.
    read_by: the model that read them, as it was then; None where that is not known. A log is never written in place.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor | None = None
    source: torch.Tensor | None = None
    read_by: ReadBy | None = field(default=None, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> TokenLog:
        return self

    def why_other(self, now: ReadBy) -> str | None:
        """Why a model, as it is `now`, may compute other keys and values of these tokens; None where it does not.

        Asked wherever a cache goes on.
        """
        return "which model has filled it is not known" if self.read_by is None else self.read_by.why_other(now)

    def copied(self) -> TokenLog:
        """The same in memory of its own."""
        return replace(self, ids=self.ids.clone(), mask=self.mask.clone())

    def select_rows(self, index: torch.Tensor) -> TokenLog:
        positions = None if self.positions is None else self.positions[:, index]
        source = None if self.source is None else self.source[index]
        return replace(self, ids=self.ids[index], mask=self.mask[index], positions=positions, source=source)

    def first(self, tokens: int) -> TokenLog:
        """The same without what comes after the first `tokens`."""
        positions = None if self.positions is None else self.positions[..., :tokens]
        return replace(self, ids=self.ids[:, :tokens], mask=self.mask[:, :tokens], positions=positions)

    @staticmethod
    def joined(logs: list[TokenLog]) -> TokenLog:
        """The rows of all `logs`, which have equally many tokens."""
        positions = [log.positions for log in logs if log.positions is not None]
        sources = [log.source for log in logs if log.source is not None]
        return TokenLog(
            torch.cat([log.ids for log in logs]),
            torch.cat([log.mask for log in logs]),
            torch.cat(positions, dim=1) if len(positions) == len(logs) else None,
            torch.cat(sources) if len(sources) == len(logs) else None,
            ReadBy.joined([log.read_by for log in logs]),
        )

    def then(self, later: TokenLog) -> TokenLog:
        """Both, one after the other; `later.positions` are those of all tokens.

        Who read the later ones has gone on from the others, which was checked, or the caller has vouched for it.
        """
        ids, mask = torch.cat([self.ids, later.ids], dim=1), torch.cat([self.mask, later.mask], dim=1)
        return replace(self, ids=ids, mask=mask, positions=later.positions, read_by=later.read_by)


@runtime_checkable
class EngineCache(Protocol):
    """One step is a transaction: `begin`, the forward, then `commit` or `abort`.

    name: of the recipe, for messages. log: the tokens that it holds, where the engine's loop fed them all, else None.
    """

    name: str
    log: TokenLog | None

    @property
    def handle(self) -> TransformersCache | None:
        """What the model gets as its cache argument; None makes every step compute the whole sequence."""

    @property
    def total_tokens(self) -> int:
        """Tokens committed per row: the loop feeds what comes after them."""

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first step."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None when it has no limit."""

    @property
    def max_rows(self) -> int | None:
        """Rows it can hold; None when it has no limit."""

    @property
    def why_not_compiled(self) -> str | None:
        """Why a compiled step cannot use it; None when it can: its tensors never move and are where layers compute."""

    @property
    def bytes(self) -> int:
        """Bytes of everything it keeps, room for tokens to come included."""

    @property
    def device_bytes(self) -> int:
        """Those of `bytes` that are on the device that computes; where that is the host, all that are not in files."""

    @property
    def unfinished(self) -> bool:
        """Whether `select_rows` or `fork` failed after its arguments were checked, as it does when memory is out.

        Then `finish` resumes it and `reset` empties the cache; all else raises `StepError`.
        """

    def finish(self) -> None:
        """Resume a selection of rows that failed; may be called again when it fails again."""

    def check_fits(self, model_config: PreTrainedConfig) -> None:
        """Raise `UnsupportedLayerError` when it was built for other layers than this model's (a `PreTrainedConfig`)."""

    def begin(self, tokens: int, graph: bool = False) -> None:
        """Open a step of `tokens` per row: make room, decide where they go. When this raises, nothing has changed.

        graph: the forward is compiled.
        """

    def can_reject(self, rejected: int) -> bool:
        """Whether `commit(rejected)` is possible; else abort the step and feed the tokens to keep again."""

    def commit(self, rejected: int = 0) -> None:
        """Keep the open step without its last `rejected` tokens, and evict what no later token attends to."""

    def abort(self) -> None:
        """Undo the open step on every layer, however far it came. Without one: nothing to do."""

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes a copy of row `index[i]` in all that it holds. When this fails half-way: see `unfinished`."""

    def crop(self, tokens: int) -> None:
        """Between steps. Positive: the new size. Negative: how many of the last tokens to remove, at most all.

        Raises `StepError`, with nothing changed, where the tokens that would have to come back were evicted.
        """

    def fork(self, times: int) -> None:
        """Row i becomes rows i * times to i * times + times - 1, as `select_rows` would make them.

        Nothing is copied where rows can share what they have in common, as long as they are next to each other.
        """

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all at once."""

    def reset(self) -> None:
        """Evict everything."""


@dataclass(frozen=True)
class Capabilities:
    """What can be done with a cache beyond `EngineCache`. The defaults are those of a cache that says nothing.

    can_migrate: it consists of layers of ours, so its content can go to other backends (`caches.migrate`), and its rows
    to several caches. can_split: its rows can be computed in parts, each with a cache of its own. can_predict: it has
    `growth`. rollback: an aborted step is always undone, or sometimes the cache is lost instead. rollback_blocker: why
    committed tokens cannot be taken back; None where they can. is_lost: a step failed and could not be undone.
    is_quantized: some of it is kept in fewer bits than it came in. imposes_windows: with it, a token attends to fewer
    tokens than the model's own attention span has.
    """

    can_migrate: bool = False
    can_split: bool = False
    can_predict: bool = False
    rollback: Literal["always", "sometimes"] = "always"
    rollback_blocker: str | None = None
    is_lost: bool = False
    is_quantized: bool = False
    imposes_windows: bool = False


def capabilities(cache: EngineCache) -> Capabilities:
    """What can be done with `cache`, as it says itself where it does."""
    return getattr(cache, "capabilities", Capabilities())


def check_has_layers_of_ours(cache: Any) -> None:
    """Raise `UnsupportedLayerError` unless the content of `cache` is in layers of ours."""
    if not capabilities(cache).can_migrate:
        raise UnsupportedLayerError(
            f"the content of a {type(cache).__name__} is in no layers of ours, so it cannot be read: only caches of "
            "caches.build that keep something can be converted, branched, joined, or give some of their rows"
        )


class Growing(EngineCache, Protocol):
    """A cache that knows how it grows."""

    def growth(self, tokens: int) -> int:
        """How many bytes more it will take of the device when there is room for `tokens` more."""


def can_predict(cache: EngineCache) -> TypeGuard[Growing]:
    """Whether the cache knows how it grows."""
    return capabilities(cache).can_predict


@runtime_checkable
class KeepsPast(Protocol):
    """A cache of which windows keep what leaves them only on request."""

    def keep_past(self, keep: bool) -> None:
        """Whether windows keep what leaves them in a step until it is committed, so that tokens can be taken back."""


class AttentionView(Protocol):
    """What attention over a cache has to know. The defaults: it shows every token, transformers makes the masks."""

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Its layers; none where transformers makes the masks."""
        return ()

    @property
    def max_step_tokens(self) -> int | None:
        """Tokens that a step should have at most; None for any number."""
        return None

    @property
    def imposes_windows(self) -> bool:
        """Whether a token attends to fewer tokens with it than the model's own attention span has."""
        return False

    @property
    def rotations(self) -> Mapping[int, RopeRotation]:
        """How it rotates the keys of which layers, where it does."""
        return {}

    def positions_needed(self, tokens: int) -> int:
        """Positions that a model has to tell apart in a text of `tokens`."""
        return tokens

    def imposed_window(self, layer_idx: int) -> int | None:
        """Tokens that a token can attend to, itself included, where that is fewer than the layer's attention span."""
        return None

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, Any]:
        """(kv_length, kv_offset) of what attention over the next `query_length` tokens reads."""
        raise StepError("transformers makes the masks for this cache")

    def extra_slots(self, layer_idx: int, tokens: int) -> int:
        """Slots that attention over several `tokens` finds before those of `get_mask_sizes`; 0 for one token."""
        return 0

    def set_padding(self, padding: torch.Tensor | Sequence[int] | None) -> None:
        """Say how many padding tokens each row begins with; None for none."""
        return


class _FullView(AttentionView):
    """All defaults."""


_FULL_VIEW = _FullView()


def attention_view(cache: object) -> AttentionView:
    """What attention over `cache` has to know: its own `view` where it has one."""
    return getattr(cache, "view", _FULL_VIEW)
