"""For the reference: lines `name: what it is` of a docstring become a list, where `name` is a field or a parameter."""

import re
from typing import Any

from griffe import Extension

_FIELD = re.compile(r"^((?:\w+, )*\w+): ")


def _as_lists(text: str, names: set[str]) -> str:
    lines, in_field = [], False
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found and set(found[1].split(", ")) <= names:
            fields = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines += ["", f"- {fields}: {line[found.end() :]}"]
            in_field = True
        elif in_field and line.strip() and (line.startswith("    ") or lines[-1].startswith(("- ", "    "))):
            lines.append(f"    {line.strip()}")
        else:
            in_field = False
            lines.append(line)
    return "\n".join(lines)


class FieldLists(Extension):
    """Used by mkdocs.yml; it knows nothing of this project."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None or not (obj.is_class or obj.is_function):
            return
        names = {parameter.name for parameter in obj.parameters} if obj.is_function else set(obj.members)
        obj.docstring.value = _as_lists(obj.docstring.value, names)
