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
def serve(**arguments: Any) -> None:
    """Answer requests of OpenAI's HTTP protocol; many at once run in one batch. GET / is a page to chat with.

    Ends with Ctrl-C or SIGTERM: requests that run are answered before.
    """
    path = values.one_model(arguments["path"], arguments["model"])
    api_key, settings = _api_key(arguments["api_key"]), _settings(arguments)
    most_bytes = values.size(arguments["max_body_mib"], 2**20, "--max-body-mib")
    _check_installed()
    from engine.server import listening

    hosts = listening.allowed_hosts(arguments["host"], arguments["allowed_host"] or ())
    if api_key is None and listening.allowed_hosts(arguments["host"]) is None:
        output.tell(f"Everyone who reaches {arguments['host']} may use this server: --api-key sets a key.")
    sockets = listening.listen(arguments["host"], arguments["port"]) if values.is_first_rank(settings) else []
    try:
        _serve(arguments, path, settings, sockets, (most_bytes, api_key, hosts))
    finally:
        listening.close(sockets)


def _serve(arguments: dict[str, Any], path: Any, settings: EngineConfig, sockets: list[socket], access: Any) -> None:
    """sockets: at which rank 0 listens; others have none. access: of `make_app`."""
    is_first = bool(sockets)
    with Work(is_first) as work:
        start_libraries(work, path)
        from engine.server.app import make_app
        from engine.server.reading import Limits
        from engine.server.server import run
        from engine.server.service import Service

        generator = load_generator(work, path, settings, arguments["adapter"])
        work.doing("trying some texts")  # wrong options of the cache show here, and what is done once is done
        # OpenMP gives each thread that computes workers of its own, and those of the main thread would stay: with more
        # workers than processors all of them sleep between two products, and requests take a quarter longer.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_try_texts, generator, arguments["max_batch"]).result()
        if not is_first:
            follow(generator, arguments["max_batch"])
            return
        text_config = generator.model.config.get_text_config(decoder=True)
        context = arguments["context_tokens"] or getattr(text_config, "max_position_embeddings", None)
        limits = Limits(
            context, arguments["max_tokens"] or context or _MOST_TOKENS, arguments["max_batch"], arguments["max_time"]
        )
        name = arguments["name"] or ("shipped" if path is None else Path(path).name or str(path))
        service = Service(generator, name, limits, arguments["max_queue"])
    started = partial(_announce, name)
    run(make_app(service, *access), service, sockets, arguments["drain_seconds"], started)


def _try_texts(generator: Generator, most_rows: int) -> None:
    """One alone, and two together, whose steps are other ones."""
    import torch

    from engine.prompt import without_padding

    prompt = without_padding(torch.ones(1, 2, dtype=torch.long))
    generator.generate(prompt, max_new_tokens=2, do_sample=False)
    prompts = [prompt] * min(2, most_rows)
    for request in generator.generate_many(prompts, slots=most_rows, max_new_tokens=3, do_sample=False):
        request.result()


def _api_key(option: str | None) -> str | None:
    """option: None for what the environment says."""
    api_key = os.environ.get("KVENGINE_API_KEY") if option is None else option
    if api_key == "":
        raise OptionError("the API key is empty (--api-key or KVENGINE_API_KEY): give one, or leave it out")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise OptionError("--api-key has characters that an HTTP header cannot hold: give letters and digits")
    return api_key


def _settings(arguments: dict[str, Any]) -> EngineConfig:
    settings = values.engine_config(arguments["config"], arguments)
    changes: dict[str, object] = {} if arguments["cache"] is None else {"cache": arguments["cache"]}
    if cache_config := values.assignments(arguments["cache_option"], "--cache-option"):
        if arguments["cache"] is None:
            raise OptionError("--cache-option sets an option of a cache: say which, with --cache")
        changes["cache"] = CacheConfig.from_dict({"name": arguments["cache"]} | cache_config)
    gib = arguments["prefix_store_gib"]
    if gib is not None:
        changes["prefix_store_bytes"] = values.size(gib, _GIB, "--prefix-store-gib") or None
    elif settings.prefix_store_bytes is None:
        changes["prefix_store_bytes"] = _GIB
    return settings.update(**changes)[0]


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
    output.tell(f"Serving {name} at {url}\nA page to chat with is there, the protocol at /v1. Ctrl-C ends it.")


def follow(generator: Generator, slots: int) -> None:
    """Compute this rank's part of what the server on rank 0 does, until it ends. Signals are for rank 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    batch = generator.batch(slots=slots)
    batch.close()
    if batch.failure is not None:
        raise EngineError(f"the batch of this rank has stopped: {batch.failure}") from batch.failure
