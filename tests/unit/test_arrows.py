"""Which part of a package may import which, and that no two files import each other, however far around."""

import ast

import pytest
from places import ROOMS, ROOT

# Lowest first. A part may import those of lower lines, and the parts of the first line each other.
ENGINE = [
    {
        "chat_template",
        "errors",
        "parameters",
        "readers",
        "result",
        "prompt",
        "rows",
        "tables",
        "version",
    },
    {"output", "kernels", "parallel"},
    {"compiling", "loading"},
    {"model"},
    {"export", "request"},
    {"decoding"},
    {"memory", "scoring", "streaming"},
    {"reuse", "serving"},
    {"run_builder"},
    {"generator"},
    {"distributed", "measuring", "server"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
CACHES = [
    {"errors", "platform"},
    {"layers", "timeline", "attention", "memory"},
    {"protocol", "quantization"},
    {"registry", "stores"},
    {"core"},
    {"files"},
    {"hf"},
    {"transfer"},
    {"backends"},
    {"__init__"},
]
TABLES = {"engine": ENGINE, "caches": CACHES}

# `Generator`'s methods take the docstring of `engine.generate`, and `engine` loads `Generator` on first use.
LAZY = (ROOT / "engine" / "generator.py", ROOT / "engine" / "__init__.py")


def file_of(module):
    """The file of a module of the four packages; None for any other name."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.exists()), None) if module.split(".")[0] in ROOMS else None


def imported(path):
    """The files that a file imports: also within functions and for annotations alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if file_of(name) else node.module for name in inner]
        else:
            continue
        yield from filter(None, map(file_of, names))


def part_of(path):
    """The sub-package or file of its package that a file is in."""
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def wrong_arrows(room, path, part):
    """The parts of `room` that a file in `part` may not import."""
    table = TABLES[room]
    line = {name: number for number, names in enumerate(table) for name in names}
    for target in imported(path):
        if target.relative_to(ROOT).parts[0] != room or (other := part_of(target)) == part:
            continue
        if line[other] >= line[part] > 0 or line[other] > line[part]:
            yield other


def files(room):
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", TABLES)
def test_every_part_has_its_line(room):
    assert {part_of(path) for path in files(room)} == set().union(*TABLES[room])


@pytest.mark.parametrize("room", TABLES)
def test_parts_import_lower_ones_alone(room):
    found = {
        (str(path.relative_to(ROOT)), other)
        for path in files(room)
        for other in wrong_arrows(room, path, part_of(path))
    }
    assert found <= {("engine/generator.py", "__init__")}  # see LAZY


def in_circles(arrows):
    """The files that can be reached from themselves. arrows: for each file those that it imports."""
    found = set()
    for file in arrows:
        reached, left = set(), list(arrows[file])
        while left:
            if (one := left.pop()) not in reached:
                reached.add(one)
                left += arrows.get(one, ())
        found |= {file} & reached
    return found


def test_no_files_import_each_other():
    arrows = {path: set(imported(path)) - {path} for room in ROOMS for path in files(room)}
    arrows[LAZY[0]].remove(LAZY[1])
    assert not in_circles(arrows)


# What is wrong is found.

IMPORTS = {
    "a module": "import engine.memory.plan",
    "a name": "from engine.memory.plan import plan",
    "a file as a name": "from engine.memory import plan",
    "in a function": "def f():\n    from engine.memory.plan import plan",
    "for annotations": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.memory.plan import plan",
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
def test_a_wrong_arrow_is_seen(text, tmp_path):
    (bad := tmp_path / "bad.py").write_text(text)
    assert list(wrong_arrows("engine", bad, "request")) == ["memory"]
    assert list(wrong_arrows("engine", bad, "scoring")) == ["memory"]  # of the same line
    assert not list(wrong_arrows("engine", bad, "reuse"))


def test_a_wrong_arrow_of_the_caches_is_seen(tmp_path):
    (bad := tmp_path / "bad.py").write_text("from caches.hf.cache import Cache\nfrom caches.errors import CacheError\n")
    assert list(wrong_arrows("caches", bad, "core")) == ["hf"]


def test_a_circle_is_seen():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
