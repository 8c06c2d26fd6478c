"""Caches in files: safetensors, with a header that says of which model, backend and tokens they are.

A file is written beside the old one and renamed. Its SHA-256 covers every byte. Reading executes nothing. The header is
read by `configs.cache_file`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.transfer import LayeredCache
from caches.errors import CacheError, CacheFileError, UnsupportedLayerError
from caches.layers.fingerprint import differences, fingerprint, inner_model
from caches.layers.layer_spec import PLAIN, LayerSpec, read_specs
from caches.layers.read_by import ReadBy
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.out_of_memory import is_out_of_memory
from caches.platform.torch_api import storage_key
from caches.protocol import TokenLog
from caches.registry import recipe
from configs import ConfigError, EncoderDecoderCacheConfig
from configs.cache_file import UNKNOWN_DIGEST, VERSION, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = "tokens"  # of the log, which begins the names of its tensors
_OF_THIS_MACHINE = {"folder", "device", "layer_device_map"}  # options that are not saved


def save(
    cache: LayeredCache,
    path: str | Path,
    model: nn.Module | None = None,
    notes: dict[str, object] | None = None,
) -> None:
    """Write a cache to a file. See `Cache.save`."""
    cache.check_finished()
    cache.finish_step()
    log = cache.log
    read_by = None if log is None else log.read_by
    reader = read_by.live_model if model is None and read_by is not None else model
    if reader is None:
        raise CacheFileError(
            "which model filled this cache is not known, so a file could not say for which it is: save(path, model)"
        )
    if log is not None and read_by is not None and (reason := read_by.why_other(ReadBy.of(reader))):
        raise CacheFileError(
            f"the file would name a model with other keys and values than those in the cache: {reason}. Save a cache "
            "before its model changes, or make this one anew"
        )
    stacks = [steps.stack for steps in cache.implicit_steps]
    config = [stack.layout.config for stack in stacks]
    if None in config:
        raise UnsupportedLayerError(
            f"this {cache.name} cache was not made by caches.build, so no file could say how to build it again: "
            "convert it before"
        )
    tensors: dict[str, torch.Tensor] = {}
    header = {
        "version": VERSION,
        "backends": [[options.name, _saved_options(options.to_dict())] for options in config if options is not None],
        "model": fingerprint(reader),
        "notes": notes or {},
        "stacks": [_packed(_state(stack), str(number), tensors) for number, stack in enumerate(stacks)],
        _TOKENS: None if log is None else _packed(_content(log.first(stacks[0].total_tokens)), _TOKENS, tensors),
    }
    _write(Path(path), tensors, {"kvengine": json.dumps(header), "sha256": UNKNOWN_DIGEST})


def load(path: str | Path, model: nn.Module, device: torch.device | str | None = None) -> LayeredCache:
    """The cache in a file, on the backend that it was saved from. See `caches.load`."""
    path = Path(path)
    header = read_header(path)
    reader = inner_model(model)
    _check_model(path, header["model"], fingerprint(reader))
    device = prompt_device(reader) if device is None else _device(device)
    with _readable(path) as file:
        unpacked = partial(_unpacked, file=file, device=device)
        try:
            log, stacks = unpacked(header[_TOKENS]), [_unpacked_stack(packed, unpacked) for packed in header["stacks"]]
            specs = _specs_of(path, stacks[0], reader)
            configs = [recipe(name).options.from_dict(options) for name, options in header["backends"]]
            config = configs[0] if len(configs) == 1 else EncoderDecoderCacheConfig(*configs)
            cache = cast(LayeredCache, recipe(config.name).make(specs, config))
            for steps, state in zip(cache.implicit_steps, stacks, strict=True):
                stack = steps.stack
                if stack.finds_layers and state["specs"]:
                    stack.bind_layers(_specs(state["specs"]))
                _restore(stack, state)
                steps.require_all()
        except CacheFileError:
            raise
        except (
            CacheError,
            ConfigError,
            SafetensorError,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            RuntimeError,
        ) as error:
            if is_out_of_memory(error):
                raise
            raise CacheFileError(f"{path} cannot be loaded: {error}") from error
    if log is not None:
        cache.log = TokenLog(**log, read_by=ReadBy.of(reader))
    return cache


# A cache as a tree of dicts, lists and tensors.


def _state(stack: LayerStack) -> dict[str, object]:
    return {
        "rows": stack.batch_size,
        "total_tokens": stack.total_tokens,
        "specs": [_described(spec) for spec in stack.specs],
        "timelines": [timeline.state_dict() for timeline in stack.timelines],
        # One after the other: those of an offloaded cache come to the device, and all of them may not fit there.
        "layers": (layer.state_dict() for layer in stack.layers),
        "hook": stack.hook.state_dict(max(0, stack.batch_size)),
    }


def _restore(stack: LayerStack, state: dict[str, Any]) -> None:
    if state["rows"] == -1:
        return
    PrefixSharing(stack).share_groups(["prefix" in timeline for timeline in state["timelines"]])
    stack.load_state_dict(state["timelines"], state["rows"], state["layers"], state["hook"])


def _content(log: TokenLog) -> dict[str, object]:
    return {"ids": log.ids, "mask": log.mask, "positions": log.positions, "source": log.source}


def _described(spec: LayerSpec) -> list[object]:
    span = spec.attention_span
    return [spec.layer_type, sorted(spec.components), span.kind, span.size]


def _saved_options(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name not in _OF_THIS_MACHINE}


def _packed(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """`value` in types of JSON; its tensors are put into `tensors`, by names that begin with `name`."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous()
        is_shared = storage_key(content) in map(storage_key, tensors.values())  # which safetensors refuses
        tensors[name] = content.clone() if is_shared else content
        return {"tensor": name}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(element, f"{name}.{key}", tensors) for key, element in value.items()}}
    if isinstance(value, (list, tuple, Iterator)):
        return [_packed(element, f"{name}.{number}", tensors) for number, element in enumerate(value)]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}  # that of the model which loads it
    raise UnsupportedLayerError(
        f"one of the layers keeps a {type(value).__name__}, which a file cannot hold: keep the cache in memory"
    )


def _unpacked_stack(packed: dict[str, Any], unpacked: Callable[[object], object]) -> dict[str, Any]:
    """The state of a stack; that of a layer is read when its turn comes."""
    state = packed["dict"]
    entries = {name: unpacked(entry) for name, entry in state.items() if name != "layers"}
    return entries | {"layers": map(unpacked, state["layers"])}


def _unpacked(value: object, file: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_unpacked(element, file, device) for element in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tensor":
        return file.get_tensor(content).to(device)
    if tag == "dtype":
        return getattr(torch, content)
    if tag == "device":
        return device
    return {key: _unpacked(element, file, device) for key, element in content.items()}


# Whether it is of this model.


def _check_model(path: Path, saved: dict[str, str], current: dict[str, str]) -> None:
    """Raise `CacheFileError`, with what differs."""
    if different := differences(saved, current):
        raise CacheFileError(
            f"{path} is of another model ({different}), which computes other keys and values: load it with "
            "the model that filled it, or read the tokens again"
        )


def _specs_of(path: Path, state: dict[str, Any], model: PreTrainedModel) -> Sequence[LayerSpec] | None:
    """The model's layers; None where the cache adds layers as they are used."""
    specs = read_specs(model.config)
    if state["specs"] == [_described(spec) for spec in specs]:
        return specs
    plain = all(components == ["kv"] and size is None for _, components, _, size in state["specs"])
    if plain and len(state["specs"]) in (0, len(specs)):
        return None
    raise CacheFileError(f"{path} has {len(state['specs'])} layers of other kinds than the {len(specs)} of the model")


def _specs(described: list[list[Any]]) -> list[LayerSpec]:
    return [replace(PLAIN, layer_type=layer_type) for layer_type, *_ in described]


def _device(name: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch's, of names that it does not know and of what is not here
        raise ConfigError(f"device={str(name)!r} is not here: {error}") from error


# Files.


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Raises `OSError` where there is no room, or no right to write."""
    path = path.resolve()  # a link stays one
    name = path.parent / f".{path.name}-{token_hex(8)}"
    name.touch(exist_ok=False)
    mode = (path if path.exists() else name).stat().st_mode  # safetensors' files are for their user alone
    try:
        try:
            save_file(tensors, name, metadata)
        except SafetensorError as error:
            raise _as_os_error(error, path, sum(tensor.nbytes for tensor in tensors.values())) from error
        os.chmod(name, stat.S_IMODE(mode))
        with open(name, "r+b", buffering=0) as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                at = content.find(f'"sha256":"{UNKNOWN_DIGEST}"'.encode()) + len('"sha256":"')
                digest = sha256(content).hexdigest().encode()
            file.seek(at)
            file.write(digest)  # not to the mapping: where a disk is full, that would end the process
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        with suppress(OSError):  # else it has its name
            os.unlink(name)


def _as_os_error(error: SafetensorError, path: Path, size: int) -> Exception:
    """The system's error, which safetensors has in its text alone. size: of the file, in bytes."""
    if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
        return CacheFileError(f"{path} cannot be written: {error}")
    code, free = int(number[1]), ""
    with suppress(OSError):
        free = f", where {shutil.disk_usage(path.parent).free:,} are free"
    message = f"{os.strerror(code)}: the cache needs {size:,} bytes{free}, and was not saved; choose another folder"
    return OSError(code, message, str(path))


def _readable(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if is_out_of_memory(error):
            raise
        raise CacheFileError(f"{path} is no saved cache, or damaged: {error}") from error
