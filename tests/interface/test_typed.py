"""What a type checker, an editor and `help()` know of the parameters."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest
from places import ROOT

import caches
import engine
from engine.distributed.predictor import Predictor
from engine.parameters import PARAMETERS

FACES = [engine.generate, engine.stream, engine.Generator.generate, engine.Generator.stream]
RECORDS = [engine.Generation, engine.Stats, engine.StreamChunk, engine.Plan, engine.BackendPlan, engine.Fallback]
SCRIPT = """
import torch
from transformers import PreTrainedModel

import engine


def use(model: PreTrainedModel, pixels: torch.Tensor) -> None:
    gen = engine.Generator(model)
    reveal_type(engine.generate)  # shown: generate
    reveal_type(gen.stream)  # shown: stream
    reveal_type(engine.generate(model, "x", cache="static", num_beams=3))  # shown: result
    reveal_type(gen.generate("x", cache="static", pixel_values=pixels))  # shown: result of a model input
    reveal_type(gen.stream("x"))  # shown: stream of pieces
    engine.generate(model, "x", pixel_values=pixels, max_new_tokens=4)  # fine
    engine.generate(model, "x", num_beams="a")  # wrong
    engine.stream(model, "x", max_new_tokens="a")  # wrong
    gen.generate("x", top_k=0.5)  # wrong
    gen.stream("x", cache=5)  # wrong
"""


def documented(text):
    """The names in the Parameters section of a numpy-style docstring, in order."""
    section = re.split(r"\n(?=\w+\n---)", text.replace("\\\n", ""))
    [section] = [part for part in section if part.startswith("Parameters\n---")]
    heads = [line.partition(" : ")[0] for line in section.splitlines()[2:] if line[:1].strip()]
    return [name.strip() for head in heads for name in head.split(",")]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__qualname__)
def test_signatures_and_help_show_them(face):
    shown = inspect.signature(face).parameters
    assert list(shown)[1:] == list(PARAMETERS)
    assert shown["cache"].kind is shown["num_beams"].kind is inspect.Parameter.KEYWORD_ONLY
    text = pydoc.plain(pydoc.render_doc(face))
    assert "cache: " in text.partition("\n\n")[2].partition("\n\n")[0]
    assert re.search(r"^ *Parameters\n *-{10}$", text, flags=re.M)
    assert re.search(r"^ *cache : str", text, flags=re.M)
    assert [name.strip("*") for name in documented(inspect.getdoc(face))[-len(PARAMETERS) :]] == list(PARAMETERS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_result_is_documented_once(record):
    head, _, section = inspect.getdoc(record).partition("\nAttributes\n----------\n")
    assert head
    names = [name for line in section.splitlines() if " : " in line for name in line.partition(" : ")[0].split(", ")]
    assert sorted(names) == sorted(field.name for field in fields(record))


@pytest.mark.parametrize(
    "function", [caches.read_specs, caches.mask_kinds, caches.EngineCache.check_fits, Predictor.__init__]
)
def test_annotations_can_be_evaluated(function):
    parameters = set(inspect.signature(function).parameters) - {"self", "parameters"}
    assert parameters <= set(get_type_hints(function))


@pytest.mark.slow
def test_what_a_type_checker_says_of_calls(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), script]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    told: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if found := re.match(r"script\.py:(\d+): (.*)", line):
            told[int(found[1])] = told.get(int(found[1]), "") + found[2]
    said = {comment: told.get(number, "") for number, line in enumerate(SCRIPT.splitlines(), 1)
            if (comment := line.rpartition("  # ")[2]) != line and comment != "wrong"}  # fmt: skip
    for shown in ("shown: generate", "shown: stream"):
        assert re.search(r"cache: str \| .*num_beams: int \| None", said[shown]), done.stdout + done.stderr
    assert '"engine.result.Generation"' in said["shown: result"]
    assert '"engine.result.Generation"' in said["shown: result of a model input"]
    assert '"engine.streaming.Stream"' in said["shown: stream of pieces"]
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]
    assert [number for number, text in told.items() if "error: " in text] == wrong, done.stdout
    assert all("incompatible type" in told[number] for number in wrong)
