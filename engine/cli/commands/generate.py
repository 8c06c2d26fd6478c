"""`engine generate`: continues prompts, and prints text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import options, output, rendering, values
from engine.cli.libraries import load_generator, load_processor, start_libraries
from engine.cli.lines import Lines, digests_of, opened, write_lines
from engine.cli.progress import Work
from engine.errors import OptionError
from engine.tables import counted, terminal_width

if TYPE_CHECKING:
    from configs import EngineConfig
    from engine.generator import Generator
    from engine.result import Generation
    from engine.streaming import Stream


@options.takes(options.GENERATE)
def generate(**arguments: Any) -> None:
    """Answer PROMPT, where the tokenizer has a chat template, or else continue it.

    Greedy, unless the model's own settings or an option ask for sampling or for a search.
    """
    is_many = arguments["jsonl"] is not None or values.are_lines(arguments["file"] or [])
    settings = values.engine_config(arguments["config"], arguments)
    if settings.tp > 1 and values.reads_standard_input(arguments["prompt"] or [], arguments["file"] or []):
        raise OptionError(f"--tp {settings.tp}: standard input is that of one process: give PROMPT or a --file")
    texts = (values.lines if is_many else values.prompts)(arguments["prompt"] or [], arguments["file"] or [])
    parameters = values.generation_parameters(arguments)
    per_text = parameters.get("num_return_sequences", 1)
    rows = len(texts) * (per_text if isinstance(per_text, int) else 1)
    if arguments["stream"] and rows > 1 and not is_many and not arguments["as_json"]:
        raise OptionError(f"--stream prints one text, but there are {rows}: add --json, which has the row of each text")
    if arguments["jsonl"] is not None and (arguments["stream"] or arguments["as_json"] or arguments["stats"]):
        raise OptionError("--jsonl writes into a file, and prints no text: leave --stream, --json and --stats out")
    if is_many and (arguments["stream"] or arguments["stats"]):
        raise OptionError("for the lines of a .jsonl file JSON is printed, with stats: leave --stream and --stats out")
    if arguments["system"] is not None and arguments["chat"] is False:
        raise OptionError("--system begins a chat, and --raw reads a prompt plain: leave one of them out")
    if arguments["image"] and (is_many or len(texts) > 1):
        raise OptionError("--image is for one prompt: run it once for each")
    cache_config = values.assignments(arguments["cache_option"], "--cache-option") or None
    inputs, labels = values.without_labels(texts) if is_many else (texts, [])
    if arguments["chat"] or arguments["system"] is not None:
        values.check_texts(inputs, "--chat" if arguments["chat"] else "--system")
        inputs = values.chats(inputs, arguments["system"])
    is_first = values.is_first_rank(settings)
    lines = _lines(arguments, inputs, labels, parameters, settings) if is_many else None
    if not is_first:
        output.mute()
        arguments["stats"] = False
    with Work(is_first) as work:
        start_libraries(work, arguments["model"], arguments["assistant_model"])
        processor = load_processor(work, arguments["model"], settings) if arguments["image"] else None
        generator = load_generator(
            work, arguments["model"], settings, arguments["adapter"], reads_images=bool(processor)
        )
        if arguments["assistant_model"] is not None:
            parameters["assistant_model"] = arguments["assistant_model"]
        if arguments["chat"] is None and _answers(generator, processor):
            _remark_control_tokens(generator, inputs)
            inputs = values.chats(inputs, None)
        if processor is not None:
            inputs = _with_images(generator, processor, inputs[0], arguments["image"])
        if lines is not None:
            work.hide()
            write_lines(
                generator, inputs, lines, parameters | {"cache": arguments["cache"], "cache_config": cache_config}
            )
            return
        work.doing("reading the prompt")
        chunks = generator.stream(inputs, cache=arguments["cache"], cache_config=cache_config, **parameters)
        result = _print(chunks, work, arguments, parameters.get("max_new_tokens"))
    has_limit = {"max_new_tokens", "max_length"} & set(parameters)
    if is_first and "length" in result.finish_reasons and not arguments["stats"] and not has_limit:
        longest = max(map(len, result.tokens))
        output.remark(f"(ended at the limit of {counted(longest, 'token')}: --max-new-tokens or -n sets another)")


def _answers(generator: Generator, processor: Any) -> bool:
    """Whether a text is a user's message to this model."""
    source = generator.tokenizer if processor is None else processor
    return bool(getattr(source, "chat_template", None)) and not generator.model.config.is_encoder_decoder


def _remark_control_tokens(generator: Generator, prompts: list[Any]) -> None:
    """Say it where a prompt looks as if a chat template had written it already."""
    from engine.chat_template import special_tokens

    for token in special_tokens(generator.tokenizer).values():
        if len(token) > 1 and any(isinstance(prompt, str) and prompt.startswith(token) for prompt in prompts):
            output.tell(f"(a prompt begins with {token}, and is read as a user's message: --raw reads it plain)")
            return


def _with_images(generator: Generator, processor: Any, prompt: Any, paths: list[Path]) -> Any:
    from engine.loading.images import read_prompt

    return read_prompt(processor, prompt, paths, generator.model.dtype)


def _lines(
    arguments: dict[str, Any],
    inputs: list[Any],
    labels: list[dict[str, object]],
    parameters: Mapping[str, object],
    settings: EngineConfig,
) -> Lines:
    """The lines of many prompts. Digests leave out where and how steps are computed: after a run that was out of
    memory, another may go on with other settings of these."""
    asked = [arguments[name] for name in ("model", "assistant_model", "cache", "cache_option")]
    asked += [] if arguments["adapter"] is None else [str(arguments["adapter"])]
    asked += ["chat"] if arguments["chat"] is None else []  # if the tokenizer has a template
    configured = [settings.to_dict()[name] for name in ("cache", "dtype", "weights")]
    digests = digests_of(inputs, [parameters, asked, configured])
    lines = Lines(arguments["jsonl"], digests, labels, writes=values.is_first_rank(settings))
    return lines if lines.path is None else opened(lines, lines.path, arguments["file"] or [])


def _print(chunks: Stream, work: Work, arguments: Mapping[str, object], limit: int | None) -> Generation:
    """Print the text; after an error or Ctrl-C the text so far, which `main` finds in the interrupt's `partial`.

    limit: the most new tokens of a row; None if unknown.
    """
    streams, as_json = arguments["stream"], arguments["as_json"]
    try:
        for chunk in chunks:
            if streams:
                work.hide()
                if as_json:
                    output.say_json(chunk.to_dict())
                else:
                    output.say(chunk.text or "", end="")
            else:
                work.count(chunk, limit)
    except KeyboardInterrupt as stopped:
        if not chunks.given_up:  # pressed between two chunks, it is Python's own exception, without a result
            stopped.partial = chunks.result()  # type: ignore[attr-defined]
        raise
    finally:
        work.hide()
        if not chunks.given_up:
            result = chunks.result()
            if as_json:
                output.say_json(result.to_dict())
            else:
                output.say("" if streams else rendering.as_text(result))
            if arguments["stats"]:
                output.tell(rendering.stats(result, terminal_width(100)))
    return result
