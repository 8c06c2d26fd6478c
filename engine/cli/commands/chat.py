"""`engine chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from engine.cli import options, output, rendering, values
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.cli.typed import editing, read_line
from engine.errors import EngineError, OptionError
from engine.parameters import PARAMETERS
from engine.tables import counted, terminal_width

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from engine.generator import Generator
    from engine.reuse.chat import Chat

_TOKENS = 512  # of an answer, unless an option says otherwise
_BLOCK = '"""'
# Parameters that say how tokens are chosen.
_CHOOSING = frozenset(("strategy", "do_sample", "num_beams", "penalty_alpha", "generation_config"))
# Where nothing says it: the likeliest tokens alone make small models repeat themselves.
_SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@options.takes(options.CHAT)
def chat(**arguments: Any) -> None:
    """Talk to a model. A text that is pasted is one message.

    A line that ends with \\ goes on, and so does what begins with \"\"\" up to the next \"\"\". /help lists commands.
    """
    _parameters(arguments)  # raises before anything is loaded
    settings = values.engine_config(arguments["config"], arguments)
    if settings.tp > 1:
        raise OptionError(f"tp={settings.tp}: a terminal is that of one process: leave tp out, or use `engine serve`")
    cache_config = values.assignments(arguments["cache_option"], "--cache-option") or None
    with Work() as work:
        start_libraries(work, arguments["model"], arguments["assistant_model"])
        generator = load_generator(work, arguments["model"], settings, arguments["adapter"])
        talk = generator.chat(
            arguments["system"],
            cache=arguments["cache"],
            cache_config=cache_config,
            resume=arguments["resume"],
            when_full=arguments["when_full"],
            **_parameters(arguments, generator.model.generation_config),
        )
    Terminal(talk, generator, arguments).run(_banner(generator, talk))


def _parameters(
    arguments: dict[str, Any], model_settings: GenerationConfig | None = None, later: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The generation parameters of every turn. model_settings: the model's own. later: what was given with /set."""
    parameters = values.generation_parameters(arguments, later)
    if "max_length" not in parameters:
        parameters.setdefault("max_new_tokens", _TOKENS)
    if arguments["assistant_model"] is not None:
        parameters["assistant_model"] = arguments["assistant_model"]
    return parameters if model_settings is None else _chosen_by_default(parameters, model_settings) | parameters


def _chosen_by_default(parameters: Mapping[str, object], model_settings: GenerationConfig) -> dict[str, Any]:
    """How tokens are chosen, as far as neither the parameters nor the model's settings say so."""
    asked = parameters.keys() & _CHOOSING - {"do_sample"} or parameters.get("do_sample") is False
    if asked or any(getattr(model_settings, name, None) is not None for name in _CHOOSING):
        return {}
    has_values = any(getattr(model_settings, name, None) is not None for name, row in PARAMETERS.items() if row.draws)
    return {"do_sample": True} if has_values else _SAMPLED


def _banner(generator: Generator, talk: Chat) -> str:
    """The model, its weights and context, and the cache."""
    from engine.kernels.weight_conversion import weights_in_words

    model = generator.model
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    context_text = "" if context is None else f", context of {counted(context, 'token')}"
    weights = weights_in_words(model)
    return f"{type(model).__name__}, {weights} on {model.device}, cache {talk.backend}{context_text}"


class Terminal:
    """Reads messages and commands from standard input and prints answers.

    arguments: the options of the command line, over which /set goes.
    """

    def __init__(self, chat: Chat, generator: Generator, arguments: dict[str, Any]):
        self._chat, self._generator, self._arguments = chat, generator, arguments
        self._later: dict[str, object] = {}
        self._commands: dict[str, ChatCommand] = {
            "/save": ChatCommand(self._save, "FILE: write the conversation and its cache to a file"),
            "/load": ChatCommand(self._load, "FILE: go on with a conversation that was saved"),
            "/undo": ChatCommand(self._undo, "remove the last message and its answer"),
            "/retry": ChatCommand(self._retry, "another answer to the last message; sampled, unless options say how"),
            "/clear": ChatCommand(self._clear, "remove all messages but the system message"),
            "/system": ChatCommand(self._system, "TEXT: another system message; alone: which one it is", _text),
            "/set": ChatCommand(
                self._set, "NAME VALUE: a parameter of answers; VALUE none resets it; alone: all", _pair
            ),
            "/stats": ChatCommand(self._stats, "speed and cache size of the last answer"),
            "/cache": ChatCommand(self._cache, "NAME: keep the cache in another backend; alone: which one it is"),
            "/help": ChatCommand(self._help, "these commands"),
            "/exit": ChatCommand(self._exit, "end the chat"),
        }

    def run(self, banner: str) -> None:
        """banner: shown first where someone is at the terminal."""
        if sys.stdin.isatty():
            output.tell(f"{banner}\n{self._parameters_line}")
            output.tell("/help lists the commands, Ctrl-C ends an answer, Ctrl-D ends the chat.")
        with editing():
            self._answer_all()

    def _answer_all(self) -> None:
        for message, is_text in self._messages():
            try:
                if message.startswith("/") and not is_text:
                    self._obey(message)
                elif message.strip():
                    self._print(self._chat.stream(values.checked(message, "the message")))
            except (EngineError, OSError) as error:
                output.complain(str(error))
            except EOFError:
                return
            except KeyboardInterrupt:
                output.say("")  # the answer so far is the answer

    def _messages(self) -> Iterator[tuple[str, bool]]:
        while True:
            try:
                yield self._message()
            except EOFError:
                return
            except KeyboardInterrupt:
                output.say("")

    def _message(self) -> tuple[str, bool]:
        """A message, and whether it was pasted or a block, and so no command. It ends with the input, too."""
        line = read_line("> ")
        if "\n" in line:
            return line, True
        if line.startswith(_BLOCK):
            lines = [line.removeprefix(_BLOCK)]
            with suppress(EOFError):
                while not lines[-1].endswith(_BLOCK):
                    lines.append(read_line("... "))
            return "\n".join(lines).removesuffix(_BLOCK), True
        lines = [line]
        with suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read_line("... "))
        return "\n".join(lines), False

    def _print(self, chunks: Iterator[Any]) -> None:
        before = self._chat.left_out
        output.say_pieces(chunk.text or "" for chunk in chunks)
        if count := self._chat.left_out - before:
            output.tell(f"(the model's length is reached: the oldest {counted(count, 'message')} were left out)")

    def _obey(self, line: str) -> None:
        name, *rest = line.split(None, 1)
        if name not in self._commands:
            raise OptionError(f"there is no command {name}: /help lists them, and {_BLOCK} begins a message")
        command = self._commands[name]
        try:
            arguments = command.read(rest[0] if rest else "")
        except ValueError as error:
            raise OptionError(f"{line}: {error}: put the name between double quotes") from error
        try:
            signature(command.function).bind(*arguments)
        except TypeError as error:
            raise OptionError(f"{name} {command.help}") from error
        command.function(*arguments)

    def _save(self, path: str) -> None:
        self._chat.save(path)
        output.tell(f"saved to {path}: {self._standing}")

    def _load(self, path: str) -> None:
        self._chat.resume(path)
        output.tell(f"loaded from {path}: {self._standing}")

    def _undo(self) -> None:
        self._chat.undo()
        output.tell(f"removed the last message: {self._standing}")

    def _clear(self) -> None:
        self._chat.clear()
        output.tell(f"removed the messages: {self._standing}")

    @property
    def _standing(self) -> str:
        cache = self._chat.cache
        tokens = 0 if cache is None else cache.total_tokens
        return f"the conversation has {counted(len(self._chat.messages), 'message')}, {counted(tokens, 'token')} cached"

    def _exit(self) -> None:
        raise EOFError

    def _retry(self) -> None:
        chooses = _CHOOSING & self._chat.parameters.keys()
        self._print(self._chat.stream_retry(**({} if chooses else {"do_sample": True})))  # else the same one again

    def _system(self, text: str | None = None) -> None:
        if text is not None:
            self._chat.system = values.checked(text, "the system message")
        output.tell(f"system message: {self._chat.system or 'none'}")

    def _set(self, name: str | None = None, text: str | None = None) -> None:
        if name is not None:
            if text is None:
                raise OptionError(f"/set {name}: give a value, or none to reset it")
            name, value = values.later_parameter(name, text)
            model_settings = self._generator.model.generation_config
            parameters = _parameters(self._arguments, model_settings, self._later | {name: value})
            self._generator.chat(**parameters)  # raises as a turn would
            self._later[name], self._chat.parameters = value, parameters
        output.tell(self._parameters_line)

    @property
    def _parameters_line(self) -> str:
        shown = (f"{name}={json.dumps(value, default=str)}" for name, value in self._chat.parameters.items())
        return f"parameters: {', '.join(shown)}"

    def _stats(self) -> None:
        if self._chat.last is None:
            raise OptionError("there is no answer yet")
        output.tell(rendering.stats(self._chat.last, terminal_width(100)))

    def _cache(self, name: str | None = None) -> None:
        if name is not None:
            self._chat.use(name)
        output.tell(f"cache: {self._chat.backend}")

    def _help(self) -> None:
        width = max(map(len, self._commands))
        output.tell("\n".join(f"{name:{width}}  {command.help}" for name, command in self._commands.items()))


@dataclass(frozen=True)
class ChatCommand:
    """help: of its arguments, and what it does. read: makes its arguments of what is typed behind its name."""

    function: Callable[..., None]
    help: str
    read: Callable[[str], list[str]] = shlex.split


def _text(typed: str) -> list[str]:
    return [typed.strip()] if typed.strip() else []


def _pair(typed: str) -> list[str]:
    return re.split(r"\s*=\s*|\s+", typed.strip(), maxsplit=1) if typed.strip() else []
