"""The result of a plan, as data and as it is shown: as text, in a line, and as HTML in a notebook."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.tables import Column, aligned, blocks, counted, facts, fits, html_table, megabytes, terminal_width, wrapped

_UNKNOWN_WIDTH = 160  # characters, where the output is no terminal
_COLUMNS = [
    Column("cache"), Column("kept by\nlayers"), Column("staging"), Column("to work\nwith"), Column("needs\nin all"),
    Column("fits"), Column("longest\ncontext"), Column("largest\nbatch"),
]  # fmt: skip
_MOST_WANTED = (0, 4, 5, 6, 7)  # of the columns


@dataclass(frozen=True, eq=False)
class BackendPlan:
    """What a run takes with one backend. It equals only itself, like a `Plan`.

    Attributes
    ----------
    cache : str
        The backend's name.
    options : dict
        Its options that differ from the defaults.
    cache_bytes : dict of str to int
        Bytes of the cache when it is largest, by place: "device", "host", "disk", and "staging" (buffers on the device
        through which offloaded layers are read).
    kind_bytes : dict of str to int
        The same by kind of layer, without "staging".
    working_bytes : int
        The most that a forward needs in addition to the cache and the logits.
    gap_bytes : int
        What is added for the gaps that a CPU's allocator leaves between tensors. It is not part of `need_bytes`.
    need_bytes : dict of str to int
        Of the whole run when it is largest, by place; on a CPU, host memory counts as "device".
    fits : bool or None
        Whether `need_bytes`, the gaps and a tenth more are free; None where that is unknown.
    longest_context : int or None
        Tokens per row that would still fit, prompt and new ones together, to about 1 %. The last new token is never
        read, so this may be one more than the positions of the model.
    largest_batch : int or None
        Prompts of this length that would still fit, to about 1 %.
    refused : str or None
        Why the backend cannot serve this model or this run; None where it can.
    changes_text : str or None
        Why the text can be another one than with a lossless cache; None where it cannot, or where it is refused.
    """

    cache: str
    options: dict[str, object] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    kind_bytes: dict[str, int] = field(default_factory=dict)
    working_bytes: int = 0
    gap_bytes: int = 0
    need_bytes: dict[str, int] = field(default_factory=dict)
    fits: bool | None = None
    longest_context: int | None = None
    largest_batch: int | None = None
    refused: str | None = None
    changes_text: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the cache in all places together."""
        return sum(self.cache_bytes.values())

    @property
    def title(self) -> str:
        return ", ".join([self.cache, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run will take: see `engine.plan`. Printed, it is a table; iterated over, it yields its `backends`.

    A plan equals only itself: compare `to_dict()` of two.

    Attributes
    ----------
    model, dtype, device : str
        The model's class, its data type and the device it computes on.
    weights : str
        What they are: the data type, or codes of few bits.
    prompt_tokens, max_new_tokens, batch_size : int
        The arguments of the plan.
    rows : int
        Rows that are generated: `batch_size` times beams or samples.
    weight_bytes : int
        Of parameters and buffers; tied ones count once. They are part of `need_bytes` unless they are loaded.
    weights_are_loaded : bool
        Whether the plan was given a loaded model.
    logits_bytes : int
        Of the logits after the last tokens, with the copies that the strategy makes.
    free_bytes : dict of str to int or None
        By place ("device", "host", "disk"), None where that is unknown.
    backends : tuple of BackendPlan
        The backends that were planned.
    choice : str or None
        The title of the recommended backend, None where all are refused.
    why : str
        The reason for the choice, in a sentence.
    not_so : tuple of str
        What trials have shown not to be so of such models, on this machine: see
        `Generator.facts`.
    """

    model: str
    dtype: str
    device: str
    weights: str
    prompt_tokens: int
    max_new_tokens: int
    batch_size: int
    rows: int
    weight_bytes: int
    weights_are_loaded: bool
    logits_bytes: int
    free_bytes: dict[str, int | None]
    backends: tuple[BackendPlan, ...]
    choice: str | None
    why: str
    not_so: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> BackendPlan:
        """The first backend with this name or title. Raises `KeyError`."""
        for backend in self.backends:
            if name in (backend.cache, backend.title):
                return backend
        raise KeyError(f"the plan has no backend {name!r}: {', '.join(backend.title for backend in self.backends)}")

    def __contains__(self, name: object) -> bool:
        """Whether there is a backend with this name or title."""
        return any(name in (backend.cache, backend.title) for backend in self)

    def __iter__(self) -> Iterator[BackendPlan]:
        return iter(self.backends)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as values that JSON can hold."""
        return asdict(self)

    def __str__(self) -> str:
        return plan_as_text(self)

    def __repr__(self) -> str:
        """One line; `print(plan)` shows the table."""
        fitting = sum(backend.fits is True for backend in self.backends)
        return (
            f"Plan({self.model}, {self.weights} on {self.device}, {self.batch_size} x ({self.prompt_tokens} + "
            f"{self.max_new_tokens}) tokens, choice={self.choice!r}, {fitting} of {len(self.backends)} caches fit: "
            "print() shows them)"
        )

    def _repr_html_(self) -> str:
        """A table with a line for each cache, with the reason where it is refused, and the choice below."""
        rows = []
        for backend in self.backends:
            is_refused = backend.refused is not None
            cells = (
                ["", "", "", "", backend.refused] if is_refused else [", ".join(_needs(backend)), *_found(backend), ""]
            )
            rows.append([backend.title, *cells])
        tokens = f"{_lengths(self)}, in {counted(self.rows, 'row')}"
        below = [f"{self.model}, {self.weights} on {self.device}; {self.batch_size} x {tokens}",
                 f"choice: {self.choice or 'none of them'}; {self.why}"]  # fmt: skip
        return html_table(["cache", "needs", "fits", "longest context", "largest batch", "refused"], rows, below)


def plan_as_text(plan: Plan) -> str:
    """The plan as a table that fits the terminal."""
    width = terminal_width(_UNKNOWN_WIDTH)
    paragraphs = [facts(_facts(plan), width)]
    possible = [backend for backend in plan.backends if backend.refused is None]
    if possible:
        paragraphs.append(_backends(possible, width))
    closing = [*_refusals(plan), f"Choice: {plan.choice or 'none of them'}; {plan.why}"]
    return "\n\n".join([*paragraphs, "\n".join(wrapped(line, width) for line in closing)])


def _lengths(plan: Plan) -> str:
    return f"{counted(plan.prompt_tokens, 'token')}, {counted(plan.max_new_tokens, 'new one')}"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """Names and values of what does not depend on the cache."""
    rows = f", in {plan.rows} rows" if plan.rows != plan.batch_size else ""
    free_bytes = {tier: size for tier, size in plan.free_bytes.items() if size is not None}
    components = _kinds(plan.backends)
    return [
        ("model", f"{plan.model}, {plan.weights} on {plan.device}"),
        ("run", f"{plan.batch_size} x {_lengths(plan)}{rows}"),
        ("weights", megabytes(plan.weight_bytes) + (", loaded" if plan.weights_are_loaded else "")),
        ("last logits", megabytes(plan.logits_bytes)),
        ("free", ", ".join(f"{megabytes(size)} ({tier})" for tier, size in free_bytes.items()) or "not known"),
        *([("layers keep", components[0])] if len(components) == 1 else []),
        *([("tried", "; ".join(plan.not_so))] if plan.not_so else []),
    ]


def _backends(possible: list[BackendPlan], width: int) -> str:
    """A table of all columns or of the most wanted ones, or a block per backend, as the width allows."""
    components = _kinds(possible)
    rows = [_row(backend, names_kinds=len(components) > 1) for backend in possible]
    if fits(_COLUMNS, rows, width):
        return aligned(_COLUMNS, rows, width)
    columns, fewer = [_COLUMNS[number] for number in _MOST_WANTED], [[row[n] for n in _MOST_WANTED] for row in rows]
    if len(possible) == 1 or not fits(columns, fewer, width):
        return blocks(_COLUMNS, rows, width)
    left_out = "What each keeps and works with: on a wider terminal, or for one cache alone."
    return f"{aligned(columns, fewer, width)}\n\n{wrapped(left_out, width)}"


def _row(backend: BackendPlan, names_kinds: bool) -> list[str]:
    components = [
        f"{megabytes(size)}{f' ({component})' if names_kinds else ''}" for component, size in backend.kind_bytes.items()
    ]
    title, kept, needs = backend.title.replace(", ", "\n  "), "\n".join(components), "\n".join(_needs(backend))
    sizes = [megabytes(size) for size in (backend.cache_bytes.get("staging", 0), backend.working_bytes)]
    return [title, kept, *sizes, needs, *_found(backend)]


def _needs(backend: BackendPlan) -> list[str]:
    """Megabytes of the whole run; the place is named where it is not the device."""
    return [megabytes(size) + (f" ({tier})" if tier != "device" else "") for tier, size in backend.need_bytes.items()]


def _found(backend: BackendPlan) -> list[str]:
    """Whether it fits, the longest context and the largest batch, in words."""
    searched = [f"{n:,}" if n is not None else "?" for n in (backend.longest_context, backend.largest_batch)]
    return [{True: "yes", False: "no", None: "?"}[backend.fits], *searched]


def _refusals(plan: Plan) -> list[str]:
    """Lines about the refused backends. A reason is given where it is the only backend's or that of several, unless the
    choice gives it."""
    by_reason = defaultdict(list)
    for backend in plan.backends:
        if backend.refused is not None:
            by_reason[backend.refused].append(backend.title.replace(", ", " with ", 1))
    lines, alone = [], []
    for reason, names in by_reason.items():
        if reason in plan.why:
            lines.append(f"Not for this run: {', '.join(names)} (why: see the choice).")
        elif len(names) > 1 or len(plan.backends) == 1:
            lines.append(f"Not for this run: {', '.join(names)}: {reason.rstrip('.')}.")
        else:
            alone += names
    heading = "Not for this model, or with an option that has to be given"
    return lines + ([f"{heading}: {', '.join(alone)} (a plan of one alone says why)."] if alone else [])


def _kinds(backends: Sequence[BackendPlan]) -> list[str]:
    return list(dict.fromkeys(component for backend in backends for component in backend.kind_bytes))
