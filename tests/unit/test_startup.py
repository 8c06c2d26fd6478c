"""What is imported, and when: a program in a process of its own says which modules it has."""

import gc
import json
import subprocess
import sys

import pytest
import transformers
from packaging.version import Version
from places import ROOT
from transformers.utils import import_utils

import engine
from caches.platform import heavy_imports

USED_BY_NO_PLAIN_CALL = {
    "functorch", "hqq", "networkx", "optimum", "pandas", "peft", "rich", "scipy", "sklearn",
    "torch._inductor.compile_fx", "torch.utils.cpp_extension", "torchvision", "typer",
}  # fmt: skip
GENERATE = """
import engine
generator = engine.Generator(engine.SHIPPED_MODEL)
assert generator.generate("def f(x):", max_new_tokens=4).text
"""
HQQ_CACHE = """
import copy, torch, transformers

def keys_of(cache):
    with torch.no_grad():
        generator.model(torch.arange(8)[None], past_key_values=cache)
    return cache.layers[0]

layer = keys_of(transformers.QuantizedCache("hqq", generator.model.config, q_group_size=16, axis_key=1, axis_value=1))
copied = copy.deepcopy(layer)
exact = keys_of(transformers.DynamicCache()).keys
for of in layer, copied:
    error = (of._dequantize(of._quantized_keys) - exact).abs().max()
    assert 0 < error < 0.3 * exact.abs().max(), error

import hqq
from hqq.core.quantize import HQQLinear, Quantizer
assert hqq.core.quantize.Quantizer is Quantizer is copied.quantizer
"""


def modules_after(*programs):
    """Of each, one after the other in one process."""
    told = "\nimport sys, json; print(json.dumps(sorted(sys.modules)))\n"
    command = [sys.executable, "-c", "".join(program + told for program in programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "program",
    [
        "import engine; assert 'Generator' in dir(engine); engine.EngineConfig(), engine.EngineError",
        "import engine.cli",
    ],
)
def test_torch_is_imported_when_it_is_needed(program):
    [found] = modules_after(program)
    assert not {"torch", "transformers", "numpy", "caches"} & found


def test_what_a_file_holds_is_said_without_torch(tmp_path):
    path = tmp_path / "cache.safetensors"
    generator = engine.Generator(engine.SHIPPED_MODEL)
    generator.generate("import os", max_new_tokens=2).cache.save(path)
    run = f"""
from engine.cli import main
try:
    main(["cache", "inspect", {str(path)!r}, "--json"])
except SystemExit as ended:
    assert ended.code == 0
"""
    said, found = modules_after(run)
    assert {"backend", "total_tokens"} <= said
    assert not {"torch", "transformers", "numpy", "caches"} & found


def test_a_plain_call_imports_nothing_that_it_does_not_use():
    [plain] = modules_after(GENERATE)
    assert {"torch", "transformers.models.llama.modeling_llama"} <= plain
    if Version(transformers.__version__) >= Version("5.23"):  # earlier ones import hqq in other places too
        unused = USED_BY_NO_PLAIN_CALL & plain
        assert not unused


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "import hqq.core.quantize",
        "from transformers import AutoModelForCausalLM; AutoModelForCausalLM",
        "import transformers.cache_utils",
        "import torch, gc; gc.disable()",
        "import gc; gc.freeze()",
    ],
)
def test_what_a_program_has_imported_before_stays_as_it_is(before):
    """Also how it has set the garbage collector. Of transformers' own modules, it replaces some by itself."""
    stay = ("torch", "hqq.core.quantize", "transformers.cache_utils", "transformers.models")
    state = "\nimport gc, sys; before, enabled, frozen = dict(sys.modules), gc.isenabled(), gc.get_freeze_count()\n"
    after = f"""
import hqq.core.quantize, transformers.cache_utils
changed = [name for name in {stay} if name in before and sys.modules[name] is not before[name]]
assert not changed, changed
if "hqq.core.quantize" in before:
    assert transformers.cache_utils.HQQQuantizer is hqq.core.quantize.Quantizer
assert gc.isenabled() == enabled
assert frozen // 2 <= gc.get_freeze_count() <= frozen  # some of it is gone by then
"""
    modules_after(before + state + GENERATE + after + HQQ_CACHE)


@pytest.mark.slow
def test_the_command_line_keeps_what_it_imports():
    modules_after(
        "from engine.cli.libraries import start_libraries; from engine.cli.progress import Work; "
        "start_libraries(Work(), None, None); import gc, torch; "
        "assert gc.is_tracked(vars(torch)) and gc.get_freeze_count() > 100_000 and gc.isenabled()"
    )


def test_the_garbage_collector_goes_on_when_an_import_fails(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    monkeypatch.setattr(heavy_imports, "_MODULES", ("math", "a_module_that_is_missing"))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        heavy_imports.import_transformers()
    assert gc.isenabled()


@pytest.mark.slow
def test_the_models_of_transformers_are_as_transformers_finds_them():
    modules_after("""
import caches
import transformers.models as models
from transformers.utils.import_utils import _LazyModule, create_import_structure_from_path, spread_import_structure

found = spread_import_structure(create_import_structure_from_path(models.__file__))
plain = _LazyModule(models.__name__, models.__file__, found, module_spec=models.__spec__)
for name in "_class_to_module", "_object_missing_backend", "_modules":
    assert getattr(plain, name) == getattr(models, name)
assert set(plain.__all__) == set(models.__all__) > {"llama", "LlamaConfig"}
""")


@pytest.mark.parametrize("fits", [True, False])
def test_where_a_shortcut_does_not_fit_transformers_is_imported_as_ever(monkeypatch, fits):
    hqq, imported = "hqq.core.quantize", []
    for name in (hqq, "transformers.cache_utils", "transformers.models", "transformers.modeling_utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def import_module(name):
        imported.append((name, hqq in sys.modules, import_utils.define_import_structure is find))
        if name == "transformers.cache_utils" and hqq in sys.modules and not fits:
            raise ImportError("cannot import name 'HQQLinear'")
        return import_utils

    find = import_utils.define_import_structure
    if not fits:
        find = lambda path: {}  # noqa: E731 - no prefix
        monkeypatch.setattr(import_utils, "define_import_structure", find)
    monkeypatch.setattr(heavy_imports.importlib, "import_module", import_module)
    heavy_imports.import_transformers()
    assert imported[-len(heavy_imports._MODULES) :] == [(name, False, True) for name in heavy_imports._MODULES]
    assert ("transformers.cache_utils", True, True) in imported
    assert (("transformers.models", False, False) in imported) == fits
    assert hqq not in sys.modules
    assert import_utils.define_import_structure is find
