"""Private names of torch, transformers and accelerate: which files may use them, and whether the installed releases
have them."""

import ast
import copy
import inspect
import re
import shutil
import tempfile
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from architectures import tiny_model
from encoder_decoders import tiny_encoder_decoder
from gguf_files import write_gguf
from places import ROOMS, ROOT
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GenerationConfig, PrefixConstrainedLogitsProcessor, StoppingCriteriaList

from caches.platform import torch_api, transformers_api

MODULES = {"caches/platform/torch_api.py": torch_api, "caches/platform/transformers_api.py": transformers_api}
OF_PYTHON = {"sys._getframe"}
NO_NAMES = {"endswith", "startswith", "removesuffix", "removeprefix"}  # methods whose arguments are parts of names
FOREIGN = (torch, torch.Tensor, nn.Module, transformers.PreTrainedModel, transformers.PreTrainedConfig,
           GenerationConfig, transformers.PreTrainedTokenizerFast, transformers.DynamicCache,
           PrefixConstrainedLogitsProcessor)  # fmt: skip


def sources():
    return {str(file.relative_to(ROOT)): file.read_text() for room in ROOMS for file in (ROOT / room).rglob("*.py")}


def is_private(name):
    return any(re.fullmatch(r"_[A-Za-z0-9_]*[A-Za-z0-9]|__\w*[a-z0-9]_?", part) for part in name.split("."))


def defined_in(text):
    """Private names that a file gives to its own classes, functions, attributes and variables."""
    nodes = list(ast.walk(ast.parse(text)))
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    attributes = [node for node in stored if isinstance(node, ast.Attribute)]
    names |= {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}
    return {name for name in names if is_private(name)}


@cache
def ours():
    return set().union(*map(defined_in, sources().values()))


@cache
def theirs():
    return {name for owner in (*FOREIGN, nn.Linear(1, 1)) for name in (*dir(owner), *vars(owner)) if is_private(name)}


def names_in(node, own):
    """Private names of other packages in a node of a syntax tree. own: those that its file defines."""
    if isinstance(node, ast.Attribute) and ast.unparse(node) not in OF_PYTHON:
        of_self = ast.unparse(node.value) in ("self", "cls", "super()")
        yield from {node.attr} - (ours() if of_self else ours() - theirs()) - own
    elif isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        yield from names if node.module.split(".")[0] not in ROOMS else ()
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        yield from {node.value} - ours()
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
        name = node.args[1]
        if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
            yield name.values[0].value + "0"


def parts(node):
    """The nodes below one, without strings that are no whole names."""
    yield node
    if isinstance(node, ast.JoinedStr):
        children = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NO_NAMES:
        children = [node.func]
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from parts(child)


def foreign(text):
    own = defined_in(text)
    return {name for node in parts(ast.parse(text)) for name in names_in(node, own) if is_private(name)}


def test_two_modules_alone_use_private_names():
    found = {file: names for file, text in sources().items() if (names := foreign(text))}
    assert set(found) == set(MODULES), found


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._set_grad_enabled(False)",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "import torch._dynamo as dynamo",
        "model._prepare_special_tokens(config)",
        "pad = request.config._pad_token_tensor",
        "config._attn_implementation = 'eager'",
        "module._parameters",
        "tensor._values()",  # a name that a class of the project has too
        "self.tensor._version",
        "self._supports_sdpa",
        "getattr(module, '_hf_hook', None)",
        "hasattr(model, f'_prepare_{kind}')",
        "'_orig_mod' in names",
        "vars(layer)['_is_hf_initialized']",
        "operator.attrgetter('config._attn_implementation')",
        "importlib.import_module('torch._inductor')",
        "nn.Module._wrapped_call_impl.__code__",
    ],
)
def test_every_form_is_found(line):
    assert foreign(f"def f():\n    {line}")


@pytest.mark.parametrize(
    "line",
    [
        "self._segments[0]._decode_index",
        "name.endswith('_mask')",
        "sys._getframe(1)",
        "from caches.core import _anything",
        "x.__dict__, _, __name__",
        "f'_{name}_inv_freq'",
        "vars(self) | {'_memory': None}",
    ],
)
def test_nothing_else_is_found(line):
    assert not foreign(f"def f():\n    {line}")


IDS = torch.tensor([[5, 6, 7], [8, 9, 3]])
LINEAR = nn.Linear(4, 3)
HOOKED = add_hook_to_module(nn.Linear(2, 2), ModelHook())


@cache
def llama():
    return tiny_model("llama")


@cache
def t5():
    return tiny_encoder_decoder("t5")


def config_of(model, **options):
    """A configuration with its special tokens, after transformers' preparations."""
    config, _ = transformers_api.prepare_generation_config(model, None, eos_token_id=2, pad_token_id=1, **options)
    transformers_api.prepare_special_tokens(model, config, True, model.device, 2)
    return config


@cache
def quantized_layer():
    """One of transformers' own, with 8 tokens in each of 3 rows."""
    options = {"q_group_size": 16, "axis_key": 1, "axis_value": 1}
    cache = transformers.QuantizedCache("hqq", llama().config, **options)
    with torch.no_grad():
        llama()(torch.ones(3, 8, dtype=torch.long), past_key_values=cache)
    return cache.layers[0]


def positions_are_prepared():
    found = transformers_api.prepare_position_ids(llama(), IDS, {"attention_mask": torch.ones_like(IDS)})
    return found[0].tolist() == [0, 1, 2]


def graphs_are_counted():
    def step(x):
        return x + 1

    before = torch_api.compiled_graphs(step)
    torch.compile(step, backend="eager")(torch.ones(2))
    counted = torch_api.compiled_graphs(step)
    torch_api.discard_compiled(step)
    return (before, counted, torch_api.compiled_graphs(step)) == (0, 1, 0)


def encoder_is_read():
    config = config_of(t5())
    ids, name, given = transformers_api.prepare_model_inputs(t5(), None, {"input_ids": IDS})
    encoded = transformers_api.prepare_encoder_kwargs(t5(), config, name, ids, given)
    again = transformers_api.prepare_encoder_kwargs(t5(), config, name, ids, dict(encoded))
    return again["encoder_outputs"] is encoded["encoder_outputs"] and len(encoded["encoder_outputs"][0]) == len(ids)


def decoder_begins():
    start = transformers_api.special_tokens(config_of(t5())).decoder_start
    ids, _ = transformers_api.prepare_decoder_input_ids(t5(), 3, "input_ids", {}, start, t5().device)
    return ids.tolist() == [[int(start)]] * 3


def kwargs_grow():
    grown = transformers_api.update_model_kwargs(llama(), {}, {"attention_mask": torch.ones(2, 3)})
    return grown["attention_mask"].shape == (2, 4)


def length_is_set():
    config = config_of(llama(), max_new_tokens=5)
    transformers_api.prepare_generated_length(llama(), config, IDS, 3, set())
    return config.max_length == 8


def mask_is_inferred():
    return transformers_api.prepare_attention_mask(llama(), torch.tensor([[1, 5, 6]]), config_of(llama())).tolist()


def processors_are_made():
    config = config_of(llama(), temperature=0.5, do_sample=True)
    made = transformers_api.logits_processors(llama(), config, input_ids_seq_length=3, logits_processor=[len])
    return made[0] is len and "TemperatureLogitsWarper" in [type(one).__name__ for one in made]


def criteria_are_made():
    config = config_of(llama(), max_length=7)
    made = transformers_api.stopping_criteria(llama(), config, StoppingCriteriaList(), None)
    return "MaxLengthCriteria" in [type(one).__name__ for one in made]


def parts_are_found():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("table", torch.zeros(1), persistent=False)
    children, parameters, buffers, unsaved = torch_api.parts_of(module)
    return (children.keys(), parameters, buffers.keys(), unsaved) == ({"0"}, {}, {"table"}, {"table"})


def data_types_stay():
    class Codes(torch_api.KeepsDataTypes):
        pass

    module = Codes()
    module.register_buffer("codes", torch.ones(1))
    return module.half().codes.dtype == torch.float32 and module.to("meta").codes.is_meta


def gradients_can_be_set():
    torch_api.set_grad_enabled(False)
    off = torch.is_grad_enabled()
    torch_api.set_grad_enabled(True)
    return (off, torch.is_grad_enabled()) == (False, True)


def tensors_can_be_written():
    with torch.inference_mode():
        with torch_api.always_writable():
            made = torch.zeros(1)
        was_on = torch.is_inference_mode_enabled()
    made += 1
    return was_on and not made.is_inference()


def schemas_are_found():
    written, viewed, computed = map(
        torch_api.schema_of, (torch.ops.aten.add_.Tensor, torch.ops.aten.view.default, torch.ops.aten.add.Tensor)
    )
    aliased = [any(each.alias_info is not None for each in of.arguments) for of in (written, viewed, computed)]
    return (written.is_mutable, viewed.is_mutable) == (True, False) and aliased == [True, True, False]


def writes_are_counted():
    tensor = torch.ones(2)
    tensor.add_(1)
    return torch_api.write_count(tensor) == 1


def storages_are_told_apart():
    one, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    return torch_api.storage_key(one) == torch_api.storage_key(one[1:]) != torch_api.storage_key(other)


def wrapper_has_no_memory():
    class Wrapper(torch.Tensor):
        __torch_dispatch__ = None

    wrapper = torch_api.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float16, device="cpu")
    with torch_api.DisableTorchFunctionSubclass():
        return type(wrapper) is Wrapper and wrapper.shape == (2, 3) and wrapper.dtype == torch.float16


def products_are_equal():
    if not torch_api.has_onednn():
        return True
    with torch.no_grad():
        found = torch_api.onednn_linear(torch.ones(2, 4), LINEAR.weight, LINEAR.bias)
        return torch.allclose(found, LINEAR(torch.ones(2, 4)))


def frames_are_known():
    class Caller(nn.Module):
        def forward(self):
            frame = inspect.currentframe().f_back.f_back
            return frame.f_code is torch_api.module_call_code() and frame.f_locals["self"] is self

    return Caller()()


@cache
def package_computes():
    if shutil.which("g++") is None:
        return True
    program, changed = torch.export.export(LINEAR, (torch.ones(2, 4),)), []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own code
        torch_api.compile_package(program, f"{folder}/linear.pt2", changed.append, {})
        weights = {"weight": LINEAR.weight.detach(), "bias": LINEAR.bias.detach()}
        others = {name: 2 * tensor for name, tensor in weights.items()}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tempfile, "tempdir", folder)
            codes = torch_api.load_package(f"{folder}/linear.pt2", [weights | {"unused": LINEAR.bias}, others])
            freed = {"weight": torch.ones_like(LINEAR.weight), "bias": torch.ones_like(LINEAR.bias)}
            bound = torch_api.load_package(f"{folder}/linear.pt2", [freed])
            storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in freed.values()]
            del freed
            not_kept = len(bound) == 1 and all(storage.expired() for storage in storages)
        unpacked = list(Path(folder).glob("package-*"))
    inputs = torch.ones(2, 4)
    with torch.no_grad():
        results = [code([inputs])[0] / scale for code, scale in zip(codes, (1, 2), strict=True)]
        are_read = all(torch.allclose(result, LINEAR(inputs)) for result in results)
    return len(changed) == 1 and not unpacked and are_read and not_kept


def hooks_are_found():
    module = nn.Linear(1, 1)
    before = sum(map(len, torch_api.hooks_of(module)))
    module.register_forward_hook(print)
    module.register_forward_pre_hook(print)
    copy = nn.Linear(1, 1)
    copy.__dict__.update(torch_api.state_without_hooks(module))
    return [sum(map(len, torch_api.hooks_of(one))) - before for one in (module, copy)] == [2, 0]


def outputs_are_recorded_by_hooks():
    model = copy.deepcopy(llama())
    with torch.no_grad():
        model(IDS, output_hidden_states=True)
    hooks = [hook for module in model.modules() for hooks in torch_api.hooks_of(module) for hook in hooks.values()]
    return bool(hooks) and all(map(transformers_api.records_outputs, hooks))


def tensors_of_a_file():
    if find_spec("gguf") is None or find_spec("transformers.integrations.gguf.reader") is None:
        return True
    tokens = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [("a", "b")]}
    with tempfile.TemporaryDirectory() as folder:
        file = write_gguf(llama(), Path(folder, "tiny.gguf"), import_module("gguf").GGMLQuantizationType.F32, tokens)
        tensors = transformers_api.gguf_tensors(file, llama())
        state = llama().state_dict()
        return tensors.keys() == state.keys() and all(
            torch.equal(tensors[name].values(), state[name]) for name in state
        )


def compiled_modules_are_marked():
    layer = nn.Linear(2, 2)
    before = set(vars(layer))
    torch.compile(layer, backend="eager")
    return set(vars(layer)) - before == {torch_api.COMPILED_MARK}


def trees_are_rebuilt():
    values, spec = torch_api.tree_flatten({"a": (1, [2])})
    return values == [1, 2] and torch_api.tree_unflatten([3, 4], spec) == {"a": (3, [4])}


WORK = {
    torch_api: {
        "COMPILED_MARK": compiled_modules_are_marked,
        "always_writable": tensors_can_be_written,
        "buffers_of": lambda: torch_api.buffers_of(nn.BatchNorm1d(2)).keys() >= {"running_mean", "running_var"},
        "compile_package": package_computes,
        "hooks_of": hooks_are_found,
        "load_package": package_computes,
        "state_without_hooks": hooks_are_found,
        "KeepsDataTypes": data_types_stay,
        "tree_flatten": trees_are_rebuilt,
        "tree_unflatten": trees_are_rebuilt,
        "DisableTorchFunctionSubclass": wrapper_has_no_memory,
        "TreeSpec": lambda: isinstance(torch_api.tree_flatten([1])[1], torch_api.TreeSpec),
        "TorchDispatchMode": lambda: hasattr(torch_api.TorchDispatchMode, "__torch_dispatch__"),
        "compiled_graphs": graphs_are_counted,
        "discard_compiled": graphs_are_counted,
        "graph_errors": lambda: all(issubclass(error, Exception) for error in torch_api.graph_errors()),
        "has_onednn": lambda: torch_api.has_onednn() in (True, False),
        "inside_compiled": lambda: (
            torch_api.inside_compiled(torch.compile(LINEAR)) is LINEAR
            and torch_api.inside_compiled(LINEAR) is torch_api.inside_compiled("text") is None
        ),
        "make_wrapper_subclass": wrapper_has_no_memory,
        "module_call_code": frames_are_known,
        "onednn_linear": products_are_equal,
        "parameters_of": lambda: torch_api.parameters_of(nn.Linear(1, 1, bias=False)).keys() == {"weight", "bias"},
        "parts_of": parts_are_found,
        "schema_of": schemas_are_found,
        "set_grad_enabled": gradients_can_be_set,
        "storage_key": storages_are_told_apart,
        "write_count": writes_are_counted,
        "tree_leaves": lambda: torch_api.tree_leaves({"a": (1, [2])}) == [1, 2],
        "tree_map": lambda: torch_api.tree_map(str, {"a": (1, [2])}) == {"a": ("1", ["2"])},
    },
    transformers_api: {
        "records_outputs": outputs_are_recorded_by_hooks,
        "accelerate_hook": lambda: (
            isinstance(transformers_api.accelerate_hook(HOOKED), ModelHook)
            and transformers_api.accelerate_hook(LINEAR) is None
        ),
        "attn_implementation": lambda: transformers_api.attn_implementation(llama().config) == "sdpa",
        "can_compile_fullgraph": lambda: transformers_api.can_compile_fullgraph(llama()) is True,
        "constraint_of": lambda: transformers_api.constraint_of(PrefixConstrainedLogitsProcessor(len, 1)) is len,
        "default_generation_params": lambda: transformers_api.default_generation_params()["num_beams"] == 1,
        "gguf_tensors": tensors_of_a_file,
        "follows_rows": lambda: (
            transformers_api.follows_rows(quantized_layer()) is hasattr(transformers.cache_utils, "BaseQuantizedLayer")
        ),
        "has_own_position_ids": lambda: transformers_api.has_own_position_ids(llama()) is False,
        "logits_processors": processors_are_made,
        "model_from_config": lambda: (
            type(transformers_api.model_from_config(type(llama()), llama().config)) is type(llama())
        ),
        "quantized_parts": lambda: len(transformers_api.quantized_parts(quantized_layer())[0]) == 2,
        "quantized_rows": lambda: transformers_api.quantized_rows(quantized_layer()) == 3,
        "prepare_attention_mask": lambda: mask_is_inferred() == [[0, 1, 1]],
        "prepare_decoder_input_ids": decoder_begins,
        "prepare_encoder_kwargs": encoder_is_read,
        "prepare_generated_length": length_is_set,
        "prepare_generation_config": lambda: config_of(llama(), top_k=7).top_k == 7,
        "prepare_model_inputs": encoder_is_read,
        "prepare_position_ids": positions_are_prepared,
        "prepare_special_tokens": lambda: transformers_api.special_tokens(config_of(llama())).eos.tolist() == [2],
        # What they return of a model that is split: tests/parity/test_tensor_parallel.py.
        "plan_name": lambda: transformers_api.plan_name("model.layers.11.mlp") == "model.layers.*.mlp",
        "rank_count": lambda: transformers_api.rank_count(llama()) == 1 and hasattr(llama(), "_tp_size"),
        "rank_mesh": lambda: hasattr(llama(), "_device_mesh"),
        "special_tokens": lambda: int(transformers_api.special_tokens(config_of(llama())).pad) == 1,
        "stopping_criteria": criteria_are_made,
        "supports_attention_backend": lambda: transformers_api.supports_attention_backend(llama()) is True,
        "supports_default_dynamic_cache": lambda: transformers_api.supports_default_dynamic_cache(llama()) is True,
        "update_model_kwargs": kwargs_grow,
    },
}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=pytest.mark.slow if work is package_computes else ())
        for module, works in WORK.items()
        for name, work in works.items()
    ],
)
def test_it_works_in_the_installed_release(module, name):
    assert WORK[module][name]()


@pytest.mark.parametrize("module", WORK, ids=lambda module: module.__name__)
def test_each_is_tried(module):
    text = ast.parse(inspect.getsource(module))
    defined = {node.name for node in text.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert set(getattr(module, "__all__", defined)) == set(WORK[module]) >= defined
