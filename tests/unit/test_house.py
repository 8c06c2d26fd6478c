"""The house rules: who may import whom, what is public, who may call what."""

import ast

import pytest
from places import ROOMS, ROOT

import caches
import configs
import engine
import strategies

MAY_IMPORT = {
    "configs": set(),
    "caches": {"configs"},
    "strategies": {"configs"},
    "engine": {"configs", "caches", "strategies"},
}


def imports(path):
    """Top-level names imported anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "").split(".")[0]


def wrong_arrows(room, path):
    return (set(imports(path)) & set(ROOMS)) - MAY_IMPORT[room] - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        assert not wrong_arrows(room, path), f"{path.name} imports {wrong_arrows(room, path)}"


def test_a_wrong_arrow_would_be_seen(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from engine.errors import EngineError\n    import strategies.flow\n")
    assert wrong_arrows("caches", bad) == {"engine", "strategies"}


def test_configurations_know_neither_torch_nor_models():
    for path in (ROOT / "configs").rglob("*.py"):
        assert not set(imports(path)) & {"torch", "transformers", "numpy"}


def files_with(wanted):
    """Files of the four rooms in which a node of the syntax tree is wanted."""
    found = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if any(wanted(node) for node in ast.walk(ast.parse(path.read_text()))):
                found.add(str(path.relative_to(ROOT)))
    return found


def names_layer_types(node):
    return (isinstance(node, ast.Attribute) and node.attr == "layer_types") or (
        isinstance(node, ast.Constant) and node.value == "layer_types"
    )


def calls_the_model(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("model", "self.model", "self._model")


def imports_codec(node):
    return isinstance(node, (ast.Import, ast.ImportFrom)) and any(
        name.startswith(("hqq", "optimum")) for name in ast.unparse(node).replace(",", " ").split()
    )


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        (names_layer_types, {"caches/layers/layer_spec.py"}),
        (
            calls_the_model,
            {
                "engine/compiling/full_step.py",
                "engine/export.py",
                "engine/compiling/layer_compiler.py",
                "engine/model/model_runner.py",
                "engine/memory/model_footprint.py",
            },
        ),
        (imports_codec, {"caches/quantization/codec.py"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_file_knows(wanted, where):
    assert files_with(wanted) == where


def test_test_modules_import_no_other():
    """What several use stands in tests/support."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith("test_")], path


def test_strategies_know_no_models():
    for path in (ROOT / "strategies").rglob("*.py"):
        assert "transformers" not in set(imports(path))


PUBLIC = {
    engine: {
        "__version__", "AsyncStream", "BackendPlan", "Batch", "BatchRequest", "Chat", "ConfigError", "EngineConfig",
        "EngineError", "export_step", "Fallback", "generate", "generate_many", "Generation", "GenerationCancelled",
        "GenerationInterrupted", "Generator", "InputError", "InvalidLogitsError", "OptionError", "OutOfMemoryError",
        "Plan", "plan", "Prefix", "SHIPPED_MODEL", "StatefulLogitsProcessor", "Stats", "step_inputs", "Stream",
        "stream", "StreamChunk", "TextScore", "TokenLogprob", "UserInterrupt",
    },
    caches: {
        "build", "Cache", "CacheConfig", "CacheError", "CacheFile", "CacheFileError",
        "CapacityError", "convert", "driven", "DynamicCache",
        "EncoderDecoder", "EncoderDecoderCache", "EngineCache", "first_layer", "FixedStore", "from_legacy_cache",
        "GrowingStore", "HFCacheAdapter", "HQQQuantizedCache", "HybridCache", "HybridChunkedCache",
        "HybridMambaAttentionDynamicCache", "join_rows", "LayerSpec", "MambaCache", "mask_kinds", "migrate", "names",
        "NoCache", "OffloadedCache", "OffloadedStaticCache", "QuantizedCache", "QuantizedCacheConfig",
        "QuantoQuantizedCache", "read_specs", "recipe", "Recipe", "register", "register_codec", "select_rows",
        "apply_window", "branch", "inspect", "load", "SinkCache",
        "SlidingWindowCache", "StaticCache", "StepError", "Store", "Timeline", "TokenLog", "UnknownCacheError",
        "UnknownContentError", "UnsupportedLayerError",
    },
    configs: {
        "CacheConfig", "checked_fallbacks", "CodecFacts", "CODECS", "Config", "ConfigError", "DynamicCacheConfig",
        "EncoderDecoderCacheConfig", "EngineConfig", "EngineError", "FALLBACKS", "HybridCacheConfig",
        "MambaCacheConfig", "nearest", "NoCacheConfig", "OffloadedCacheConfig", "OffloadedQuantizedCacheConfig",
        "OffloadedStaticCacheConfig", "PlacedCacheConfig", "preset", "presets", "QuantizedCacheConfig",
        "QuantizedSinkCacheConfig", "require_positive", "SinkCacheConfig", "SlidingWindowCacheConfig",
        "StaticCacheConfig",
    },
    strategies: {
        "Assisted", "Beam", "build", "Contrastive", "Crop", "DiverseBeam", "Emit", "Finish", "Flow", "Forward",
        "Greedy", "names", "Needs", "NoCandidateError", "one_token_per_step", "Operation", "options", "Process",
        "PromptLookup", "read_prompt", "register", "repeat_rows_index", "Report", "Rows", "Sampling",
        "SpeculationStats", "Strategy", "Task", "Hypothesis", "Translation",
    },
}  # fmt: skip


@pytest.mark.parametrize("room", PUBLIC, ids=lambda room: room.__name__)
def test_public_names(room):
    assert set(room.__all__) == PUBLIC[room]
    for name in PUBLIC[room]:
        assert getattr(room, name) is not None


def test_a_name_that_is_imported_on_first_use_has_to_be_one():
    with pytest.raises(AttributeError, match="module 'engine' has no attribute 'nonsense'"):
        engine.nonsense  # noqa: B018


def test_every_error_has_its_root():
    roots = (engine.EngineError, caches.CacheError)
    for room in (engine, caches, configs):
        for name in room.__all__:
            thing = getattr(room, name)
            if isinstance(thing, type) and issubclass(thing, Exception):
                assert issubclass(thing, roots)


def test_registered_twice_is_an_error():
    with pytest.raises(ValueError, match="'dynamic' is registered already"):
        caches.register(configs.DynamicCacheConfig)(lambda specs, options: None)
    with pytest.raises(ValueError, match="'greedy' is registered already"):
        strategies.register(type("Other", (strategies.Greedy,), {}))


# Words that say nothing of what a variable holds.
VAGUE = """
found one own given known kept said other others part parts wanted made what why how place places kind kinds before
after first last left rest new old same each more most least taken read both again which
"""


def names_in(tree):
    nodes = ast.walk(tree)
    return [
        node.id if isinstance(node, ast.Name) else node.arg for node in nodes if isinstance(node, (ast.Name, ast.arg))
    ]


def test_variables_say_what_they_hold():
    names = [
        name for room in ROOMS for path in (ROOT / room).rglob("*.py") for name in names_in(ast.parse(path.read_text()))
    ]
    vague_words = set(VAGUE.split())
    vague = [name for name in names if name in vague_words]
    assert len(names) > 50_000
    assert len(vague) <= 0.005 * len(names)  # those that are public, or an attribute of a public class


def test_a_class_name_means_one_thing():
    homes = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}
