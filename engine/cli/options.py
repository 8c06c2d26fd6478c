"""The options of the commands; `takes` gives them to a command.

Those of parameters of `generate` follow from `engine.parameters`, all others are declared here. The options of `engine
generate` are grouped as in its help. The other tables are those of the other commands.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from configs import FALLBACKS, CacheConfig, presets
from configs.engine import ACTIVATIONS_CHOICES, COMPILE_CHOICES, LINEARS_CHOICES, WEIGHTS_CHOICES
from engine import parameters
from engine.parameters import PARAMETERS, Flag
from engine.readers import Reader, WrongValue


class Declared(NamedTuple):
    """An option or argument. kind: the type of its value. info: what typer shows and checks."""

    kind: object
    default: object
    info: Any


def option(
    value_type: Any, metavar: str | None, help: str, *names: str, default: object = None, **settings: Any
) -> Declared:
    """names: as typed; default: the parameter's name. settings: further arguments of `typer.Option`."""
    value_type = value_type | None if default is None else value_type
    return Declared(value_type, default, typer.Option(*names, metavar=metavar, help=help, **settings))


def flag(help: str, *names: str) -> Declared:
    return option(bool, None, help, *names, default=False)


def argument(value_type: Any, metavar: str, help: str, **settings: Any) -> Declared:
    return Declared(value_type | None, None, typer.Argument(metavar=metavar, help=help, show_default=False, **settings))


def option_name(name: str) -> str:
    """The option with the name of a parameter."""
    return f"--{name.replace('_', '-')}"


def of_parameter(name: str, help: str = "") -> Declared:
    """The option of a parameter of `generate`. help: in place of its own."""
    parameter = PARAMETERS[name]
    shown, reader = parameter.flag or Flag(), parameter.reader
    names, value_type = (option_name(name), *shown.names), shown.type or (reader and reader.scalar)
    sentence, repeats = parameter.help.partition(". ")[0].removesuffix("."), value_type == list[str]
    is_own, help = not help, help or shown.help or sentence + ("; may be repeated." if repeats else ".")
    if value_type is bool:
        return flag(help, *names)
    if shown.type or reader is None:
        return option(value_type, shown.metavar, help, *names, autocompletion=shown.complete)
    help += f" Default: the model's own, or {parameter.default}." if parameter.default and is_own else ""
    return option(value_type, shown.metavar, help, *names, callback=_check(reader))


def of_parameters(panel: str) -> dict[str, Declared]:
    """The options of the parameters of `generate` with this heading."""
    with_option = {name: parameter.flag for name, parameter in PARAMETERS.items() if parameter.flag}
    return {name: of_parameter(name) for name, flag in with_option.items() if flag.panel == panel}


def _check(reader: Reader) -> Callable[[object], object]:
    def checked(value: object) -> object:
        try:
            return None if value is None else reader.read(value)
        except WrongValue as wrong:
            raise typer.BadParameter(f"{value}, but it is {reader.words}") from wrong

    return checked


def takes(panels: dict[str | None, dict[str, Declared]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes a function a command with these options by name.

    panels: the heading in the help for the options below it; None for typer's own.
    """
    parameters = []
    for panel, declared in panels.items():
        for name, (value_type, default, info) in declared.items():
            info = copy(info)
            info.rich_help_panel = panel
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value_type, info])
            )

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return declare


# fmt: off
PROMPT = {
    "prompt": argument(list[str], "PROMPT",
        "The text to continue or to answer; several are a batch; - or none reads standard input."),
    "file": option(list[Path], "PATH", "Read the prompt from this file, - is standard input; repeat it for a batch. "
        "Each line of a file named .jsonl is a prompt, a text or an object, and gets a line of JSON.", "--file", "-f"),
    "chat": option(bool, None, "Read a text as a user's message, which the model answers, or plain, to continue it. "
        "Default: as a message where the tokenizer has a chat template.", "--chat/--raw"),
    "system": option(str, "TEXT", "The system message that comes before it."),
    "image": option(list[Path], "FILE", "An image that comes before the text, for models that take images; may be "
        "repeated."),
}
MODEL = {
    "model": option(str, "PATH", "Folder, hub id, GGUF file, or smollm2, a chat model in a package of that name; "
        "default: the small model of the package."),
    "adapter": option(Path, "FOLDER", "A LoRA adapter for the model, as PEFT saves it."),
    "config": option(str, "NAME_OR_FILE",
        f"A preset ({', '.join(presets())}) or the JSON file of an EngineConfig; other options override it.",
        autocompletion=presets),
    "dtype": option(str, "NAME", "Data type of the weights: float32, bfloat16, ...; default: auto."),
    "device_map": option(str, "NAME", "Where the model goes: cpu, cuda:1, ...; default: auto.", "--device",
        "--device-map"),
    "trust_remote_code": flag("Allow Python code in the model's repository to run.", "--trust-remote-code"),
    "prefill_chunk_tokens": option(int, "N", "Compute the prompt in chunks of this many tokens, to save memory."),
    "compile": option(str, "NAME", f"Compile the decode step: {', '.join(COMPILE_CHOICES)}; default: off.",
        autocompletion=lambda: list(COMPILE_CHOICES)),
    "weights": option(str, "NAME", f"Weights of linear layers on a CPU: {', '.join(WEIGHTS_CHOICES)}; default: file.",
        autocompletion=lambda: list(WEIGHTS_CHOICES)),
    "activations": option(str, "NAME",
        f"Inputs of products with weights in few bits: {', '.join(ACTIVATIONS_CHOICES)}; default: full.",
        autocompletion=lambda: list(ACTIVATIONS_CHOICES)),
    "linears": option(str, "NAME",
        f"Matrix product of linear layers on a CPU: {', '.join(LINEARS_CHOICES)}; default: auto.",
        autocompletion=lambda: list(LINEARS_CHOICES)),
    "on_oom": option(list[str], "NAME",
        "Fallback when memory is out; may be repeated, in order. Default: release, chunk, offload, split.",
        autocompletion=lambda: list(FALLBACKS)),
}
CACHE = of_parameters(parameters.CACHE) | {
    "cache_option": option(list[str], "NAME=VALUE",
        "An option of the cache, see `engine caches NAME`; may be repeated."),
}
CHOOSING = of_parameters(parameters.CHOOSING) | {
    "set_option": option(list[str], "NAME=VALUE", "Any generation parameter of transformers; may be repeated.",
        "--set"),
}
FORM = of_parameters(parameters.FORM)
ENDING = of_parameters(parameters.ENDING)
OUTPUT = {
    "stream": flag("Print the text as it is generated.", "--stream"),
    "as_json": flag("Print JSON: rows (text, tokens, finish_reason) and stats.", "--json"),
    "jsonl": option(Path, "PATH",
        "Generate for many prompts together, and add a line of JSON for each to this file as it ends; those that have "
        "their text there are left out. Each line of a --file is then a prompt: text, or JSON in a file named .jsonl."),
    "stats": flag("Print speed and cache size to standard error.", "--stats"),
}
PLAN = {
    "path": argument(str, "MODEL",
        "Folder, hub id or GGUF file; only its configuration is read. Default: the small model of the package."),
    "model": option(str, "PATH", "The same as MODEL, as in the other commands."),
    "prompt_tokens": option(int, "N", "Tokens of a prompt.", default=1024, min=1),
    "max_new_tokens": option(int, "N", "New tokens per row, at most.", "--max-new-tokens", "-n", default=20, min=1),
    "batch_size": option(int, "N", "Number of prompts.", default=1, min=1),
    "num_beams": option(int, "N", "Beams of a beam search.", default=1, min=1),
    "num_return_sequences": option(int, "N", "Sequences per prompt.", "--num-return-sequences", "--samples",
        default=1, min=1),
    "do_sample": flag("Sample tokens, also in a beam search.", "--do-sample", "--sample"),
    "cache": option(str, "NAME", "Plan only this backend; default: all.", autocompletion=CacheConfig.names),
    "cache_option": CACHE["cache_option"],
    "dtype": MODEL["dtype"],
    "device": option(str, "NAME", "The device to plan for: cpu, cuda:1, ... It need not be present.", "--device",
        "--device-map"),
    "weights": option(str, "NAME", f"Weights of linear layers on a CPU: {', '.join(WEIGHTS_CHOICES)}.", default="file",
        autocompletion=lambda: list(WEIGHTS_CHOICES)),
    "free_gib": option(float, "GIB", "Free memory of the device; default: what is found.", min=0),
    "prefill_chunk_tokens": option(int, "N", "Tokens of the prompt per step; default: all.", min=1),
    "tp": option(int, "N", "Processes that compute the model together: the plan of one of them.", default=1, min=1),
    "as_json": flag("Print JSON: the fields of `engine.Plan`.", "--json"),
}
CACHES = {
    "name": argument(str, "NAME", "Only this one, with its options.", autocompletion=CacheConfig.names),
    "model": MODEL["model"],
    "tokens": option(int, "N", "Tokens per row to state the size for, 64 to 16777216 (2**24).", default=4096, min=64,
        max=2**24),
    "as_json": flag("Print JSON: model, tokens, dtype and caches (name, summary, options; bytes and bytes_per_token, "
        "or refused).", "--json"),
}
SCORED = {
    "texts": argument(list[str], "TEXT", "A text; there may be several; - or none reads standard input."),
    "file": option(list[Path], "PATH", "Read a text from this file, - is standard input; may be repeated. Each line of "
        "a file named .jsonl is a text: a string, a list of token ids or an object with text.", "--file", "-f"),
    "rows": option(int, "N", "Texts that are computed together; default: 4.", min=1),
    "piece_tokens": option(int, "N", "Read a text in pieces of so many tokens; with a cache that loses something 1 is "
        "as in generation. Default: 64.", min=1),
    "as_json": flag("Print JSON: rows (tokens, logprobs, logprob, perplexity) and both for all texts together.",
        "--json"),
}
LINEARS = {
    "path": PLAN["path"],
    "threads": option(int, "N", "Threads of torch, 1 to 1024; default: what torch uses.", min=1, max=1024),
    "as_json": flag("Print JSON: threads and shapes (outputs, inputs, layers, fastest).", "--json"),
}
BENCH = {
    "path": argument(str, "MODEL", "Folder or hub id. Default: the small model of the package."),
    "model": PLAN["model"],
    "prompt_tokens": option(int, "N", "Tokens of the prompt before the steps.", default=64, min=1),
    "max_new_tokens": option(int, "N", "Steps of a run.", "--max-new-tokens", "-n", default=64, min=2),
    "cache": CACHE["cache"],
    "cache_option": CACHE["cache_option"],
    **{name: MODEL[name] for name in ("dtype", "device_map", "weights", "activations", "linears", "compile")},
    "threads": LINEARS["threads"],
    "quality": option(Path, "FILE", "Read this text too, at most 1,024 tokens, and compare the probabilities with "
        "those of weights and cache in full."),
    "as_json": flag("Print JSON: threads, step (bytes, bandwidth, ms and share of the floor), and quality (tokens, "
        "perplexity, kl, same_top, full_perplexity; or null).", "--json"),
}
COMPILE = {
    "path": argument(str, "MODEL", "Folder or hub id. Default: the small model of the package."),
    "rows": option(int, "N", "Sequences per step: prompts, samples or beams.", default=1, min=1),
    "dtype": MODEL["dtype"],
}
SERVER = {
    "path": COMPILE["path"],
    "host": option(str, "ADDRESS", "Where to listen; 0.0.0.0 for all of the network.", default="127.0.0.1"),
    "port": option(int, "N", "The port.", default=8000, min=0, max=65535),
    "api_key": option(str, "KEY", "What requests bring as a bearer token; also KVENGINE_API_KEY. Default: none."),
    "allowed_host": option(list[str], "NAME", "Another name by which the server may be called, as that of a proxy; "
        "may be repeated. Default: any, but for a server that listens to this machine alone its own names."),
    "name": option(str, "NAME", "The name of the model in requests; default: that of its folder."),
    "drain_seconds": option(int, "SECONDS", "How long requests may go on after SIGTERM or Ctrl-C.", default=60, min=0),
}
LIMITS = {
    "max_batch": option(int, "N", "Texts that are computed at once.", default=32, min=1),
    "max_queue": option(int, "N", "Prompts that may wait; more are answered with 429.", default=256, min=0),
    "max_tokens": option(int, "N", "Most new tokens of a text, also where more are asked for, and their default in a "
        "chat. Default: what the context has room for; 4096 where it has no limit.", min=1),
    "context_tokens": option(int, "N", "Most tokens of a prompt and its answer; default: what the model's own settings "
        "say.", min=2),
    "max_time": option(float, "SECONDS", "A text that takes longer ends as it is.", default=600.0, min=0.001),
    "max_body_mib": option(float, "MIB", "Largest body of a request.", default=4.0, min=0.001),
    "prefix_store_gib": option(float, "GIB", "Memory for the caches of earlier prompts, so that what they have in "
        "common with later ones is not read again; 0: none. Default: what --config says, or else 1.", min=0),
}
CACHE_FILE = {
    "action": argument(str, "ACTION", "inspect."),
    "path": argument(str, "FILE", "A file that `Cache.save` or a chat wrote."),
    "as_json": flag("Print JSON: the fields of `caches.CacheFile`.", "--json"),
}
CONVERSATION = {
    "system": option(str, "TEXT", "The system message."),
    "resume": option(Path, "FILE", "Go on with the conversation in this file, which /save wrote."),
    "when_full": option(str, "NAME", "Where the model's length is reached: drop leaves out the oldest turns, stop "
        "answers with an error.", default="drop"),
}
# fmt: on
TP = option(int, "N", "Processes that compute the model together, as started by torchrun --nproc-per-node N.", min=1)
GENERATE: dict[str | None, dict[str, Declared]] = {
    "The prompt": PROMPT,
    "The model": MODEL | {"tp": TP},
    parameters.CACHE: CACHE,
    parameters.CHOOSING: CHOOSING,
    parameters.FORM: FORM,
    parameters.ENDING: ENDING,
    "What is printed": OUTPUT,
}  # fmt: skip
SCORE: dict[str | None, dict[str, Declared]] = {
    "The texts": SCORED,
    "The model": MODEL,
    parameters.CACHE: CACHE,
}
SERVE: dict[str | None, dict[str, Declared]] = {
    "The server": SERVER,
    "The model": MODEL | {"tp": TP},
    parameters.CACHE: CACHE,
    "What requests may ask for": LIMITS,
}
CHAT: dict[str | None, dict[str, Declared]] = {
    "The conversation": CONVERSATION,
    "The model": MODEL,
    parameters.CACHE: CACHE,
    parameters.CHOOSING: CHOOSING,
    "What form answers have": FORM,
    "When an answer ends": ENDING | {
        "max_new_tokens": of_parameter("max_new_tokens", "Tokens of an answer at most; default: 512."),
    },
}  # fmt: skip
