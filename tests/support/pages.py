"""The pages of the documentation: their examples, and the parts of them that tests write.

`UPDATE_DOCS=1 pytest tests/docs` (with `-m slow tests/contract` for the tables of caches and strategies) writes those
parts anew; without it they are compared.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from places import ROOT

DOCS = ROOT / "docs"
_GENERATED = DOCS / "_generated"
_UPDATES = bool(os.environ.get("UPDATE_DOCS"))


def pages() -> list[Path]:
    """Everything that is written by hand: README, CONTRIBUTING and the pages under docs/."""
    written = [page for page in sorted(DOCS.rglob("*.md")) if _GENERATED not in page.parents]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; one with a title is a file of its own and not among them."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.M | re.S)


def titled_blocks(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    found = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page.read_text(), flags=re.M | re.S)
    return dict(found)


def check_generated(name: str, text: str) -> None:
    """Compare docs/_generated/NAME.md, which pages include, with what it has to be."""
    _check(_GENERATED / f"{name}.md", text)


def check_marked(page: Path, name: str, text: str) -> None:
    """The same for a part of a page between `<!-- name -->` and `<!-- /name -->`."""
    marks = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", flags=re.S)
    whole = page.read_text()
    assert marks.search(whole), f"{page.name} has no part between <!-- {name} --> and <!-- /{name} -->"
    _check(page, marks.sub(lambda _: text, whole))


def _check(file: Path, text: str) -> None:
    if _UPDATES:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.exists(), f"{file} is missing: run the test with UPDATE_DOCS=1"
    assert file.read_text() == text, f"{file} is out of date: run the test with UPDATE_DOCS=1"
