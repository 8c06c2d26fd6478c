"""The package that docs/extend/plug-in-package.md shows: installed offline, used by commands in new processes."""

import copy
import importlib
import os
import pickle
import shlex
import subprocess
import sys

import pytest
import torch
from pages import DOCS, blocks, titled_blocks
from places import ROOT

import configs
import engine

tomllib = pytest.importorskip("tomllib")
PAGE = DOCS / "extend" / "plug-in-package.md"


@pytest.fixture
def installed(tmp_path):
    """A folder that has what pip would leave of the package: its module, and metadata with the entry points."""
    files = titled_blocks(PAGE)
    project = tomllib.loads(files["pyproject.toml"])
    name, version = project["project"]["name"], project["project"]["version"]
    for module in project["tool"]["setuptools"]["py-modules"]:
        (tmp_path / f"{module}.py").write_text(files[f"{module}.py"])
    metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{key} = {what}\n" for key, what in of.items()) for group, of in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def run(folder, *commands):
    """(stdout, stderr) of modules of Python in new processes, which find what is installed; all have to succeed."""
    settings = {
        "env": os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    started = [subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, **settings) for command in commands]
    found = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0] * len(commands), found
    return found


@pytest.mark.slow
def test_the_commands_find_it(installed):
    [block] = blocks(PAGE, "bash")
    commands = block.splitlines()
    assert len(commands) == 3
    found = run(installed, *map(shlex.split, commands))
    assert not any("cannot be loaded" in stderr for _, stderr in found)
    assert "store_dtype" in found[0][0]
    assert all(shown.strip() for shown, _ in found[1:])


@pytest.mark.slow
def test_what_caches_owe_is_owed_by_its_cache(installed):
    """Where it loses nothing."""
    module = installed / "kvengine_extras.py"
    module.write_text(module.read_text().replace('"bfloat16"\n', '"float64"\n'))
    [(shown, _)] = run(installed, ["pytest", "-q", "tests/contract", "-k", "half"])
    assert int(shown.rpartition(" passed")[0].split()[-1]) > 50, shown


@pytest.fixture
def extras(installed, own_registries, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.delitem(sys.modules, "kvengine_extras", raising=False)
    return importlib.import_module("kvengine_extras")


def test_wrong_options_are_refused_before_any_work(extras):
    with pytest.raises(configs.ConfigError, match="store_dtype='flot', but it has to be one of"):
        engine.generate(engine.SHIPPED_MODEL, "x", cache="half", cache_config={"store_dtype": "flot"})
    for wrong in (0, "4"):
        with pytest.raises(configs.ConfigError, match=r"n=.*a whole number, at least 1"):
            engine.generate(engine.SHIPPED_MODEL, "x", strategy="second_best", n=wrong)


def test_its_strategy_recovers_from_out_of_memory(extras, shipped, out_of_memory_at):
    options = {"strategy": "second_best", "n": 2, "max_new_tokens": 6}
    expected = shipped.generate("import os\n", **options)
    assert expected.text != shipped.generate("import os\n", max_new_tokens=6).text
    out_of_memory_at(3, torch.Tensor, "topk")
    found = shipped.generate("import os\n", **options)
    assert found.text == expected.text
    assert found.stats.fallbacks


def test_its_strategy_takes_no_token_that_is_forbidden(extras, shipped):
    out = shipped.generate("x = ", strategy=extras.SecondBest(n=1), max_new_tokens=3, logits_processor=[only(7)])
    assert out.tokens == [[7, 7, 7]]


def only(token):
    return lambda ids, scores: torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


def test_its_cache_is_of_one_model_and_can_be_pickled(extras, shipped):
    out = shipped.generate("import os\n", cache="half", max_new_tokens=4)
    again = pickle.loads(pickle.dumps(out)).cache
    wider = copy.deepcopy(shipped.model).double()
    with pytest.raises(engine.GenerationInterrupted, match=r"float32, then torch\.float64: a cache belongs"):
        engine.generate(wider, out.sequences, cache=again, max_new_tokens=4, trust_cache=True)
