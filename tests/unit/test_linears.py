"""Linear layers through other operators and our own kernel: the same numbers up to rounding."""

import copy
import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from architectures import prompt, tiny_model
from helpers import needs_kernels
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune
from transformers import AutoModelForCausalLM

import engine
from caches.platform.native import DTYPES
from engine.compiling import package_builder
from engine.compiling.layer_step import LayerStep, Place
from engine.kernels import linear_backend, linear_kernels, linear_routes
from engine.kernels.block_codes import eight_bits, fitted, pack
from engine.kernels.linear_backend import RoutedLinear, RoutedLinears, Table, active, changes, table_for
from engine.kernels.linear_kernels import join_products, kernels
from engine.kernels.linear_routes import ALL_TORCH
from engine.kernels.low_bit_linears import ENCODERS

pytestmark = pytest.mark.skipif(not linear_backend.has_onednn(), reason="this torch was built without oneDNN")

ROUTED = engine.EngineConfig(linears="onednn")


def noted(taken):
    """The routes; each appends its name to `taken`."""

    def noting(name, route):
        return lambda *inputs: taken.append(name) or route(*inputs)

    return {name: noting(name, route) for name, route in linear_routes.routes().items()}


def of_float32(names):
    """Names for a `Table`, by shape."""
    return {(torch.float32, shape): by_rows for shape, by_rows in names.items()}


@contextmanager
def routed(model, name):
    """As in a step of ours whose products all have the route of this name; collects which are taken."""
    taken = []
    weights = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    matrices = {(weight.dtype, tuple(weight.shape)) for weight in weights if weight.dtype in DTYPES}
    with in_step(model, Table(dict.fromkeys(matrices, (name,) * 7), noted(taken))):
        yield taken


@contextmanager
def in_step(model, table, rows=None):
    active.routes = RoutedLinears(model, table).of_step(rows)
    enter, leave = changes(active.routes, RoutedLinear)
    try:
        enter()
        with torch.no_grad():
            yield
    finally:
        active.routes = None
        leave()


@pytest.mark.parametrize("name", ["mm", "onednn", "swapped"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 7, 48), (48,), (0, 48)])
def test_equal_to_rounding(bias, shape, name):
    layer, input = nn.Linear(48, 33, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = layer(input)
    with routed(layer, name) as taken:
        torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer(input.expand(2, *shape)[1]), expected, atol=1e-5, rtol=1e-5)
        assert layer(input).is_contiguous()  # models take views of it
    assert taken == [name] * (3 if input.numel() else 0)


@pytest.mark.parametrize(("rows", "shape", "expected"), [
    (1, (512, 256), "torch"), (2, (512, 256), "mm"), (4, (512, 256), "mm"), (5, (512, 256), "onednn"),
    (8, (512, 256), "onednn"), (9, (512, 256), "swapped"), (16, (512, 256), "swapped"), (32, (512, 256), "mm"),
    (33, (512, 256), "onednn"), (64, (512, 256), "onednn"),
    (65, (512, 256), "torch"), (1, (256, 512), "onednn"), (64, (256, 512), "onednn"), (2, (100, 1), "torch"),
])  # fmt: skip
def test_rows_and_shape_choose_the_route(rows, shape, expected):
    names = {
        (512, 256): ("torch", "mm", "onednn", "swapped", "mm", "onednn", "torch"),
        (256, 512): ("onednn",) * 7,
    }
    taken = []
    table, layer = Table(of_float32(names), noted(taken)), nn.Linear(*reversed(shape))
    with in_step(layer, table, rows):
        layer(torch.randn(1, rows, shape[1]))
    assert taken == [name for name in [expected] if name != "torch"]
    assert str(table).startswith("256x512: onednn; 512x256: 1 row torch, 2-4 mm, 5-8 onednn")


@pytest.mark.parametrize(
    ("rows", "shapes"), [(1, []), (4, []), (5, [16]), (64, [16]), (65, [12, 16]), (None, [12, 16])]
)
def test_layers_without_a_route_for_so_few_rows_are_left_alone(rows, shapes):
    names = {(8, 8): ("torch",) * 7, (16, 8): ("torch", "torch", "mm", "torch", "torch", "torch", "torch"),
             (12, 8): (*("torch",) * 6, "mm")}  # fmt: skip
    model = nn.ModuleList([nn.Linear(8, outs) for outs in (8, 12, 16, 20)])
    layers = RoutedLinears(model, Table(of_float32(names), linear_routes.routes())).of_step(rows)
    assert [layer.out_features for layer in layers] == shapes


def test_layers_that_others_replace_are_freed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = RoutedLinears(model, table_for(model, "onednn"))
    assert [*layers.of_step()] == [*model]
    before = weakref.ref(model[0])
    model[0] = nn.Identity()
    gc.collect()
    assert before() is None
    assert [*layers.of_step()] == [model[1]]


def test_a_step_of_one_row_calls_torch_directly_where_that_is_fastest(monkeypatch):
    monkeypatch.setattr(
        linear_backend, "names_for", lambda shapes, dtype: dict.fromkeys(shapes, ("torch", *("mm",) * 6))
    )
    model = copy.deepcopy(tiny_model("llama"))
    generator, seen = engine.Generator(model), []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda layer, given: seen.append((given[0].numel() // given[0].shape[-1], type(layer) is RoutedLinear))
    )
    generator.generate(prompt(rows=1, pads=0), max_new_tokens=3)
    generator.generate(prompt(rows=2), max_new_tokens=2)
    (tokens, looks), *steps, (both, _), last = seen
    assert looks
    assert both == 2 * tokens > 2
    assert steps == [(1, False), (1, False)]
    assert last == (2, True)


def test_what_compiled_code_multiplies_with(monkeypatch):
    names = {(512, 256): ("torch", "mm", "onednn", "swapped", "torch", "onednn", "torch")}
    table = Table(of_float32(names), linear_routes.routes())
    for there, other in ((object(), "kernel"), (None, "torch")):
        monkeypatch.setattr(linear_routes, "kernels", lambda there=there: there)
        text = str(table.for_compiled_code())
        assert (
            text == f"1 row {other}, 2-4 {other}, 5-8 onednn, 9-16 {other}, 17-32 {other}, 33-64 onednn, more {other}"
        )


def test_new_weights_are_seen():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    with routed(layer, "onednn") as taken:
        layer.weight = nn.Parameter(torch.zeros(8, 8))
        layer.bias = nn.Parameter(torch.ones(8))
        assert torch.equal(layer(input), torch.ones(2, 8))
        layer.weight, layer.bias = nn.Parameter(torch.ones(4, 5)), None  # of another shape
        torch.testing.assert_close(layer(input[:, :5]), input[:, :5].sum(dim=1, keepdim=True).expand(2, 4))
    assert len(taken) == 2


def test_which_models_have_routes():
    model = copy.deepcopy(tiny_model("llama"))
    assert str(table_for(model, "onednn")) == (
        "1 row onednn, 2-4 onednn, 5-8 swapped, 9-16 swapped, 17-32 swapped, 33-64 onednn, more onednn"
    )
    assert table_for(model, "default") is None
    assert table_for(model, "auto") is None  # its matrices are small
    assert table_for(model.to(torch.bfloat16), "onednn") is None


def test_the_fastest_is_taken_where_matrices_are_large_enough(monkeypatch):
    def fastest(shapes, dtype):
        asked.append(set(shapes))
        return {(512, 600): names, (700, 512): ALL_TORCH}

    asked, names = [], ("torch", "mm", "onednn", "swapped", "onednn", "mm", "torch")
    monkeypatch.setattr(linear_backend, "names_for", fastest)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(600, 512), nn.Linear(512, 700), nn.Linear(600, 512))
    table = table_for(model, "auto")
    assert asked == [{(8, 8), (512, 600), (700, 512)}]
    assert [(*matrix, routes.by_rows) for matrix, routes in table.routes.items()] == [
        (torch.float32, (512, 600), [linear_routes.routes().get(name) for name in names])
    ]
    assert str(table) == linear_backend._in_short(names)
    monkeypatch.setattr(linear_backend, "names_for", lambda shapes, dtype: dict.fromkeys(shapes, ALL_TORCH))
    assert table_for(model, "auto") is None


def test_a_bias_that_is_computed_is_left_alone():
    layer, input = nn.Linear(8, 8), torch.randn(2, 8)
    prune.identity(layer, "bias")
    plain = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        expected = layer(input)
    with routed(nn.ModuleList([layer, plain]), "onednn") as taken:
        assert torch.equal(layer(input), expected)
        assert not taken
        assert torch.isfinite(plain(input)).all()
        assert taken


def test_what_another_library_has_put_there_computes(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    generator, called, forward = engine.Generator(model, config=ROUTED), [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: called.append(type(self)) or forward(self, input))
    out = generator.generate(prompt(), max_new_tokens=3)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert called == [nn.Linear] * 3 * layers
    monkeypatch.undo()
    assert out.tokens == generator.generate(prompt(), max_new_tokens=3).tokens


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Quantized(torch.Tensor):
    """Says that it is float32, as those of quantization libraries do."""


def with_quantized_weight():
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantized))
    return layer


def with_computed_weight():
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return layer


@pytest.mark.parametrize(
    "make", [with_quantized_weight, with_computed_weight, lambda: prune.identity(nn.Linear(8, 8), "weight"),
             lambda: nn.Linear(8, 8).double(), lambda: Scaled(8, 8)]
)  # fmt: skip
def test_layers_that_are_not_plain_are_left_alone(make):
    layer, plain = make(), nn.Linear(8, 8)
    input = torch.randn(2, 8, dtype=next(layer.parameters()).dtype)
    with torch.no_grad():
        expected = layer(input)
    with routed(nn.ModuleList([layer, plain]), "onednn") as taken:
        assert torch.equal(layer(input), expected)
        assert not taken
        plain(torch.randn(2, 8))
        assert taken


@pytest.mark.parametrize("change", [with_quantized_weight, with_computed_weight])
def test_layers_that_are_changed_in_a_step_are_left_alone(change):
    """By a hook. A layer of another class by the end of the step keeps it."""
    layer, other = nn.Linear(8, 8), change()
    with routed(layer, "onednn") as taken:
        if type(other) is nn.Linear:
            layer.weight = other.weight
        else:
            parametrize.register_parametrization(layer, "weight", nn.Tanh())
        layer(torch.randn(2, 8))
        assert not taken
    assert layer(torch.randn(2, 8)).shape == (2, 8)


def test_other_types_and_derivatives_take_torchs_own():
    layer, rows = nn.Linear(8, 8), torch.randn(2, 8)
    with routed(layer, "onednn") as taken:
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
    assert active.routes is None
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_that_was_moved_is_left_alone(dtype, monkeypatch):
    """oneDNN does not multiply all data types."""
    taken, model = [], copy.deepcopy(tiny_model("llama"))
    monkeypatch.setattr(linear_backend, "routes", lambda: noted(taken))
    generator = engine.Generator(model, config=engine.EngineConfig(linears="onednn"))
    generator.generate(prompt(), max_new_tokens=2)
    assert taken
    taken.clear()
    model.to(dtype)
    expected = model.generate(**prompt(), max_new_tokens=5, do_sample=False)
    assert torch.equal(generator.generate(prompt(), max_new_tokens=5).sequences, expected)
    assert taken == []


def test_each_data_type_has_routes_of_its_own(monkeypatch):
    def names_for(shapes, dtype):
        return dict.fromkeys(shapes, ("mm" if dtype is torch.float32 else "onednn",) * 7)

    monkeypatch.setattr(linear_backend, "names_for", names_for)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
    table, taken = table_for(model, "auto"), []
    assert {dtype: routes.dtype for dtype, _ in table.routes for routes in [table.routes[dtype, (8, 8)]]} == {
        torch.float32: torch.float32, torch.bfloat16: torch.bfloat16
    }  # fmt: skip
    with in_step(model, Table(table._names, noted(taken))):
        for layer in model:
            layer(torch.randn(2, 8, dtype=layer.weight.dtype))
    assert taken == ["mm", "mm", "onednn"]
    assert repr(table) != repr(Table(dict.fromkeys(table.routes, ("mm",) * 7), {}))
    assert {dtype for dtype, _ in table_for(model, "onednn").routes} == {torch.float32}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_biases_that_the_kernel_does_not_read(dtype):
    """torch computes with one that is strided, or has one element for all outputs."""
    layer, input = nn.Linear(8, 6, dtype=dtype), torch.randn(2, 8, dtype=dtype)
    strided = torch.randn(6, 2, dtype=dtype)[:, 0]
    for bias in (strided, torch.randn(1, dtype=dtype).expand(6), torch.randn(1, dtype=dtype)):
        layer.bias = nn.Parameter(bias)
        with routed(layer, "kernel") as taken:
            torch.testing.assert_close(layer(input), nn.functional.linear(input, layer.weight, bias))
        assert taken == ["kernel"]


@needs_kernels
@pytest.mark.parametrize(("outs", "width"), [(1, 1), (5, 3), (33, 47), (64, 768), (4, 16)])
@pytest.mark.parametrize("rows", [*range(1, 18), 21, 24, 28, 32, 33, 34, 35, 40, 48, 56, 64, 65, 100, 513])
def test_the_kernel(rows, outs, width):
    layer, input = nn.Linear(width, outs), torch.randn(1, rows, width)
    with torch.no_grad():
        expected = layer(input)
        with routed(layer, "kernel") as taken:
            torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer(input[0, 0]), expected[0, 0], atol=1e-5, rtol=1e-5)
            strided = torch.randn(width, 2).T
            torch.testing.assert_close(layer(strided), layer(strided.contiguous()), atol=1e-5, rtol=1e-5)
            layer.weight.data = layer.weight.data.T.contiguous().T
            torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
            layer.weight.data = torch.cat([layer.weight.data, torch.ones(outs, 3)], dim=1)[:, :width]
            torch.testing.assert_close(layer(input), expected, atol=1e-5, rtol=1e-5)
            input[..., 0] = float("nan")
            assert layer(input).isnan().all()
    assert taken == ["kernel"] * 7


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 40, 70, 600])
def test_products_are_those_of_double_precision_rounded_once(rows, dtype):
    for outs, width in ((101, 264), (33, 13), (256, 576), (8, 40), (1, 1)):
        input, weight, bias = torch.randn(rows, width), torch.randn(outs, width), torch.randn(outs)
        input, weight, bias = (tensor.to(dtype) for tensor in (input, weight, bias))
        for biases in ([bias], []):
            exact = input.double() @ weight.double().T + (bias.double() if biases else 0)
            out = kernels().linears(input, [weight], biases)
            assert out.dtype == dtype
            rounding = (exact.to(dtype).double() - exact).abs().max()
            assert (out.double() - exact).abs().max() <= 1.02 * rounding + 1e-5 * exact.abs().max()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_is_no_number_stays_so_in_sixteen_bits(rows, dtype):
    """In vectors, and in the few elements behind them. Each product has one addend."""
    values = [float("nan"), float("inf"), -float("inf"), 3e38, 1e-40, 6e-8, -0.0, 65519.0, 65520.0]
    width, places = 73, range(0, 73, 8)
    weight, input = torch.zeros(len(values), width), torch.zeros(rows, width)
    for out, (value, place) in enumerate(zip(values, [*places][-len(values) :], strict=True)):
        weight[out, place] = value
        input[:, place] = 1
    weight, input = weight.to(dtype), input.to(dtype)
    out = kernels().linears(input, [weight], [])
    expected = (input.double() @ weight.double().T).to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


@needs_kernels
def test_products_of_several_data_types_are_refused():
    row, weight = torch.randn(1, 8), torch.randn(8, 8)
    for input, of_weight, biases in (
        (row, weight.half(), []), (row.half(), weight, []), (row, weight, [weight[0].half()]),
        (row.double(), weight.double(), []), (row, weight, [weight[0, :7]]), (row, weight[..., None], []),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"data type|inputs are float32|a bias has to be|8 wide"):
            kernels().linears(input, [of_weight], biases)
    blocks = [[tensor] for tensor in eight_bits(torch.randn(16, 32))]
    with pytest.raises(RuntimeError, match="inputs of products with codes are float32"):
        kernels().block_linears(torch.randn(2, 32).bfloat16(), *blocks)


@needs_kernels
@pytest.mark.parametrize("width", [32, 264, 13])
@pytest.mark.parametrize("rows", [1, 2, 9, 10, 11, 15])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("has_least", [True, False])
def test_rounded_inputs(rows, width, bits, has_least):
    if not linear_kernels.has_integer_products():
        pytest.skip("this processor has no AVX-512 VNNI")
    torch.manual_seed(0)
    groups = -(-width // 32)
    codes = torch.randint(0, 2**bits, (48, groups, 32), dtype=torch.uint8)
    blocks = pack(codes, torch.randn(48, groups, 1 + has_least).half(), bits)
    input = torch.randn(rows, width) * 10.0 ** torch.randint(-3, 3, (rows, 1))
    input[0, :5] = 0
    parts = nn.functional.pad(input, (0, 32 * groups - width)).unflatten(1, (-1, 32)).double()
    scales = parts.abs().amax(dim=2, keepdim=True) / 127
    rounded = (parts / scales.clamp_min(1e-30)).round() * scales
    weights = blocks.weights().double().unflatten(1, (-1, 32))
    # The middle code of a group, which stands for its least value too, has the inputs as they are.
    middle = blocks.scales.permute(0, 3, 1, 2).flatten(0, 1).double()
    middle = middle[..., :1] * 2 ** (bits - 1) + middle[..., 1:] if has_least else torch.zeros(48, groups, 1).double()
    expected = torch.einsum("rgi,ogi->ro", rounded, weights - middle) + torch.einsum(
        "rgi,og->ro", parts, middle[..., 0]
    )
    out = kernels().rounded_block_linears(input, *([tensor] for tensor in blocks))
    torch.testing.assert_close(out.double() / scales.amax(), expected / scales.amax(), atol=2e-2, rtol=1e-4)
    exact = kernels().block_linears(input, *([tensor] for tensor in blocks))
    assert 1e-4 < (out - exact).norm() / exact.norm() < 2e-2


@needs_kernels
@pytest.mark.parametrize("rows", [2, 3, 5, 7, 9, 13, 18, 23, 31])
@pytest.mark.parametrize("width", [264, 13])
def test_equal_rows_have_equal_products(rows, width):
    input, weight = torch.randn(1, width).expand(rows, -1).contiguous(), torch.randn(101, width)
    outs = [kernels().linears(input, [weight], [])]
    for encode in ENCODERS.values():
        blocks = [[tensor] for tensor in encode(weight)]
        outs.append(kernels().block_linears(input, *blocks))
        few = kernels().block_linears(input[:15], *blocks)  # matrix units multiply more, and round otherwise
        assert torch.equal(few[:1], kernels().block_linears(input[:1], *blocks))
    for out in outs:
        assert torch.equal(out, out[:1].expand(rows, -1))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17])
def test_several_products_of_one_input(rows):
    """Their outputs stand side by side; each is the product alone."""
    input = torch.randn(rows, 128)
    weights = [torch.randn(outs, 128) for outs in (33, 8, 64, 1)]
    cases = [(kernels().linears, [weights, [weight[:, 0].contiguous() for weight in weights]])]
    for encode in ENCODERS.values():
        cases.append((kernels().block_linears, [list(tensors) for tensors in zip(*map(encode, weights), strict=True)]))
    several = [fitted(weights[0], 4), fitted(weights[1], 6), eight_bits(weights[2]), fitted(weights[3], 5)]
    cases.append((kernels().block_linears, [list(tensors) for tensors in zip(*several, strict=True)]))
    for product, lists in cases:
        each = [product(input, *([tensor] for tensor in tensors)) for tensors in zip(*lists, strict=True)]
        assert torch.equal(product(input, *lists), torch.cat(each, dim=1))


@needs_kernels
@pytest.mark.parametrize(("biases", "joined"), [("", [3, 1, 2, 1]), ("qkv", [3, 1, 2, 1]), ("qv", [2, 1, 1, 2, 1])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_layers_have_one_product_for_each_input(biases, joined, dtype):
    """Query, key and value together, gate and up together: four products in place of seven. Products with a bias are
    not joined with others."""

    def layer(input, weights, bias):
        query, key, value, out, gate, up, down = weights

        def product(rows, weight, name="none"):
            return kernels().linears(rows.reshape(-1, 8), [weight], [bias] if name in biases else [])

        found = product(product(input, query, "q") + product(input, key, "k") * product(input, value, "v"), out)
        return product(product(found, gate) * product(found, up), down)

    weights = [torch.randn(8, 8).to(dtype) for _ in range(7)]
    arguments = torch.randn(2, 1, 8).to(dtype), weights, torch.randn(8).to(dtype)
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map(mode.from_tensor, arguments)
        traced = make_fx(layer)(*fake)
    join_products(traced.graph)
    traced.recompile()
    products = [node for node in traced.graph.nodes if "linears" in str(node.target)]
    assert sorted(len(node.args[1]) for node in products) == sorted(joined)
    torch.testing.assert_close(traced(*arguments), layer(*arguments))


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_generation_through_the_kernel(options, monkeypatch):
    model, inputs = tiny_model("llama"), prompt(rows=1, pads=0)
    monkeypatch.setattr(linear_backend, "names_for", lambda shapes, dtype: dict.fromkeys(shapes, ("kernel",) * 7))
    generator = engine.Generator(model)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    out = generator.generate(inputs, max_new_tokens=20, **options)
    assert torch.equal(out.sequences, expected)
    assert out.stats.linears == "kernel"


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_there_is_no_route():
    assert linear_kernels.kernels() is None
    assert "kernel" not in linear_routes.routes()
    [routes] = Table(of_float32({(8, 8): ("kernel",) * 7}), linear_routes.routes()).routes.values()
    assert routes.by_rows == [None] * 7


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_code_that_is_compiled_has_the_routes(dtype, monkeypatch, tmp_path):
    """Of products of their data type; the layers are torch's own again after it is traced."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
            self.third, self.last = nn.Linear(4, 8), nn.Linear(8, 8).double()

        def forward(self, input, cache):
            return self.last(self.third(self.second(self.first(input))).to(self.last.weight.dtype))

    programs = []
    monkeypatch.setattr(package_builder, "compile_package", lambda program, *others: programs.append(program))
    monkeypatch.setattr(package_builder.os, "replace", lambda source, target: None)
    layers = Layers().eval().requires_grad_(False)
    layers.first, layers.second, layers.third = (of.to(dtype) for of in (layers.first, layers.second, layers.third))
    step = LayerStep(layers, ((torch.randn(2, 1, 8, dtype=dtype), Place.CACHE), {}))
    names = {(dtype, (8, 8)): ("kernel",) * 7, (dtype, (4, 8)): ("onednn",) * 7}
    table = Table(names, linear_routes.routes())
    package_builder._build(step, table, tmp_path / "layer.pt2")
    calls = [str(node.target) for node in programs[0].graph.nodes if node.op == "call_function"]
    products = [name for name in calls if "linear" in name]
    assert products == ["kvengine.linears.default", "mkldnn._linear_pointwise.default", *["aten.linear.default"] * 2]
    assert [type(layer) for layer in layers.children()] == [nn.Linear] * 4


def test_modules_that_the_caller_has_compiled_as_one_graph_go_on():
    model = AutoModelForCausalLM.from_pretrained(engine.SHIPPED_MODEL)
    ids = torch.arange(5, 13)[None]
    expected = engine.generate(model, ids, max_new_tokens=8)
    assert expected.stats.linears != "torch"
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    assert engine.generate(model, ids, max_new_tokens=8).tokens == expected.tokens
