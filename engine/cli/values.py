"""Converts the options of the command line to arguments of the library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from configs import EngineConfig, preset, presets
from engine.cli import options
from engine.errors import OptionError
from engine.parameters import PARAMETERS

_SAMPLING = [name for name, parameter in PARAMETERS.items() if parameter.draws and parameter.flag]
_SEARCHING = ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "penalty_alpha")
# Options with the name of their generation parameter.
_NAMED = [
    name
    for name in (*options.CHOOSING, *options.FORM, *options.ENDING)
    if name not in ("assistant_model", "set_option")
]
# Parameters that --set refuses, with the remedy.
_INSTEAD = {"inputs": "PROMPT", "prompt": "PROMPT", "as_json": "--json", "set_option": "--set",
            "cache_config": "--cache-option", "choices": "--choice",
            "logits_processor": "engine.generate, in Python"}  # fmt: skip
# Options that are fields of `EngineConfig`.
_SETTINGS = [name for name in (*options.MODEL, "tp") if name not in ("model", "adapter", "config")]

_LABELS = ("id", "custom_id")  # of a line of JSON

_PYTHONS = {"True": True, "False": False, "None": None}


class KnownText(NamedTuple):
    """text: as it is, or its token ids. title: what a table calls it. labels: of its line of JSON."""

    title: str
    labels: dict[str, object]
    text: str | list[object]


def generation_parameters(arguments: dict[str, Any], later: Mapping[str, object] | None = None) -> dict[str, Any]:
    """The generation parameters among the options. later: those that were given after them, None for "not said".

    A sampling parameter turns sampling on; a temperature of 0 means greedy. `--set NAME=VALUE` is the same as the
    option of that name. Raises `OptionError` for options that contradict each other.
    """
    for name in ("regex", "stop_strings", "choices"):
        for text in [arguments[name]] if isinstance(arguments[name], str) else arguments[name] or []:
            checked(text, _option(name))
    if arguments["choices"] and not any(arguments["choices"]):
        raise OptionError("every --choice is empty, so every text would be empty: give one that is not")
    further = assignments(arguments["set_option"], "--set")
    values = arguments | {"do_sample": arguments["do_sample"] or None}  # a flag is False if it was not given
    if (file := arguments["json_schema"]) is not None:
        values["json_schema"] = _read(str(file), file.read_bytes)
    named = {name: values[name] for name in _NAMED if values[name] not in (None, [])}
    for name in further:
        if name in named:
            raise OptionError(f"{name} was given twice: as {_option(name)} and as --set {name}: leave one of them out")
        if name in _INSTEAD or (name in arguments and name not in _NAMED):
            raise OptionError(f"--set does not give {name}: use {_option(name)}")
    further |= later or {}
    named |= {name: further.pop(name) for name in _NAMED if name in further}
    further = {name: value for name, value in further.items() if value is not None or name not in (later or {})}
    named = {name: value for name, value in named.items() if value is not None}
    searches = any(name in named for name in _SEARCHING)
    draws = any(name in named for name in (*_SAMPLING, "num_return_sequences"))
    if named.get("temperature") == 0:
        del named["temperature"]
        conflicts = [name for name in (*_SAMPLING, *(() if searches else ("num_return_sequences",))) if name in named]
        for name in [*conflicts, *(["do_sample"] if named.get("do_sample") else [])]:
            raise OptionError(f"--temperature 0 is greedy, so {_option(name)} cannot apply: leave one of them out")
        named["do_sample"] = False
    elif draws and not searches and "strategy" not in named:
        named.setdefault("do_sample", True)
    return named | further


def later_parameter(name: str, text: str) -> tuple[str, object]:
    """The name and value of a generation parameter that is set within a chat. Raises `OptionError` for others."""
    text = text.capitalize() if text.capitalize() in _PYTHONS else text  # as it is typed: none, true
    [(name, value)] = assignments([f"{name}={text}"], "/set").items()
    if name in _INSTEAD or name in ("cache", "system", *_SETTINGS, "model", "assistant_model"):
        raise OptionError(f"/set is for generation parameters, and {name} is none: see /help, or begin another chat")
    return name, value


def one_model(path: str | None, named: str | None) -> str | None:
    """path: as MODEL. named: as --model. Raises `OptionError` where both were given."""
    if path is not None and named is not None:
        raise OptionError("the model was given twice: as MODEL and as --model: leave one of them out")
    return named if path is None else path


def _option(name: str) -> str:
    """The command line's option for a parameter."""
    return _INSTEAD.get(name, options.option_name(name))


def engine_config(chosen: str | None, arguments: Mapping[str, object]) -> EngineConfig:
    """The configuration of `--config`, with the other options applied. chosen: a preset or a JSON file."""
    if chosen is None:
        config = EngineConfig()
    elif chosen in presets():
        config = preset(chosen)
    elif Path(chosen).is_file():
        config = EngineConfig.from_json_file(chosen)
    else:
        raise OptionError(
            f"--config {chosen} is neither a preset nor a JSON file that exists; presets: {', '.join(presets())}"
        )
    return config.update(
        **{name: arguments[name] for name in _SETTINGS if arguments.get(name) not in (None, [], False)}
    )[0]


def assignments(pairs: list[str] | None, option: str) -> dict[str, object]:
    """`NAME=VALUE` pairs as a dict. A value is JSON, True, False or None if it can be, else a string."""
    values: dict[str, object] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"{option} {pair}: it takes NAME=VALUE")
        name = name.replace("-", "_")
        if name in values:
            raise OptionError(f"{name} was given twice with {option}: leave one of them out")
        try:
            values[name] = _PYTHONS[text] if text in _PYTHONS else json.loads(text)
        except json.JSONDecodeError:
            values[name] = checked(text, option)
    return values


def prompts(texts: list[str], files: list[Path], metavar: str = "PROMPT") -> list[str]:
    """The prompts, from arguments, files or standard input. A trailing newline is part of the prompt.

    metavar: what the help of the command calls them.
    """
    if texts and files:
        raise OptionError(f"the {metavar.lower()} was given twice: as {metavar} and as --file")
    if [*texts, *map(str, files)].count("-") > 1:
        raise OptionError("- is standard input, which can be read once, but it was given several times")
    if files:
        return [_standard_input() if str(file) == "-" else _read(str(file), file.read_bytes) for file in files]
    if not texts:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _standard_input()
        if not text:
            raise OptionError(
                f'there is no {metavar}: give one in quotes, as "def main():", or a --file, or pipe it into standard '
                "input"
            )
        return [text]
    return [_standard_input() if text == "-" else checked(text, metavar) for text in texts]


def is_first_rank(config: EngineConfig) -> bool:
    """Whether this process is the one that prints and serves, of those that compute the model."""
    return config.tp == 1 or os.environ.get("RANK", "0") == "0"


def reads_standard_input(texts: list[str], files: list[Path]) -> bool:
    return "-" in [*texts, *map(str, files)] or not (texts or files)


def lines(texts: list[str], files: list[Path]) -> list[Any]:
    """Many prompts: the arguments, or the lines of the files: texts, or JSON where a name ends in .jsonl."""
    texts_read = prompts(texts, files)
    if not files:
        return texts_read
    return [line for file, text in zip(files, texts_read, strict=True) for line in _lines(str(file), text)]


def are_lines(files: list[Path]) -> bool:
    """Whether each line of the files is a prompt, as their names say. Raises `OptionError` where only some say so."""
    plain = [file for file in files if file.suffix != ".jsonl"]
    if plain and len(plain) < len(files):
        raise OptionError(
            f"{plain[0]} is one prompt, and the lines of a .jsonl file are one each: run them apart, or give --jsonl, "
            "which takes each line of both for a prompt"
        )
    return bool(files) and not plain


def without_labels(prompts: list[Any]) -> tuple[list[object], list[dict[str, object]]]:
    """The prompts, and the labels of each, which its output has too."""
    labels = [
        {name: prompt[name] for name in _LABELS if name in prompt} if isinstance(prompt, dict) else {}
        for prompt in prompts
    ]
    plain = [
        {name: value for name, value in prompt.items() if name not in _LABELS} if isinstance(prompt, dict) else prompt
        for prompt in prompts
    ]
    return plain, labels


def known_texts(texts: list[str], files: list[Path]) -> list[KnownText]:
    """The texts to score: the arguments, files, the lines of files named .jsonl, or standard input."""
    contents = prompts(texts, files, "TEXT")
    if not files:
        return [KnownText(text, {}, text) for text in contents]
    known = []
    for file, content in zip(files, contents, strict=True):
        if file.suffix != ".jsonl":
            known.append(KnownText(file.name, {}, content))
            continue
        plain, labels = without_labels(list(_lines(str(file), content)))
        for line, label in zip(plain, labels, strict=True):
            text = line.get("text", line.get("prompt")) if isinstance(line, dict) else line
            if not isinstance(text, str | list):
                raise OptionError(
                    f'a line of {file} has no text: {line!r:.80}: write a text, a list of token ids, or {{"text": ...}}'
                )
            known.append(KnownText(str(next(iter(label.values()), text)), label, text))
    if not known:
        raise OptionError(f"there is no text in {', '.join(map(str, files))}: write a text into each line")
    return known


def _lines(path: str, text: str) -> Iterator[object]:
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` ends lines at other characters too
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            prompt = _prompt_of(json.loads(line)) if path.endswith(".jsonl") else line
        except (ValueError, RecursionError) as error:
            raise OptionError(f"line {number} of {path} is no JSON: {error}") from error
        inputs = (
            {name: value for name, value in prompt.items() if name not in _LABELS}
            if isinstance(prompt, dict)
            else prompt
        )
        if inputs is None or inputs == {} or (isinstance(inputs, dict) and inputs.get("prompt", "") is None):
            raise OptionError(f"line {number} of {path} has no prompt: {line:.80}")
        yield prompt


def _prompt_of(line: object) -> object:
    """The prompt of a line of JSON: an object may name it `messages`, as in a request of OpenAI's protocol."""
    if isinstance(line, dict) and "messages" in line and "prompt" not in line:
        return {"prompt" if name == "messages" else name: value for name, value in line.items()}
    return line


def checked(text: str, where: str) -> str:
    """`text`, an argument. Raises `OptionError` if its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise OptionError(f"{where} is no text in UTF-8: '{shown}' at character {error.start}") from error
    return text


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """A new chat with one message of the user."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": checked(system, "--system")}, user]


def chats(prompts: list[Any], system: str | None) -> list[Any]:
    """The prompts, each that is a text, or a mapping with one, as a new chat."""
    return [
        prompt
        if (text := _text_of(prompt)) is None
        else prompt | {"prompt": messages(text, system)}
        if isinstance(prompt, dict)
        else messages(text, system)
        for prompt in prompts
    ]


def check_texts(prompts: list[Any], option: str) -> None:
    """Raise `OptionError` where a prompt is no text. option: which makes a chat of them."""
    for number, prompt in enumerate(prompts, 1):
        if _text_of(prompt) is None:
            raise OptionError(f"{option} makes a chat of a text, and prompt {number} is none: {prompt!r:.80}")


def _text_of(prompt: object) -> str | None:
    """The text of a prompt, or of a mapping with one; None for others."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return text if isinstance(text, str) else None


def size(amount: float, unit: int, option: str) -> int:
    """Bytes of `amount` units. Raises `OptionError` for infinity and NaN."""
    if not isfinite(amount):
        raise OptionError(f"{option} {amount} is no size: give a number, 0 or more")
    return int(amount * unit)


def _standard_input() -> str:
    if sys.stdin is None:
        raise OptionError("standard input is closed: pipe a text in, or give it as PROMPT")
    return _read("standard input", sys.stdin.buffer.read)


def _read(where: str, read_bytes: Callable[[], bytes]) -> str:
    try:
        return read_bytes().decode("utf-8-sig")  # editors on Windows begin a file with a mark
    except OSError as error:
        raise OptionError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{where} is no text in UTF-8: {error.reason} at byte {error.start}") from error
