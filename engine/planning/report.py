"""How a plan is shown: what the run takes, a line or a block per backend, and the choice."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from engine.tables import Column, aligned, blocks, fits, terminal_width, wrapped

if TYPE_CHECKING:
    from engine.planning.plan import Plan
    from engine.planning.planner import BackendPlan

_WIDE = 160  # where no terminal says how wide it is
_COLUMNS = [
    Column("cache"), Column("kept by\nlayers"), Column("staging"), Column("to work\nwith"), Column("needs\nin all"),
    Column("fits"), Column("longest\ncontext"), Column("largest\nbatch"),
]  # fmt: skip
_MOST_WANTED = (0, 4, 5, 6, 7)  # of the columns


def plan_as_text(plan: Plan, width: int | None = None) -> str:
    """width: in characters; default: that of the terminal."""
    width = terminal_width(_WIDE) if width is None else width
    paragraphs = [aligned([Column(), Column(wraps=True)], _facts(plan), width)]
    possible = [backend for backend in plan.backends if backend.refused is None]
    if possible:
        paragraphs.append(_backends(possible, width))
    closing = [*_refusals(plan), f"Choice: {plan.choice or 'none of them'}; {plan.why}"]
    return "\n\n".join([*paragraphs, "\n".join(wrapped(line, width) for line in closing)])


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """What is the same whatever the cache."""
    rows = f", in {plan.rows} rows" if plan.rows != plan.batch_size else ""
    known = {place: size for place, size in plan.free_bytes.items() if size is not None}
    kinds = _kinds(plan.backends)
    return [
        ("model", f"{plan.model}, {plan.dtype} on {plan.device}"),
        ("run", f"{plan.batch_size} x {plan.prompt_tokens:,} tokens, {plan.max_new_tokens:,} new ones{rows}"),
        ("weights", _megabytes(plan.weight_bytes) + (", loaded" if plan.weights_are_loaded else "")),
        ("last logits", _megabytes(plan.logits_bytes)),
        ("free", ", ".join(f"{_megabytes(size)} ({place})" for place, size in known.items()) or "not known"),
        *([("layers keep", kinds[0])] if len(kinds) == 1 else []),
    ]


def _backends(possible: list[BackendPlan], width: int) -> str:
    """All columns, or the most wanted ones, or a block for each, as the width allows."""
    kinds = _kinds(possible)
    rows = [_row(backend, names_kinds=len(kinds) > 1) for backend in possible]
    if fits(_COLUMNS, rows, width):
        return aligned(_COLUMNS, rows, width)
    columns, fewer = [_COLUMNS[number] for number in _MOST_WANTED], [[row[n] for n in _MOST_WANTED] for row in rows]
    if len(possible) == 1 or not fits(columns, fewer, width):
        return blocks(_COLUMNS, rows, width)
    left_out = "What each keeps and works with: on a wider terminal, or for one cache alone."
    return f"{aligned(columns, fewer, width)}\n\n{wrapped(left_out, width)}"


def _row(backend: BackendPlan, names_kinds: bool) -> list[str]:
    kinds = [f"{_megabytes(size)}{f' ({kind})' if names_kinds else ''}" for kind, size in backend.kind_bytes.items()]
    needs = [_megabytes(size) + (f" ({place})" if place != "device" else "")
             for place, size in backend.need_bytes.items() if size]  # fmt: skip
    searched = [f"{n:,}" if n is not None else "?" for n in (backend.longest_context, backend.largest_batch)]
    return [
        backend.title.replace(", ", "\n  "),
        "\n".join(kinds),
        _megabytes(backend.cache_bytes.get("staging", 0)),
        _megabytes(backend.working_bytes),
        "\n".join(needs),
        {True: "yes", False: "no", None: "?"}[backend.fits],
        *searched,
    ]


def _refusals(plan: Plan) -> list[str]:
    """Reasons that several share are told, unless the choice tells them; of a single backend it is told in any case."""
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
    return lines + ([f"Not for this model: {', '.join(alone)} (a plan of one alone says why)."] if alone else [])


def _kinds(backends: list[BackendPlan] | tuple[BackendPlan, ...]) -> list[str]:
    return list(dict.fromkeys(kind for backend in backends for kind in backend.kind_bytes))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
