"""The texts by which code tells one thing from another, found in its syntax tree."""

import ast
from collections.abc import Iterator

from places import ROOMS, ROOT


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every text that something is compared with, that selects an entry of a table, or that stands
    among texts alone."""
    for node in ast.walk(tree):
        operands = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "with" in node.func.attr:
            operands = node.args  # startswith, endswith
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            operands = node.elts if all(isinstance(part, ast.Constant) for part in node.elts) else []
        for operand in operands:
            texts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            yield from ((node.lineno, text.value) for text in texts if isinstance(text, ast.Constant))


def comparisons(names: set[str], allowed: set[str], other_words: set[tuple[str, str]]) -> list[str]:
    """Where files of the four rooms compare with one of these names.

    allowed: files that may. other_words: files and words in them that are no such names.
    """
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        place, code = path.relative_to(ROOT).as_posix(), path.read_text()
        if place not in allowed:
            texts = {(line, text) for line, text in compared(ast.parse(code)) if text in names}
            found += [f"{place}:{line}: {text}" for line, text in sorted(texts) if (place, text) not in other_words]
    return found
