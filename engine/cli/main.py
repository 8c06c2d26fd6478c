"""The entry point of the command line: commands, errors and exit codes.

Exit codes: 0 success, 1 a failure while generating or a refused cache of a plan, 2 a wrong option, prompt or model, 130
interrupted with Ctrl-C, 141 the reader of the output closed the pipe. torch and transformers are imported only when a
command needs them.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from platform import python_version
from traceback import print_exception
from typing import Annotated, Any

import typer

from engine.cli import output
from engine.cli.commands.cache_files import cache
from engine.cli.commands.caches import caches
from engine.cli.commands.chat import chat
from engine.cli.commands.compile import compile
from engine.cli.commands.generate import generate
from engine.cli.commands.linears import linears
from engine.cli.commands.plan import plan
from engine.cli.commands.score import score
from engine.cli.commands.serve import serve
from engine.cli.help import Command
from engine.errors import EngineError, GenerationInterrupted, OptionError
from engine.tables import counted

NAME = "engine"
_settings = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda name: name.replace("_", "-")}
app = typer.Typer(rich_markup_mode=None, context_settings=_settings)
_SHORT: dict[Callable[..., None], str] = {
    generate: "Continue a prompt.",
    chat: "Talk to a model.",
    score: "Say how likely a model finds texts.",
    serve: "Answer requests of OpenAI's HTTP protocol.",
    caches: "List the cache backends and their options.",
    plan: "Say what a run takes before it runs.",
    compile: "Compile a model's layers ahead.",
    cache: "Say what is in a saved cache.",
    linears: "List the fastest matrix products of linear layers on this processor.",
}
for _command, _help in _SHORT.items():
    app.command(cls=Command, short_help=_help)(_command)


def _print_versions(is_given: bool) -> None:
    if not is_given:
        return
    for name in ("kvengine", "torch", "transformers"):
        try:
            output.say(f"{name} {version(name)}")
        except PackageNotFoundError:
            output.say(f"{name} is not installed as a package")
    output.say(f"Python {python_version()}")
    raise typer.Exit()


@app.callback(invoke_without_command=True, no_args_is_help=False)
def _engine(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions.", callback=_print_versions, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Where something fails, print where in the code; also KVENGINE_DEBUG=1.")
    ] = False,
) -> None:
    """Generate text with a key-value cache chosen by name.

    engine generate "def main():" begins with the small model of the package.
    """
    context.obj["traceback"] |= traceback
    if context.invoked_subcommand is None:
        output.say(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code; errors are one line. arguments: by default those of the process."""
    if sys.stderr is None:  # it was closed. Its number would go to the next file, which C libraries then write to
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal cannot show
    if f"_{NAME.upper()}_COMPLETE" in os.environ:
        app(prog_name=NAME)
    settings = {"traceback": os.environ.get("KVENGINE_DEBUG", "") not in ("", "0")}
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_completion(arguments)
        with typer.main.get_command(app).make_context(NAME, arguments, obj=settings) as context:
            context.command.invoke(context)
        code = 0
    except typer.Exit as end:
        code = end.exit_code
    except KeyboardInterrupt as error:
        code = _report(error, False)
    except BrokenPipeError:  # while a help text is printed; commands print with `output`
        output.leave(sys.stdout)
        code = output.UNREAD
    except Exception as error:
        code = _report(error, settings["traceback"])
    sys.exit(code)


def _check_completion(arguments: list[str]) -> None:
    """Refuse a name after typer's completion options, which detect the shell themselves and would ignore it."""
    options = [word.replace("_", "-") for word in takewhile(lambda word: word.startswith("-"), arguments)]
    for option in ("--install-completion", "--show-completion"):
        if option in options and len(arguments) > len(options):
            raise OptionError(
                f"{option} {arguments[len(options)]}: it takes no name, run it in the shell that needs the completion"
            )


def _report(error: BaseException, prints_traceback: bool) -> int:
    """Print what went wrong; returns the exit code."""
    if prints_traceback:
        print_exception(error)
    try:
        if isinstance(error, KeyboardInterrupt):
            partial = getattr(error, "partial", None)
            output.tell("interrupted" + (f" after {counted(partial.stats.new_tokens, 'token')}" if partial else ""))
            return 130
        code, message = _code_and_message(error)
        output.complain(message)
        return code
    except typer.Exit as end:
        return end.exit_code


def _code_and_message(error: Any) -> tuple[int, str]:
    if hasattr(error, "format_message"):  # click's errors of parsing
        context = getattr(error, "ctx", None)
        where = "" if context is None else f" (see `{context.command_path} -h`)"
        return error.exit_code, f"{error.format_message().rstrip('.')}{where}"
    if isinstance(error, EngineError):
        return (1 if isinstance(error, GenerationInterrupted) else 2), str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}"
    return 1, f"{type(error).__name__}: {error}"
