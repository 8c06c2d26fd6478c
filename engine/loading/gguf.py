"""Models in GGUF files: weights of linear layers and embeddings stay the codes that are in the file.

transformers reads the configuration and the tokenizer, and all of models whose weights it puts together differently.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, __version__

from caches.platform.machine import cache_folder
from caches.platform.out_of_memory import in_words
from caches.platform.transformers_api import GgufTensor, gguf_tensors, plan_name
from engine.errors import InputError
from engine.kernels.block_codes import BlockCodes, eight_bits, fitted
from engine.kernels.linear_kernels import warn_without_kernels
from engine.kernels.low_bit_linears import LowBitLinear
from engine.kernels.weight_conversion import keep_data_type, linears_of, replace_linear
from engine.loading.gguf_types import LAYOUTS, blocks_of, blocks_without_values

_WITHOUT_VALUES = torch.zeros((), device="cpu")  # and memory, for weights whose codes are kept
_ENCODERS = {bits: partial(fitted, bits=bits) for bits in (4, 5, 6)} | {8: eight_bits}
"""Of weights that are loaded later, by the bits of those in the file."""
_HASHED = 2**20  # bytes of a file that tell it from others, with its size and time


@contextmanager
def settings_of(file: Path) -> Iterator[Path]:
    """A folder with the configuration and the tokenizer of a file.

    It stays in `$KVENGINE_CACHE`, because converting a vocabulary takes longer than reading the weights.
    """
    status = file.stat()
    with file.open("rb") as content:
        beginning = content.read(_HASHED)
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {__version__}".encode() + beginning
    try:
        folder = cache_folder() / "gguf" / sha256(identity).hexdigest()[:16]
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = None
    if folder is not None and folder.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=folder and folder.parent, ignore_cleanup_errors=True) as made:
        _convert_settings(file, made)
        if folder is not None:
            complete = f"{made}-complete"
            with suppress(OSError):  # no room, or another process was faster
                shutil.copytree(made, complete)
                os.replace(complete, folder)
            shutil.rmtree(complete, ignore_errors=True)
        yield Path(made)


def why_damaged(file: Path) -> str | None:
    """What says that a file is cut short, damaged or no GGUF file; None where header and tensors are complete."""
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except (OSError, MemoryError):
        return None
    except Exception as error:  # whatever the bytes happen to mean
        return f"its {file.stat().st_size:,} bytes are damaged or a part of a GGUF file ({in_words(error)})"
    return None


def _convert_settings(file: Path, folder: str) -> None:
    options = {"gguf_file": file.name}
    AutoConfig.from_pretrained(str(file.parent), **options).save_pretrained(folder)
    with suppress(OSError, ValueError, KeyError):  # there may be no vocabulary in it
        AutoTokenizer.from_pretrained(str(file.parent), **options).save_pretrained(folder)


def load_codes(file: Path, config: PreTrainedConfig, auto_class: Any, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model in a GGUF file, whose linear layers and embeddings keep its codes. dtype: of its other weights.

    None where no codes can be kept: of other types, or of a model that transformers puts together differently. Raises
    `InputError` where weights are missing.
    """
    with torch.device("meta"):
        empty = auto_class.from_config(config)
    layers = _layers(empty)
    tensors, coded = _tensors(file, empty, layers)
    if not coded:
        return None
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        values = _WITHOUT_VALUES.expand(empty.get_parameter(name).shape) if name in coded else tensor.values()
        if values is None:
            return None
        weights[name] = values.to(dtype)
    model, info = type(empty).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{len(missing)} weights of a {type(model).__name__} are missing: {missing[0]}, ...")
    checked: set[tuple[str, str]] = set()
    for name, tensor in coded.items():
        assert tensor.order is not None
        blocks = blocks_of(tensor.raw()[tensor.order], tensor.type_name)
        if (checked_as := (plan_name(name), tensor.type_name)) not in checked:  # one of each kind
            _check(blocks, tensor)
            checked.add(checked_as)
        _put(model, *layers[name.removesuffix(".weight")], blocks)
    keep_data_type(model)
    warn_without_kernels()
    return model


def put_codes_without_values(file: Path, model: PreTrainedModel) -> None:
    """Let a model on the meta device keep what `load_codes` would, to count its bytes: the file's header is read."""
    layers = _layers(model)
    tensors, coded = _tensors(file, model, layers)
    if not all(tensor.is_separate for tensor in tensors.values()):
        return
    codes = {name: blocks_without_values(model.get_parameter(name), tensor.type_name) for name, tensor in coded.items()}
    for name, blocks in codes.items():
        _put(model, *layers[name.removesuffix(".weight")], blocks)


def _tensors(
    file: Path, model: PreTrainedModel, layers: Container[str]
) -> tuple[dict[str, GgufTensor], dict[str, GgufTensor]]:
    """By the names of the model's weights: all tensors of a file, and those of `layers` that may stay codes."""
    tensors = gguf_tensors(file, model) or {}
    coded = {
        name: tensor
        for name, tensor in tensors.items()
        if name.removesuffix(".weight") in layers and tensor.type_name in LAYOUTS and tensor.order is not None
    }
    return tensors, coded


def _layers(model: PreTrainedModel) -> dict[str, tuple[str | None, list[str]]]:
    """The layers that may have codes, by the names of their weights: a linear layer, if there is one, and the
    embeddings that share its weights. Embeddings that do more than look up rows have none."""
    linears = linears_of(model)
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    layers: dict[str, tuple[str | None, list[str]]] = {}
    owners = {id(module.weight): name for name, module in linears.items()}
    shared: dict[int, list[str]] = {}
    for name, table in tables.items():
        shared.setdefault(id(table.weight), []).append(name)
    for weight in {*owners, *shared}:
        names = shared.get(weight, [])
        if all(type(tables[name]) is nn.Embedding for name in names):  # what others do cannot be tried without weights
            layers |= dict.fromkeys(filter(None, [owners.get(weight), *names]), (owners.get(weight), names))
    return layers


def _put(model: PreTrainedModel, linear: str | None, tables: list[str], blocks: BlockCodes) -> None:
    """Let a linear layer, if there is one, and embeddings read codes."""
    module = model.get_submodule(tables[0] if linear is None else linear)
    layer = LowBitLinear(blocks, module.weight.detach(), getattr(module, "bias", None), _ENCODERS[blocks.bits])
    replace_linear(model, linear, layer, tables)


def _check(blocks: BlockCodes, tensor: GgufTensor) -> None:
    """Raise `AssertionError` where codes have other values than the file."""
    assert tensor.order is not None
    outs = torch.arange(0, len(tensor.order), max(1, len(tensor.order) // 64), device="cpu")
    values = tensor.rows(outs)
    if not torch.equal(blocks.rows(outs)[:, : values.shape[1]], values):
        raise AssertionError(f"codes of {tensor.type_name} are not read as they are written")
