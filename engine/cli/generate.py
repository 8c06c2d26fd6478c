"""`engine generate`: text after a prompt, as text or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.cli import options, output, rendering, values
from engine.cli.libraries import start_libraries
from engine.cli.progress import Work
from engine.errors import OptionError
from engine.tables import terminal_width

if TYPE_CHECKING:
    from engine.generator import Generator
    from engine.result import Generation
    from engine.streaming import Stream


def generate(
    prompt: options.Prompt = None,
    file: options.File = None,
    chat: options.Chat = False,
    system: options.System = None,
    model: options.Model = None,
    config: options.Config = None,
    dtype: options.Dtype = None,
    device_map: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    prefill_chunk_tokens: options.PrefillChunkTokens = None,
    compile: options.Compile = None,
    linears: options.Linears = None,
    on_oom: options.OnOom = None,
    cache: options.Cache = None,
    cache_option: options.CacheOption = None,
    do_sample: options.DoSample = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    num_return_sequences: options.NumReturnSequences = None,
    num_beams: options.NumBeams = None,
    num_beam_groups: options.NumBeamGroups = None,
    diversity_penalty: options.DiversityPenalty = None,
    length_penalty: options.LengthPenalty = None,
    penalty_alpha: options.PenaltyAlpha = None,
    prompt_lookup_num_tokens: options.PromptLookup = None,
    assistant_model: options.AssistantModel = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    strategy: options.Strategy = None,
    set_option: options.SetOption = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    max_time: options.MaxTime = None,
    stop_strings: options.StopStrings = None,
    stream: options.Stream = False,
    as_json: options.Json = False,
    stats: options.Stats = False,
) -> None:
    """Continue PROMPT. Greedy, unless the model's own settings or an option ask for sampling or for a search."""
    _run(dict(locals()))


def _run(said: dict[str, Any]) -> None:
    """said: what the options of `generate` are."""
    texts = values.prompts(said["prompt"] or [], said["file"] or [])
    parameters = values.generation_parameters(said)
    per_text = parameters.get("num_return_sequences", 1)
    rows = len(texts) * (per_text if isinstance(per_text, int) else 1)
    if said["stream"] and rows > 1 and not said["as_json"]:
        raise OptionError(f"--stream prints one text, but there are {rows}: add --json, which tells them apart")
    if said["system"] is not None and not said["chat"]:
        raise OptionError("--system belongs to a chat: add --chat")
    settings = values.engine_config(said["config"], said)
    cache_config = values.assignments(said["cache_option"], "--cache-option") or None
    inputs = [values.messages(text, said["system"]) for text in texts] if said["chat"] else texts
    with Work() as work:
        start_libraries(work, said["model"], said["assistant_model"])
        from engine.generator import Generator
        from engine.model.loading import SHIPPED_MODEL

        work.doing("loading the model")
        generator = Generator(SHIPPED_MODEL if said["model"] is None else said["model"], config=settings)
        if said["assistant_model"] is not None:
            parameters |= _assistant(said["assistant_model"], generator)
        work.doing("reading the prompt")
        pieces = generator.stream(inputs, cache=said["cache"], cache_config=cache_config, **parameters)
        result = _print(pieces, work, said, parameters.get("max_new_tokens"))
    if (
        not said["stats"]
        and "length" in result.finish_reasons
        and not {"max_new_tokens", "max_length"} & set(parameters)
    ):
        most = max(map(len, result.tokens))
        output.remark(f"(ended after {most} tokens, which is the limit: --max-new-tokens or -n allows more)")


def _print(pieces: Stream, work: Work, said: dict[str, Any], limit: int | None) -> Generation:
    """Also what there is when something fails, or Ctrl-C was pressed: `main` finds it in the interrupt.

    limit: the most new tokens of a row, if that is known.
    """
    as_they_come, as_json = said["stream"], said["as_json"]
    try:
        for piece in pieces:
            if as_they_come:
                work.hide()
                output.say(rendering.piece_as_json(piece) if as_json else piece.text or "", end="\n" if as_json else "")
            else:
                work.count(piece, limit)
    except KeyboardInterrupt as stopped:
        if not pieces.given_up:  # between two pieces it is Python's own, without a result
            stopped.partial = pieces.result()  # type: ignore[attr-defined]
        raise
    finally:
        work.hide()
        if not pieces.given_up:
            result = pieces.result()
            if as_json:
                output.say(rendering.as_json(result))
            else:
                output.say("" if as_they_come else rendering.as_text(result))
            if said["stats"]:
                output.tell(rendering.stats(result, terminal_width(100)))
    return result


def _assistant(path: str, generator: Generator) -> dict[str, Any]:
    """The arguments that make the model at `path` propose tokens to the generator's."""
    from engine.model.loading import load

    model, tokenizer = load(path, None, generator.config)
    is_same = tokenizer.get_vocab() == generator.tokenizer.get_vocab()
    return {"assistant_model": model} | ({} if is_same else {"assistant_tokenizer": tokenizer})
