"""`engine chat`: a conversation in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

from engine.cli import options, output, rendering, values
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work
from engine.errors import EngineError, OptionError
from engine.tables import counted, terminal_width

if TYPE_CHECKING:
    from engine.generator import Generator
    from engine.reuse.chat import Chat

_TOKENS = 512  # of an answer, unless an option says otherwise
_BLOCK = '"""'


@options.takes(options.CHAT)
def chat(**arguments: Any) -> None:
    """Talk to a model. A line that ends with \\ goes on, and so does what begins with \"\"\" up to the next \"\"\"."""
    parameters = values.generation_parameters(arguments)
    if "max_length" not in parameters:
        parameters.setdefault("max_new_tokens", _TOKENS)
    settings = values.engine_config(arguments["config"], arguments)
    if settings.tp > 1:
        raise OptionError(f"tp={settings.tp}: a terminal is that of one process: leave tp out, or use `engine serve`")
    cache_config = values.assignments(arguments["cache_option"], "--cache-option") or None
    with Work() as work:
        start_libraries(work, arguments["model"], arguments["assistant_model"])
        generator = load_generator(work, arguments["model"], settings, arguments["adapter"])
        if arguments["assistant_model"] is not None:
            parameters["assistant_model"] = arguments["assistant_model"]
        talk = generator.chat(
            arguments["system"],
            cache=arguments["cache"],
            cache_config=cache_config,
            resume=arguments["resume"],
            **parameters,
        )
    chooses = {"strategy", "do_sample", "num_beams", "penalty_alpha", "generation_config"} & parameters.keys()
    Terminal(talk, {} if chooses else {"do_sample": True}).run(_banner(generator, talk))


def _banner(generator: Generator, talk: Chat) -> str:
    """The model, its data type and context, and the cache."""
    model = generator.model
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    context_text = "" if context is None else f", context of {counted(context, 'token')}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{type(model).__name__}, {dtype} on {model.device}, cache {talk.backend}{context_text}"


class Terminal:
    """Reads messages and commands from standard input and prints answers.

    retry_parameters: of an answer that is tried again, which would be the same one without chance.
    """

    def __init__(self, chat: Chat, retry_parameters: Mapping[str, object]):
        self._chat, self._again = chat, retry_parameters
        self._commands: dict[str, tuple[Callable[..., None], str]] = {
            "/save": (self._save, "FILE: write the conversation and its cache to a file"),
            "/load": (self._load, "FILE: go on with a conversation that was saved"),
            "/undo": (self._undo, "remove the last message and its answer"),
            "/retry": (self._retry, "another answer to the last message, sampled unless an option says how"),
            "/stats": (self._stats, "speed and cache size of the last answer"),
            "/cache": (self._cache, "NAME: keep the cache in another backend; without a name: which one it is"),
            "/help": (self._help, "these commands"),
            "/exit": (self._exit, "end the chat"),
        }

    def run(self, banner: str) -> None:
        """banner: shown first where someone is at the terminal."""
        if sys.stdin.isatty():
            output.tell(f"{banner}\n/help lists the commands, Ctrl-C ends an answer, Ctrl-D ends the chat.")
            with suppress(ImportError):  # not on every system: lines can be edited and come again
                import readline  # noqa: F401
        for message, is_block in self._messages():
            try:
                if message.startswith("/") and not is_block:
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
        """A message, and whether it was a block, which is no command. It ends with the input, too."""
        line = _line("> ")
        if line.startswith(_BLOCK):
            lines = [line.removeprefix(_BLOCK)]
            with suppress(EOFError):
                while not lines[-1].endswith(_BLOCK):
                    lines.append(_line("... "))
            return "\n".join(lines).removesuffix(_BLOCK), True
        lines = [line]
        with suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(_line("... "))
        return "\n".join(lines), False

    def _print(self, chunks: Iterator[Any]) -> None:
        for chunk in chunks:
            output.say(chunk.text or "", end="")
        output.say("")

    def _obey(self, line: str) -> None:
        name = line.split()[0]
        if name not in self._commands:
            raise OptionError(f"there is no command {name}: /help lists them, and {_BLOCK} begins a message")
        command, says = self._commands[name]
        try:
            _, *arguments = shlex.split(line)
        except ValueError as error:
            raise OptionError(f"{line}: {error}: put the name between double quotes") from error
        try:
            signature(command).bind(*arguments)
        except TypeError as error:
            raise OptionError(f"{name} {says}") from error
        command(*arguments)

    def _save(self, path: str) -> None:
        self._chat.save(path)
        output.tell(f"saved to {path}: {self._standing}")

    def _load(self, path: str) -> None:
        self._chat.resume(path)
        output.tell(f"loaded from {path}: {self._standing}")

    def _undo(self) -> None:
        self._chat.undo()
        output.tell(f"removed the last message: {self._standing}")

    @property
    def _standing(self) -> str:
        cache = self._chat.cache
        tokens = 0 if cache is None else cache.total_tokens
        return f"the conversation has {counted(len(self._chat.messages), 'message')}, {counted(tokens, 'token')} cached"

    def _exit(self) -> None:
        raise EOFError

    def _retry(self) -> None:
        self._print(self._chat.stream_retry(**self._again))

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
        output.tell("\n".join(f"{name:{width}}  {text}" for name, (_, text) in self._commands.items()))


def _line(prompt: str) -> str:
    """A line of standard input, without its end. Raises `EOFError`, and `OptionError` if it is no text."""
    try:
        line = input(prompt) + "\n" if sys.stdin.isatty() else sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is no text in UTF-8: {error.reason} at byte {error.start}") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n")
