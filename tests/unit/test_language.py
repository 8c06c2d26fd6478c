"""The house language: words that names, docstrings, comments, messages and pages avoid, and what to write instead."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from places import ROOMS, ROOT


@dataclass(frozen=True)
class Rule:
    """words: single words and phrases of two. folder: where the rule holds; "" for everywhere."""

    words: str
    instead: str
    folder: str = ""


# Words that are wrong everywhere: in names and in prose.
EVERYWHERE = (
    Rule("nobody, somebody, anybody, whoever", "the object in the code"),
    Rule("told, untold, unasked", "given, set, unknown, deferred"),
    Rule("lane, lanes", "model session"),
    Rule("outlet, outlets", "stream buffer"),
    Rule("play, plays, player", "driver"),
    Rule("anatomy, skeleton", "model footprint, meta model"),
    Rule("ladder, rung, rungs, climb, climbs, climbed", "fallbacks, fallback, apply"),
    Rule("settle, settles, settled, settling, unsettled", "commit, committed, uncommitted"),
    Rule("trunk, trunks, tail, tails, siblings", "prefix, suffix, rows per prefix"),
    Rule("slab, slabs", "disk file"),
    Rule("staging, staged", "prefetch, prefetched"),
    Rule("stage, stages", "scratch"),
    Rule("pads", "left padding, pad tokens; as a name: left_padding or padding"),
    Rule("exotic", "model-specific"),
    Rule("encodes", "quantizes, is_quantized"),
    Rule("face, faces", "legacy names"),
    Rule("driven", "EngineCache, driven by the engine: say who calls what"),
    Rule("foreign", "another loop, transformers' `generate`, your own"),
    Rule("rehearse, rehearses, rehearsal", "dry run"),
    Rule("column, columns", "slots (of a buffer) or tokens (logical)", "caches"),
    Rule("write down, writes down, written down, wrote down", "encode, store"),
    Rule("our loop", "the engine's loop"),
    Rule("keys turn, turn keys, turns keys, turned keys, turning keys", "rotate"),
    Rule("way back", "undo"),
)

# Words that are ordinary English, or have another meaning in the field: wrong as names only.
AS_NAMES = (
    Rule("health", "logits check; a server's is_alive"),
    Rule("course", "run_shape"),
    Rule("fresh", "new, empty"),
    Rule("feeding", "forward_executor"),
    Rule("gathered", "collected_outputs"),
    Rule("study", "inspect"),
    Rule("drop, drops, dropped", "rejected; release"),
    Rule("reach, reaches", "attention_span"),
    Rule("turned, turning", "rotated"),
    Rule("leaves", "row_holders"),
    Rule("held", "kept"),
    Rule("gone", "evicted"),
    Rule("seen", "total_tokens"),
    Rule("forget, forgets, forgot, forgotten", "roll_back, evict, discard"),
    Rule("beside", "copy_stream, next_to"),
    Rule("extras", "model_kwargs"),
    Rule("numbers", "elements, values"),
    Rule("whole, wholes", "materialize, complete, full"),
    Rule("look", "on_outputs, record"),
    Rule("every", "all_..."),
    Rule("misplaced, unnamed", "rows_mixed, columns_without_ids"),
    Rule("follower", "StatefulLogitsProcessor"),
    Rule("written", "state_dict, state, encoded", "caches"),
    Rule("streams", "components", "caches"),
)

# Files, words and complete texts (an identifier or a string) in which a word is right. "" for a text: any.
ALLOWED = {
    ("", "staging", "staging"): "public: a key of `Plan`'s bytes_by_place",
    ("", "siblings", "check_siblings"): "the packages that are installed next to each other",
    ("caches/__init__.py", "driven", "driven"): "a public name",
    ("docs/reference/caches.md", "driven", "::: caches.driven"): "a public name",
    ("caches/hf/classic.py", "pads", ""): "public: an argument of `SinkCache`",
    ("caches/hf/shared_methods.py", "staging", ""): "public: a key of `bytes_by_place`",
    ("caches/hf/classic_names.py", "seen", "seen_tokens"): "a name of transformers' caches",
    ("engine/memory/cache_choice.py", "driven", "driven"): "a public function of `caches`",
    ("", "drop", "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"): "a name of transformers",
    ("", "leaves", "tree_leaves"): "a function of torch",
    ("", "look", "look_up"): "to look up",
    ("", "look", "_look_ahead"): "contrastive search looks ahead by a token",
    ("engine/memory/plan_table.py", "staging", ""): "public: a key of `Plan`'s bytes_by_place",
    ("engine/export.py", "seen", "seen"): "public: an argument of the exported program",
    ("caches/transfer/export_buffers.py", "seen", "seen"): "public: an argument of the exported program",
    ("native/products.cpp", "lane", "lane"): "a lane of a SIMD register",
    ("native/products.cpp", "lanes", ""): "lanes of a SIMD register",
    **{
        (f"native/products/{name}.h", word, ""): "lanes of a SIMD register"
        for name in ("elements", "rows", "plain", "codes", "blocks", "matrix_units")
        for word in ("lane", "lanes")
    },
    ("native/vectors.h", "lanes", ""): "lanes of a SIMD register",
    ("native/dense_attention.cpp", "lanes", ""): "lanes of a SIMD register",
    **{
        (f"native/attention/{name}.h", word, ""): "lanes of a SIMD register"
        for name in ("query_lanes", "common_slots", "own_slots", "prompt")
        for word in ("lane", "lanes")
    },
}
# Texts that are taken out of prose before it is searched.
PROPER_NAMES = re.compile(r"Hugging ?Face|huggingface", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A piece of a file: a name, or prose (docstring, comment, string, page)."""

    line: int
    text: str
    is_name: bool


def parts(text: str) -> list[str]:
    """The words of prose or of an identifier, in lower case; split at underscores and in camel case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", text)]


def python_texts(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string, False)
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(line, node.value, False)
        for name in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield Text(line, value, True)


def cpp_texts(source: str) -> Iterator[Text]:
    for line, text in enumerate(source.splitlines(), 1):
        code, _, comment = text.partition("//")
        yield Text(line, comment, False)
        for string in re.findall(r'"([^"]*)"', code):
            yield Text(line, string, False)
        for name in re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", code)):
            yield Text(line, name, True)


def markdown_texts(source: str) -> Iterator[Text]:
    fenced = re.sub(
        r"^( *)(```+|~~~+).*?^\1\2 *$", lambda block: "\n" * block[0].count("\n"), source, flags=re.S | re.M
    )
    prose = re.sub(r"(`+).+?\1", lambda span: "\n" * span[0].count("\n"), fenced, flags=re.S)
    for line, text in enumerate(prose.splitlines(), 1):
        yield Text(line, text, False)


READERS = {".py": python_texts, ".cpp": cpp_texts, ".h": cpp_texts, ".md": markdown_texts}


def offenders(root: Path, path: Path) -> list[str]:
    """The wrong words of a file, each with its line and what to write instead."""
    where = path.relative_to(root).as_posix()
    texts = list(READERS[path.suffix](path.read_text()))
    if path.suffix != ".md":
        texts.append(Text(0, path.stem, True))
    in_prose = wrong_words(where, EVERYWHERE)
    in_names = in_prose | wrong_words(where, AS_NAMES)
    found = []
    for text in texts:
        words = parts(PROPER_NAMES.sub("", text.text))
        wrong = in_names if text.is_name else in_prose
        there = wrong.keys() & {*words, *map(" ".join, pairwise(words))}
        for word in sorted(word for word in there if not is_allowed(where, word, text.text)):
            found.append(f"{where}:{text.line}: {word!r} in {text.text.strip()[:60]!r}: write {wrong[word]}")
    return found


def wrong_words(where: str, rules: tuple[Rule, ...]) -> dict[str, str]:
    """What to write instead of the words and phrases of these rules, by word."""
    mine = [rule for rule in rules if where.startswith(rule.folder)]
    return {word: rule.instead for rule in mine for word in rule.words.split(", ")}


def is_allowed(where: str, word: str, text: str) -> bool:
    return any((file, word, whole) in ALLOWED for file in ("", where) for whole in ("", text))


def files() -> list[Path]:
    folders = [*ROOMS, "native"]
    ends = ("*.py", "*.cpp", "*.h")
    sources = [path for folder in folders for end in ends for path in sorted((ROOT / folder).rglob(end))]
    pages = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]
    return [*sources, *pages, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_language_of(path):
    found = offenders(ROOT, path)
    assert not found, "\n".join(found)


def test_listed_files_exist():
    assert not {file for file, _, _ in ALLOWED if file and not (ROOT / file).exists()}


MADE_UP = {
    "a name": ("caches/a.py", "def climb_it():\n    pass\n", "climb"),
    "a name in camel case": ("engine/a.py", "class RungOf:\n    pass\n", "rung"),
    "an argument": ("engine/a.py", "def f(seen):\n    return 1\n", "seen"),
    "an attribute": ("engine/a.py", "x = y.held_tokens\n", "held"),
    "a module": ("engine/ladder.py", "x = 1\n", "ladder"),
    "a docstring": ("strategies/a.py", '"""Nobody waits for it."""\n', "nobody"),
    "a comment": ("configs/a.py", "x = 1  # the cache was told\n", "told"),
    "a phrase": ("engine/a.py", "# How keys are written\n# down: written down\n", "written down"),
    "an error": ("engine/a.py", 'raise ValueError(f"{1} trunks are there")\n', "trunks"),
    "a folder's rule": ("caches/a.py", '"""[rows, heads, columns]"""\n', "columns"),
    "C++": ("caches/a.cpp", "int x;  // a staged tensor\n", "staged"),
    "a name in C++": ("caches/a.cpp", "int columns = 1;\n", "columns"),
    "a page": ("docs/a.md", "# Title\n\nThe ladder is climbed.\n", "ladder"),
}


@pytest.mark.parametrize(("where", "content", "word"), MADE_UP.values(), ids=MADE_UP)
def test_a_wrong_word_is_found(where, content, word, tmp_path):
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert any(f"{word!r} in" in found for found in offenders(tmp_path, path))


@pytest.mark.parametrize(
    ("where", "content"),
    [
        ("engine/a.py", '"""[rows, heads, columns] that were seen and held, whole numbers."""\n'),  # prose
        ("engine/a.py", "columns = plan['staging']\n"),
        ("engine/a.py", '"""Models of Hugging Face: from huggingface_hub, an interface."""\n'),
        ("docs/a.md", "A page with `trunk` in code.\n\n```python\nladder = 1\n```\n"),
        ("engine/a.py", "toldest, coursework = 1, 2  # outletx\n"),
    ],
)
def test_other_words_are_not(where, content, tmp_path):
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert not offenders(tmp_path, path)
