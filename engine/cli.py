"""The command line: `engine generate`, `engine caches` and `engine plan`.

Exit codes: 0 done, 1 something failed while generating, 2 a wrong option, prompt or model, 130 interrupted with Ctrl-C.
Texts and JSON go to standard output, everything else to standard error. torch and transformers are imported only when a
command needs them, so that help and completion answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from traceback import print_exception
from typing import Annotated, Any

import typer
from rich.console import Console

from configs import RUNGS, CacheConfig, EngineConfig, preset, presets
from configs.engine import COMPILE_CHOICES, LINEARS_CHOICES
from engine import plan_command, show
from engine.errors import EngineError, Interrupted, OptionError
from engine.progress import Work

app = typer.Typer(no_args_is_help=True, add_completion=True, rich_markup_mode=None)
_messages = Console(stderr=True, highlight=False)
_prints_tracebacks = False

Model = Annotated[str | None, typer.Option(help="Local path or hub id; default: the small model of the package.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: its fields are in the README.")]


@app.callback()
def _engine(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Where something fails, print where in the code; also KVENGINE_DEBUG=1.")
    ] = False,
) -> None:
    """Generate text with a key-value cache chosen by name."""
    global _prints_tracebacks
    _prints_tracebacks = traceback or os.environ.get("KVENGINE_DEBUG", "") not in ("", "0")


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - or nothing reads standard input.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="Take the prompt from this file; repeat it for a batch.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    system: Annotated[str | None, typer.Option(help="The system message that comes before it, with --chat.")] = None,
    # The model and how it runs.
    model: Model = None,
    config: Annotated[
        str | None,
        typer.Option(
            help=f"A preset ({', '.join(presets())}) or the JSON file of an EngineConfig; options given beside it win.",
            metavar="NAME_OR_FILE",
            autocompletion=presets,
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache backend, see `engine caches`, or auto for what fits; default: dynamic.",
            autocompletion=lambda: [*CacheConfig.names(), "auto"],
        ),
    ] = None,
    cache_option: Annotated[
        list[str] | None, typer.Option(help="An option of the cache, NAME=VALUE; may be repeated.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type of the weights: float32, bfloat16, ...; default: auto.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the model goes: cpu, cuda:1, ...; default: auto.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python code that the model's repository brings run.")
    ] = False,
    prefill_chunk_tokens: Annotated[
        int | None, typer.Option(help="Read the prompt in pieces of this many tokens, to save memory.")
    ] = None,
    compile: Annotated[
        str | None,
        typer.Option(help="Compile the decode step; default: off.", autocompletion=lambda: list(COMPILE_CHOICES)),
    ] = None,
    linears: Annotated[
        str | None,
        typer.Option(
            help="Library of linear layers on a CPU; default: auto.", autocompletion=lambda: list(LINEARS_CHOICES)
        ),
    ] = None,
    on_oom: Annotated[
        list[str] | None,
        typer.Option(
            help="When memory is out, try this and go on; may be repeated, in order. Default: release, chunk, offload, "
            "split.",
            autocompletion=lambda: list(RUNGS),
        ),
    ] = None,
    # What is generated.
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at least.")] = None,
    max_time: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Decoding strategy by name.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most probable tokens that add up to this.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens at least this probable, relative to the most probable.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Over 1: repeat less.")] = None,
    num_return_sequences: Annotated[
        int | None, typer.Option("--samples", help="Texts per prompt, sampled or the best of the beams.", min=1)
    ] = None,
    num_beams: Annotated[int | None, typer.Option(help="Search with this many beams.")] = None,
    num_beam_groups: Annotated[
        int | None, typer.Option(help="In so many groups, each kept from the others' ways.")
    ] = None,
    diversity_penalty: Annotated[float | None, typer.Option(help="How strongly the groups are kept apart.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Over 0: beams favour long texts.")] = None,
    penalty_alpha: Annotated[
        float | None, typer.Option(help="Contrastive search: how strongly to avoid what was said; needs --top-k.")
    ] = None,
    prompt_lookup: Annotated[
        int | None, typer.Option(help="Faster where a text repeats itself: try so many tokens of it at a time.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Faster with a small model of the same kind: let it propose tokens.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="So many at a time, with --draft; default: 20.")] = None,
    set_option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other generation parameter of transformers, NAME=VALUE; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.", min=0, max=2**63)] = None,
    # What is printed.
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it comes.")] = False,
    as_json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and cache size to standard error.")] = False,
) -> None:
    """Continue PROMPT. Greedy, unless an option asks for sampling or for a search."""
    prompts = _prompts(prompt, file or [])
    samples = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    branches = {"num_beams": num_beams, "num_beam_groups": num_beam_groups, "diversity_penalty": diversity_penalty,
                "length_penalty": length_penalty, "penalty_alpha": penalty_alpha}  # fmt: skip
    is_search = any(value is not None for value in branches.values())
    if temperature == 0:
        del samples["temperature"]
        _refuse_all(samples | ({} if is_search else {"samples": num_return_sequences}), "--temperature 0 is greedy")
    draws = any(value is not None for value in samples.values()) or num_return_sequences is not None
    options: dict[str, Any] = (
        samples
        | branches
        | {
            "num_return_sequences": num_return_sequences,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "max_time": max_time,
            "stop_strings": stop or None,
            "strategy": strategy,
            "repetition_penalty": repetition_penalty,
            "prompt_lookup_num_tokens": prompt_lookup,
            "num_assistant_tokens": draft_tokens,
            "do_sample": draws if strategy is None and not is_search else None,
        }
    )
    options = {name: value for name, value in options.items() if value is not None} | assignments(set_option, "--set")
    rows = len(prompts) * (num_return_sequences or 1)
    if stream and rows > 1 and not as_json:
        raise OptionError(f"--stream prints one text, but there are {rows}: add --json, which tells them apart")
    if system is not None and not chat:
        raise OptionError("--system belongs to a chat: add --chat")
    given = {"prefill_chunk_tokens": prefill_chunk_tokens, "compile": compile, "linears": linears, "dtype": dtype,
             "device_map": device, "on_oom": on_oom or None,
             "trust_remote_code": trust_remote_code or None}  # fmt: skip
    settings = _engine_config(config, {name: value for name, value in given.items() if value is not None})
    inputs = [_messages_of(text, system) for text in prompts] if chat else prompts

    with Work() as work:
        work.starts_libraries()
        import torch
        from transformers.utils import logging

        from engine.generator import Generator
        from engine.loading import SHIPPED_MODEL

        work.doing("loading the model")
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # what it warns of is refused here, or said in our own words
        if seed is not None:
            torch.manual_seed(seed)
        generator = Generator(model or SHIPPED_MODEL, config=settings)
        if draft is not None:
            options |= _draft(draft, generator)
        work.doing("reading the prompt")
        cache_config = assignments(cache_option, "--cache-option") or None
        watch = [work.watch(max_new_tokens, rows)]
        pieces = generator.stream(inputs, cache=cache, cache_config=cache_config, logits_processor=watch, **options)
        try:
            for piece in pieces:
                if stream:
                    work.hide()
                    print(show.piece_as_json(piece) if as_json else piece.text, end="\n" if as_json else "", flush=True)
        finally:  # also what there is when something fails, or Ctrl-C was pressed
            work.hide()
            if not pieces.given_up:
                result = pieces.result()
                if as_json:
                    print(show.as_json(result))
                else:
                    print("" if stream else show.as_text(result))
    if stats:
        _messages.print(show.stats_table(result.stats))


@app.command()
def caches(
    name: Annotated[str | None, typer.Argument(help="Only this one.", autocompletion=CacheConfig.names)] = None,
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Tokens per row to state the size for.", min=64)] = 4096,
    as_json: Json = False,
) -> None:
    """List the cache backends: what each is for, its options, and what it takes for a model (no weights are loaded)."""
    with Work() as work:
        work.starts_libraries()
        from caches import CacheError, names, recipe
        from engine.loading import SHIPPED_MODEL, load_config
        from engine.sizes import study

        work.doing("reading the model's configuration")
        config = load_config(model or SHIPPED_MODEL)
        dtype = study(config).model.dtype
        found = []
        for one in [recipe(name)] if name else map(recipe, names()):
            work.doing(f"measuring {one.name}")
            entry: dict[str, Any] = {"name": one.name, "summary": one.summary, "options": one.options.defaults()}
            try:
                at_half, at_all = (_bytes_of(one, config, size) for size in (tokens // 2, tokens))
                entry |= {"bytes": at_all, "bytes_per_token": (at_all - at_half) / (tokens - tokens // 2)}
            except CacheError as error:
                entry |= {"refused": str(error)}
            found.append(entry)
    report = {"model": str(model or "shipped"), "tokens": tokens, "dtype": str(dtype).removeprefix("torch."),
              "caches": found}  # fmt: skip
    if as_json:
        print(json.dumps(report))
        return
    out, refused = Console(highlight=False), show.caches_refused(report)
    table = show.caches_table(report)
    if table.row_count:
        out.print(table)
    if refused:
        out.print(refused, markup=False)


app.command()(plan_command.plan)


def _bytes_of(recipe: Any, model_config: Any, tokens: int) -> int:
    """Of a backend with so many tokens in one row; with an encoder its source has as many."""
    from engine.planning import cache_bytes

    options = {"max_cache_len": tokens} if recipe.has_a_size else {}
    source = tokens if model_config.is_encoder_decoder else 0
    return sum(cache_bytes(model_config, recipe.name, options, tokens=tokens, source_tokens=source).values())


def _draft(path: str, generator: Any) -> dict[str, Any]:
    """The arguments that make the model at `path` the draft of the generator's."""
    from engine.loading import load

    model, tokenizer = load(path, None, generator.config)
    is_same = tokenizer.get_vocab() == generator.tokenizer.get_vocab()
    return {"assistant_model": model} | ({} if is_same else {"assistant_tokenizer": tokenizer})


def _engine_config(chosen: str | None, changes: dict[str, Any]) -> EngineConfig:
    """The configuration that `--config` chose, with these changes."""
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
    return config.update(**changes)[0]


def _prompts(prompt: str | None, files: list[Path]) -> list[str]:
    """The texts to continue. A newline at the end of a file or of standard input belongs to the text."""
    if files:
        if prompt is not None:
            raise OptionError("the prompt was given twice: as PROMPT and as --file")
        return [_read(str(file), file.read_bytes) for file in files]
    if prompt not in (None, "-"):
        return [prompt]
    if sys.stdin.isatty():
        raise OptionError("there is no PROMPT: give one, name a --file, or pipe it into standard input")
    return [_read("standard input", sys.stdin.buffer.read)]


def _read(where: str, read: Any) -> str:
    try:
        return read().decode()
    except OSError as error:
        raise OptionError(f"{where} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{where} is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def assignments(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value is JSON where it can be read as that, else a text."""
    values: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"{option} {pair}: it takes NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def _refuse_all(options: dict[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{reason}, so --{name.replace('_', '-')} cannot apply: leave one of them out")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code. arguments: those of the process by default."""
    try:
        app(arguments)
    except Exception as error:
        from caches import CacheError

        if _prints_tracebacks:
            print_exception(error)
        known = isinstance(error, (EngineError, CacheError))
        message = str(error) if known else f"{type(error).__name__}: {error}"
        _messages.print(f"error: {' '.join(message.split())}", style="red", markup=False, soft_wrap=True)
        sys.exit(2 if known and not isinstance(error, Interrupted) else 1)


if __name__ == "__main__":
    main()
