"""`engine serve`: a server that speaks OpenAI's HTTP protocol."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from configs import CacheConfig, EngineConfig
from engine.cli import options, output, values
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.errors import EngineError, OptionError

if TYPE_CHECKING:
    from engine.generator import Generator

_GIB = 2**30
_MOST_TOKENS = 4096  # new ones of a text, for models whose context has no limit


@options.takes(options.SERVE)
def serve(**given: Any) -> None:
    """Answer requests of OpenAI's HTTP protocol; many at once run in one batch. GET / is a page to chat with.

    Ends with Ctrl-C or SIGTERM: requests that run are answered before.
    """
    path = values.one_model(given["path"], given["model"])
    api_key, settings = _api_key(given["api_key"]), _settings(given)
    most_bytes = values.size(given["max_body_mib"], 2**20, "--max-body-mib")
    _check_installed()
    from engine.server import listening

    hosts = listening.allowed_hosts(given["host"], given["allowed_host"] or ())
    if api_key is None and listening.allowed_hosts(given["host"]) is None:
        output.tell(f"Everyone who reaches {given['host']} may use this server: --api-key sets a key.")
    sockets = listening.listen(given["host"], given["port"]) if values.is_first_rank(settings) else []
    try:
        _serve(given, path, settings, sockets, (most_bytes, api_key, hosts))
    finally:
        listening.close(sockets)


def _serve(given: dict[str, Any], path: Any, settings: EngineConfig, sockets: list[socket], access: Any) -> None:
    """sockets: at which rank 0 listens; others have none. access: of `make_app`."""
    is_first = bool(sockets)
    with Work(is_first) as work:
        start_libraries(work, path)
        from engine.server.app import make_app
        from engine.server.reading import Limits
        from engine.server.server import run
        from engine.server.service import Service

        generator = load_generator(work, path, settings, given["adapter"])
        work.doing("trying some texts")  # wrong options of the cache show here, and what is done once is done
        # OpenMP gives each thread that computes workers of its own, and those of the main thread would stay: with more
        # workers than processors all of them sleep between two products, and requests take a quarter longer.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_try_texts, generator, given["max_batch"]).result()
        if not is_first:
            follow(generator, given["max_batch"])
            return
        text_config = generator.model.config.get_text_config(decoder=True)
        context = given["context_tokens"] or getattr(text_config, "max_position_embeddings", None)
        limits = Limits(context, given["max_tokens"] or context or _MOST_TOKENS, given["max_batch"], given["max_time"])
        name = given["name"] or ("shipped" if path is None else Path(path).name or str(path))
        service = Service(generator, name, limits, given["max_queue"])
    started = partial(_announce, name)
    run(make_app(service, *access), service, sockets, given["drain_seconds"], started)


def _try_texts(generator: Generator, most_rows: int) -> None:
    """One alone, and two together, whose steps are other ones."""
    import torch

    from engine.prompt import without_padding

    prompt = without_padding(torch.ones(1, 2, dtype=torch.long))
    generator.generate(prompt, max_new_tokens=2, do_sample=False)
    prompts = [prompt] * min(2, most_rows)
    for request in generator.generate_many(prompts, slots=most_rows, max_new_tokens=3, do_sample=False):
        request.result()


def _api_key(given: str | None) -> str | None:
    """given: None for what the environment says."""
    api_key = os.environ.get("KVENGINE_API_KEY") if given is None else given
    if api_key == "":
        raise OptionError("the API key is empty (--api-key or KVENGINE_API_KEY): give one, or leave it out")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise OptionError("--api-key has characters that an HTTP header cannot hold: give letters and digits")
    return api_key


def _settings(given: dict[str, Any]) -> EngineConfig:
    settings = values.engine_config(given["config"], given)
    own: dict[str, Any] = {} if given["cache"] is None else {"cache": given["cache"]}
    if cache_config := values.assignments(given["cache_option"], "--cache-option"):
        if given["cache"] is None:
            raise OptionError("--cache-option sets an option of a cache: say which, with --cache")
        own["cache"] = CacheConfig.from_dict({"name": given["cache"]} | cache_config)
    gib = given["prefix_store_gib"]
    if gib is not None:
        own["prefix_store_bytes"] = values.size(gib, _GIB, "--prefix-store-gib") or None
    elif settings.prefix_store_bytes is None:
        own["prefix_store_bytes"] = _GIB
    return settings.update(**own)[0]


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401 - an extra
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"serving needs {error.name}, which is not installed: pip install 'kvengine[serve]'"
        ) from error


def _announce(name: str, url: str) -> None:
    output.tell(f"Serving {name} at {url} (the page is there; the protocol is at /v1). Ctrl-C ends it.")


def follow(generator: Generator, slots: int) -> None:
    """Compute this rank's part of what the server on rank 0 does, until it ends. Signals are for rank 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    batch = generator.batch(slots=slots)
    batch.close()
    if batch.failure is not None:
        raise EngineError(f"the batch of this rank has stopped: {batch.failure}") from batch.failure
