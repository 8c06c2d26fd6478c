"""What identifies the model that filled a cache, also in another process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from caches.layers.model_version import (
    ModelVersion,
    active_adapters,
    first_elements,
    model_version,
    modules_in_use,
    plain_parts,
    settings_of,
    tables_of,
)
from caches.platform.torch_api import parts_of

_SUMS = 1021  # a prime, so that two rows of a weight that change places always change the sums
_DIGESTS = ("weights", "buffers", "settings", "classes", "layers")

_latest: WeakKeyDictionary[nn.Module, tuple[ModelVersion, dict[str, str]]] = WeakKeyDictionary()


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The model inside wrappers such as PEFT's. Raises `TypeError` if there is none."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"a {type(model).__name__} is no PreTrainedModel")


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Words and digests; one of them differs where another model would compute other keys and values.

    All weights are read, at about the speed of memory, once per `model_version`; of those that are not in memory, the
    name and the shape. Where several processes compute the model, each has its own: caches have other heads.
    """
    inner = inner_model(model)
    version, (read_version, digests) = model_version(inner), _latest.get(inner, (None, {}))
    if read_version != version:
        config = inner.config.get_text_config(decoder=True)
        texts = _weights(inner), _tables(inner), _settings(inner), _classes(inner), _layers(version)
        digests = {
            "model": type(inner).__name__,
            "dtype": str(inner.dtype).removeprefix("torch."),
            "rope": json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str),
            "adapters": active_adapters(inner),
        }
        digests |= {name: sha256(b"".join(text)).hexdigest() for name, text in zip(_DIGESTS, texts, strict=True)}
        _latest[inner] = version, digests
    return dict(digests)


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """In words what differs between two fingerprints; "" if nothing does."""
    return "; ".join(
        f"{name}: {'others' if name in _DIGESTS else f'{saved.get(name)}, here {now[name]}'}"
        for name in now
        if saved.get(name) != now[name]
    )


def _weights(model: nn.Module) -> Iterator[bytes]:
    _, inactive = modules_in_use(model)
    for prefix, module in _in_use(model):
        for name, tensor in sorted(_saved(module).items()):
            if not isinstance(tensor, torch.Tensor) or id(tensor) in inactive:
                continue
            plain_tensors = plain_parts(tensor)
            for plain_tensor in plain_tensors or [tensor]:
                yield f"{prefix}.{name} {plain_tensor.dtype} {list(plain_tensor.shape)}\n".encode()
            yield from map(_sums, plain_tensors)


def _saved(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The parameters and saved buffers of a module itself, or all that it says itself where its class does."""
    if type(module).state_dict is not nn.Module.state_dict:
        with suppress(ValueError):  # of a layer that keeps codes
            return module.state_dict(keep_vars=True)
    _, parameters, buffers, unsaved = parts_of(module)
    return parameters | {name: buffer for name, buffer in buffers.items() if name not in unsaved}


def _tables(model: nn.Module) -> Iterator[bytes]:
    for name, module in _in_use(model):
        for key, table in tables_of(module).items():
            for head in map(first_elements, plain_parts(table)):
                # What other processors compute from a configuration may differ in the last bits.
                rounded = head.to(torch.bfloat16) if head.is_floating_point() else head
                yield f"{name}.{key} {head.dtype}\n".encode() + rounded.cpu().view(torch.uint8).numpy().tobytes()


def _settings(model: nn.Module) -> Iterator[bytes]:
    for name, module in _in_use(model):
        yield from (f"{name}.{setting} {value!r}\n".encode() for setting, value in sorted(settings_of(module).items()))


def _classes(model: nn.Module) -> Iterator[bytes]:
    yield from (f"{name} {module.__class__.__qualname__}\n".encode() for name, module in _in_use(model))


def _layers(version: ModelVersion) -> Iterator[bytes]:
    for spec in version.layers or ():
        yield f"{spec.layer_type} {sorted(spec.components)} {spec.attention_span}\n".encode()


def _in_use(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, sorted, without those of adapters that are not active."""
    modules = set(map(id, modules_in_use(model)[0]))
    for name, module in sorted(model.named_modules()):
        if id(module) in modules:
            yield name, module


def _sums(weight: torch.Tensor) -> bytes:
    """Sums of every 1,021st of the integers that the bytes of a weight are: the same on every machine."""
    content = weight.detach().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    size = len(content) // (8 * _SUMS) * 8 * _SUMS
    sums = content[:size].view(torch.int64).view(-1, _SUMS).sum(dim=0)
    return sums.cpu().numpy().tobytes() + content[size:].cpu().numpy().tobytes()
