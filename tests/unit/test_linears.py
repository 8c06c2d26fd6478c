"""Linear layers through other operators and our own kernel: the same numbers up to rounding."""

import copy
import json
import pickle
from contextlib import contextmanager

import pytest
import torch
from architectures import prompt, tiny_model
from helpers import needs_kernels
from torch import nn
from torch.nn.utils import parametrize, prune

import configs
import engine
from caches.quantization import kernel_build
from engine.model import linear_backend, linear_products, linear_timings
from engine.model.linear_backend import SIZES, Table, active, table_for

pytestmark = pytest.mark.skipif(not linear_backend.has_onednn(), reason="this torch was built without oneDNN")


@contextmanager
def routed(table):
    """As in a step of ours; collects which routes are taken."""
    taken = []

    class Noting(Table):
        def __init__(self):
            pass

        def route(self, numbers, rows):
            found = table.route(numbers, rows)
            taken.append(found)
            return found

    active.table = Noting()
    try:
        with torch.no_grad():
            yield taken
    finally:
        active.table = None


def table_of(name):
    table_for(nn.Linear(8, 8), "onednn")  # which makes linear layers ask
    return Table(dict.fromkeys(SIZES, (name,) * 5), linear_products.routes())


@pytest.mark.parametrize("name", linear_products.routes())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 7, 48), (48,), (0, 48)])
def test_equal_to_rounding(bias, shape, name):
    layer, input = nn.Linear(48, 33, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = layer(input)
    with routed(table_of(name)) as taken:
        torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer(input.expand(2, *shape)[1]), expected, atol=1e-5, rtol=1e-5)
        assert layer(input).is_contiguous()  # models take views of it
    assert taken == [linear_products.routes()[name]] * (3 if input.numel() else 0)


@pytest.mark.parametrize(("rows", "size", "expected"), [
    (2, 2**17 - 1, "torch"), (1, 2**17, "torch"), (2, 2**17, "mm"), (3, 2**22 - 1, "mm"), (4, 2**21, "onednn"),
    (32, 2**18, "swapped"), (33, 2**18, "onednn"), (1, 2**22, "onednn"), (2, 100, "torch"),
])  # fmt: skip
def test_rows_and_size_choose_the_route(rows, size, expected):
    names = {
        "small": ("torch",) * 5,
        "medium": ("torch", "mm", "onednn", "swapped", "onednn"),
        "large": ("onednn",) * 5,
    }
    table = Table(names, linear_products.routes())
    assert table.route(size, rows) is linear_products.routes().get(expected)
    assert str(table).startswith("small: torch; medium: 1 row torch, 2-3 mm, 4-8 onednn")


def test_new_weights_are_seen():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    table = table_for(layer, "onednn")
    layer.weight = nn.Parameter(torch.zeros(8, 8))
    layer.bias = nn.Parameter(torch.ones(8))
    with routed(table):
        assert torch.equal(layer(input), torch.ones(2, 8))


def test_which_models_have_routes():
    model = copy.deepcopy(tiny_model("llama"))
    assert str(table_for(model, "onednn")) == "1 row onednn, 2-3 onednn, 4-8 swapped, 9-32 swapped, more onednn"
    assert table_for(model, "default") is None
    assert table_for(model, "auto") is None  # its matrices are small
    assert table_for(model.to(torch.bfloat16), "onednn") is None


def test_the_fastest_is_taken_where_matrices_are_large_enough(monkeypatch):
    asked = []
    names = ("torch", "mm", "onednn", "swapped", "onednn")
    monkeypatch.setattr(linear_timings, "fastest", lambda size: asked.append(size) or names)
    layer = nn.Linear(512, 512)
    table = table_for(layer, "auto")
    assert asked == ["medium"]
    assert str(table) == f"small: torch; medium: {linear_backend._in_short(names)}; large: torch"
    monkeypatch.setattr(linear_timings, "fastest", lambda size: ("torch",) * 5)
    assert table_for(layer, "auto") is None


def test_a_bias_that_is_computed_is_left_alone():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    with torch.no_grad():
        expected = layer(input)
    with routed(table_of("onednn")) as taken:
        assert torch.equal(layer(input), expected)
        assert not taken
        assert torch.isfinite(nn.Linear(8, 8, bias=False)(input)).all()
        assert taken


def test_what_another_library_has_put_there_is_called(monkeypatch):
    called, layer, input = [], nn.Linear(8, 8), torch.randn(2, 8)
    table_of("onednn")
    before = nn.Linear.forward

    def theirs(self, input):
        called.append(self)
        return before(self, input)

    monkeypatch.setattr(nn.Linear, "forward", theirs)
    with routed(table_of("torch")) as taken:
        expected = layer(input)
    assert called == [layer]
    assert taken == [None, None]  # asked by ours over theirs, and by ours below
    called.clear()
    with routed(table_of("onednn")) as taken:
        torch.testing.assert_close(layer(input), expected)
    assert len(taken) == 1
    assert not called
    ours = nn.Linear.forward
    table_of("onednn")
    assert nn.Linear.forward is ours


def test_methods_can_be_pickled():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    table_of("onednn")
    assert pickle.loads(pickle.dumps(nn.Linear.forward)) is nn.Linear.forward
    assert torch.equal(pickle.loads(pickle.dumps(layer.forward))(input), layer(input))


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Quantized(torch.Tensor):
    """Says that it is float32, as those of quantization libraries do."""


def with_quantized_weight():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    return layer


@pytest.mark.parametrize(
    "make", [with_quantized_weight, lambda: prune.identity(nn.Linear(8, 8), "weight"), lambda: nn.Linear(8, 8).double()]
)
def test_layers_that_are_not_plain_are_left_alone(make):
    layer = make()
    with routed(table_of("onednn")) as taken:
        layer(torch.randn(2, 8, dtype=next(layer.parameters()).dtype))
        assert not taken
        nn.Linear(8, 8)(torch.randn(2, 8))
        assert taken


def test_a_layer_that_does_more_does_it():
    layer, input = Scaled(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        expected = layer(input)
    with routed(table_of("onednn")):
        torch.testing.assert_close(layer(input), expected)


def test_other_types_and_derivatives_take_torchs_own():
    layer, rows = nn.Linear(8, 8), torch.randn(2, 8)
    with routed(table_of("onednn")) as taken:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(rows).dtype == torch.bfloat16
        with torch.enable_grad():
            assert layer(rows).requires_grad
        with pytest.raises(RuntimeError, match="dtype"):
            layer(rows.double())
    assert not taken


@pytest.mark.parametrize("linears", ["onednn", "auto", "default"])
def test_a_model_under_autocast_generates(linears):
    model, inputs = tiny_model("llama"), prompt()
    generator = engine.Generator(model, config=engine.EngineConfig(linears=linears, on_oom=[]))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        out = generator.generate(inputs, max_new_tokens=5)
    assert torch.equal(out.sequences, expected)
    assert not out.stats.fallbacks


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation(name):
    model, inputs = tiny_model(name), prompt()
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    for choice, told in (("default", "torch"), ("onednn", str(table_for(model, "onednn")))):
        generator = engine.Generator(model, config=engine.EngineConfig(linears=choice))
        out = generator.generate(inputs, max_new_tokens=20)
        assert torch.equal(out.sequences, expected)
        assert out.stats.linears == told


def test_a_failing_forward_ends_the_routes(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: 1 / 0)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    with pytest.raises(engine.GenerationInterrupted, match="ZeroDivisionError"):
        generator.generate(prompt(), max_new_tokens=5)
    assert active.table is None


def test_a_model_that_was_moved_is_left_alone():
    model = copy.deepcopy(tiny_model("llama"))
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    model.to(torch.bfloat16)
    expected = model.generate(**prompt(), max_new_tokens=5, do_sample=False)
    assert torch.equal(generator.generate(prompt(), max_new_tokens=5).sequences, expected)


@needs_kernels
@pytest.mark.parametrize(("outs", "width"), [(1, 1), (5, 3), (33, 47), (64, 768), (4, 16)])
def test_one_row_through_our_own_kernel(outs, width):
    layer, row = nn.Linear(width, outs), torch.randn(1, 1, width)
    with torch.no_grad():
        expected = layer(row)
        with routed(table_for(layer, "gemv")):
            torch.testing.assert_close(layer(row), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer(row.view(-1)), expected.view(-1), atol=1e-5, rtol=1e-5)
            strided = torch.randn(width, 2)[:, 0]
            torch.testing.assert_close(layer(strided), layer(strided[None].expand(2, -1))[0], atol=1e-5, rtol=1e-5)
            layer.weight.data = layer.weight.data.T.contiguous().T
            torch.testing.assert_close(layer(row), expected, atol=1e-5, rtol=1e-5)
            row[..., 0] = float("nan")
            assert layer(row).isnan().all()


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generation_through_our_own_kernel(options):
    model, inputs = tiny_model("llama"), prompt(rows=1, pads=0)
    generator = engine.Generator(model, config=engine.EngineConfig(linears="gemv"))
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(generator.generate(inputs, max_new_tokens=20, **options).sequences, expected)


def test_a_compiler_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path))
    kernel_build.compiled.cache_clear()
    try:
        with pytest.raises(configs.ConfigError, match=r"linears='gemv' needs a C\+\+ compiler.*no-such-compiler"):
            engine.Generator(tiny_model("llama"), config=engine.EngineConfig(linears="gemv"))
    finally:
        kernel_build.compiled.cache_clear()


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVENGINE_CACHE", str(tmp_path / "of" / "a_user"))
    monkeypatch.setattr(linear_timings, "_known", {})
    return tmp_path / "of" / "a_user"


NAMES = ("torch", "mm", "mm", "torch", "torch")


def test_a_measurement_is_made_once_per_machine(cache_folder, monkeypatch):
    measured = []
    monkeypatch.setattr(linear_timings, "_measure", lambda size: measured.append(size) or NAMES)
    for _ in range(2):
        assert linear_timings.fastest("medium") == linear_timings.fastest("large") == NAMES
    assert measured == ["medium", "large"]
    (file,) = cache_folder.iterdir()
    assert json.loads(file.read_text()) == {"medium": list(NAMES), "large": list(NAMES)}
    linear_timings._known.clear()  # as in another process
    assert linear_timings.fastest("large") == NAMES
    assert measured == ["medium", "large"]
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        linear_timings.fastest("large")
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert measured == ["medium", "large", "large"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"medium": ["torch"]}',
        '{"medium": [1, 2, 3, 4, 5]}',
        '{"medium": 5}',
        '{"medium": [[], {}, 3, 4, 5]}',
    ],
)
def test_a_file_that_says_nothing_is_written_anew(content, cache_folder, monkeypatch):
    monkeypatch.setattr(linear_timings, "_measure", lambda size: NAMES)
    cache_folder.mkdir(parents=True)
    linear_timings.path().write_text(content)
    assert linear_timings.fastest("medium") == NAMES
    assert json.loads(linear_timings.path().read_text()) == {"medium": list(NAMES)}


def test_a_folder_that_cannot_be_written(cache_folder, monkeypatch):
    measured = []
    monkeypatch.setattr(linear_timings, "_measure", lambda size: measured.append(size) or NAMES)
    cache_folder.parent.write_text("a file where the folder should be")
    assert linear_timings.fastest("medium") == linear_timings.fastest("medium") == NAMES
    assert measured == ["medium"]


@pytest.mark.parametrize(("gain", "expected"), [(1.05, "torch"), (1.3, "mm")])
def test_torchs_own_has_a_margin(gain, expected, monkeypatch):
    monkeypatch.setattr(
        linear_timings, "times", lambda one, other: gain if other.args[0] is linear_products.mm else 0.9
    )
    assert linear_timings._fastest_of(list, torch.ones(1, 8)) == expected


def test_the_measurement_says_something(monkeypatch):
    monkeypatch.setattr(linear_timings, "_SHAPES", {"medium": (64, 32, 2)})
    monkeypatch.setattr(linear_timings, "_POOL", 2**14)
    assert set(linear_timings._measure("medium")) <= {"torch", *linear_products.routes()}
    assert linear_timings.times(lambda: 3.0, lambda: 1.0) == 3.0


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(linear_timings, "_SHAPES", {"medium": (64, 32, 2)})
    monkeypatch.setattr(linear_timings, "_POOL", 2**14)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_measures_what_is_routed_whatever_the_defaults_are(dtype, monkeypatch):
    given, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda one, other: given.append((one, other, mm(one, other))) or given[-1][2])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            linear_timings._measure("medium")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(tensor.dtype, tensor.device.type) for product in given for tensor in product} == {(torch.float32, "cpu")}


@pytest.mark.usefixtures("_small")
def test_without_memory_to_measure_in_torchs_own_is_taken_for_now(cache_folder, monkeypatch):
    def none(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as full:
        full.setattr(torch, "full", none)
        assert linear_timings.fastest("medium") == ("torch",) * 5
    assert not cache_folder.exists()
    monkeypatch.setattr(linear_timings, "_fastest_of", lambda matrices, input: "mm")
    assert linear_timings.fastest("medium") == ("mm",) * 5
