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


def uses_private_parts_of_the_model(node):
    private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    return private and ast.unparse(node.value) == "model"


def imports_codec(node):
    return isinstance(node, (ast.Import, ast.ImportFrom)) and any(
        name.startswith(("hqq", "optimum")) for name in ast.unparse(node).replace(",", " ").split()
    )


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        (names_layer_types, {"caches/spec/layer_spec.py"}),
        (
            calls_the_model,
            {"engine/model/forward.py", "engine/planning/model_footprint.py"},
        ),
        (
            uses_private_parts_of_the_model,
            {
                "engine/model/cache_argument.py",
                "engine/request/encoder.py",
                "engine/request/model_kwargs.py",
                "engine/model/masks.py",
                "engine/request/request.py",
                "engine/request/generation_helpers.py",
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
        "SHIPPED_MODEL", "BackendPlan", "BadLogits", "Cancelled", "ConfigError", "CtrlC", "EngineConfig",
        "EngineError", "Fallback", "Follower", "Generation", "Generator", "InputError", "Interrupted", "OptionError",
        "OutOfMemory", "Piece", "Plan", "Stats", "Stream", "__version__", "export_step", "generate", "plan",
        "step_inputs", "stream",
    },
    caches: {
        "Cache", "CacheConfig", "CacheError", "CapacityError", "Driven", "DynamicCache", "EncoderDecoder",
        "EncoderDecoderCache", "FixedStore", "ForeignCache", "GrowingStore", "HQQQuantizedCache", "HybridCache",
        "HybridChunkedCache", "HybridMambaAttentionDynamicCache", "LayerSpec", "Log", "MambaCache", "NoCache",
        "OffloadedCache", "OffloadedStaticCache", "QuantizedCache", "QuantizedCacheConfig", "QuantoQuantizedCache",
        "Recipe", "SinkCache", "SlidingWindowCache", "StaticCache", "StepError", "Store", "Timeline", "Unknowable",
        "UnknownCache", "UnsupportedLayer", "build", "convert", "driven", "first_layer", "from_legacy_cache",
        "join_rows", "mask_kinds", "move", "names", "read_specs", "recipe", "register", "select_rows", "slide",
    },
    configs: {
        "CODECS", "CacheConfig", "CodecFacts", "Config", "ConfigError", "DynamicCacheConfig",
        "EncoderDecoderCacheConfig", "EngineConfig", "EngineError", "HybridCacheConfig", "MambaCacheConfig",
        "NoCacheConfig", "OffloadedCacheConfig", "OffloadedQuantizedCacheConfig", "OffloadedStaticCacheConfig",
        "PlacedCacheConfig", "QuantizedCacheConfig", "QuantizedSinkCacheConfig", "RUNGS", "SinkCacheConfig",
        "SlidingWindowCacheConfig", "StaticCacheConfig", "checked_rungs", "nearest", "preset", "presets",
        "require_positive",
    },
    strategies: {
        "Assisted", "Beam", "Contrastive", "Crop", "DiverseBeam", "Drafts", "Emit", "Finish", "Flow", "Forward",
        "Greedy", "NoChoice", "Operation", "Process", "PromptLookup", "Rows", "Sampling", "Show", "Strategy", "Task",
        "Text", "Translation", "build", "each", "names", "one_token_per_step", "options", "read_prompt", "register",
    },
}  # fmt: skip


@pytest.mark.parametrize("room", PUBLIC, ids=lambda room: room.__name__)
def test_public_names(room):
    assert set(room.__all__) == PUBLIC[room]
    for name in PUBLIC[room]:
        assert getattr(room, name) is not None


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
