"""Private names of torch that our code uses: a release that drops one is found out here at once."""

import ast
import importlib
from collections import defaultdict
from functools import cache

import pytest
import torch
from places import ROOMS, ROOT


@cache
def uses():
    """Of every private name, dotted from `torch`, the files that use it."""
    found = defaultdict(set)
    for path in sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in names_in(node):
                if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
                    found[name].add(str(path.relative_to(ROOT)))
    return dict(found)


def names_in(node):
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        if dotted.replace(".", "").isidentifier() and dotted.startswith("torch."):
            yield dotted
        elif dotted.endswith(".untyped_storage()._cdata"):
            yield "torch.UntypedStorage._cdata"


def resolved(name):
    """What a dotted name is, where a module on the way may have to be imported."""
    first, *rest = name.split(".")
    thing, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(thing, part):
            importlib.import_module(path)
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", sorted(uses()))
def test_it_exists(name):
    if name == "torch.ops.mkldnn._linear_pointwise" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    assert resolved(name) is not None, f"used in {sorted(uses()[name])}"


def test_they_are_found():
    assert uses()["torch._dynamo.eval_frame._debug_get_cache_entry_list"] == {"engine/model/model_runner.py"}
    assert "torch.Tensor._make_wrapper_subclass" in uses()
    assert "torch.UntypedStorage._cdata" in uses()
    with pytest.raises(ImportError):
        resolved("torch.utils._no_such_name")
