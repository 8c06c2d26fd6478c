"""What `--help` looks like: options under headings, no name cut however narrow the terminal is."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_WIDE = 78  # below it, texts begin under the names of options


class Command(TyperCommand):
    """Lists its options by the `rich_help_panel` that they were declared with."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).append(_plain(*record))
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=30 if formatter.width >= _WIDE else 18)


def _plain(names: str, text: str) -> tuple[str, str]:
    """Without types of Python, and without the range of a number, which the text tells in words."""
    text, _, facts = text.rstrip("]").partition("  [")
    told = [fact for fact in facts.split("; ") if fact and not re.search(r"\bx\b", fact)]
    return re.sub(r" <.*>$", "", names), text + (f"  [{'; '.join(told)}]" if told else "")
