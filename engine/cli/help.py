"""The layout of `--help`: options under headings, with complete names in any width."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_WIDE = 78  # characters; in narrower terminals, texts begin on the line below the option


class Command(TyperCommand):
    """A command that lists its options by their `rich_help_panel`."""

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
    """The help record without Python types and ranges of numbers: the text has them in words."""
    text, _, facts = text.rstrip("]").partition("  [")
    in_words = [fact for fact in facts.split("; ") if fact and not re.search(r"\bx\b", fact)]
    return re.sub(r" <.*>$", "", names), text + (f"  [{'; '.join(in_words)}]" if in_words else "")
