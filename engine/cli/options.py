"""The options of `engine generate`, grouped as in its help. `engine plan` and `engine caches` share some."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from configs import FALLBACKS, CacheConfig, presets
from configs.engine import COMPILE_CHOICES, LINEARS_CHOICES

# Values for shell completion.


def _caches() -> list[str]:
    return [*CacheConfig.names(), "auto"]


def _compilers() -> list[str]:
    return list(COMPILE_CHOICES)


def _linears() -> list[str]:
    return list(LINEARS_CHOICES)


def _fallbacks() -> list[str]:
    return list(FALLBACKS)


_of_prompt = partial(typer.Option, rich_help_panel="The prompt")
Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        help="The text to continue; several are a batch; - or none reads standard input.",
        show_default=False,
        rich_help_panel="The prompt",
    ),
]
File = Annotated[
    list[Path] | None,
    _of_prompt(
        "--file",
        "-f",
        metavar="PATH",
        help="Read the prompt from this file, - is standard input; repeat it for a batch.",
    ),
]
Chat = Annotated[bool, _of_prompt("--chat", help="The prompt is a user's message to a chat model.")]
System = Annotated[
    str | None,
    _of_prompt(metavar="TEXT", help="The system message that comes before it, with --chat."),
]

_of_model = partial(typer.Option, rich_help_panel="The model")
Model = Annotated[
    str | None,
    _of_model("--model", metavar="PATH", help="Folder or hub id; default: the small model of the package."),
]
Config = Annotated[
    str | None,
    _of_model(
        metavar="NAME_OR_FILE",
        help=f"A preset ({', '.join(presets())}) or the JSON file of an EngineConfig; other options override it.",
        autocompletion=presets,
    ),
]
Dtype = Annotated[
    str | None,
    _of_model(metavar="NAME", help="Data type of the weights: float32, bfloat16, ...; default: auto."),
]
Device = Annotated[
    str | None,
    _of_model(
        "--device", "--device-map", metavar="NAME", help="Where the model goes: cpu, cuda:1, ...; default: auto."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _of_model("--trust-remote-code", help="Allow Python code in the model's repository to run."),
]
PrefillChunkTokens = Annotated[
    int | None,
    _of_model(metavar="N", help="Compute the prompt in chunks of this many tokens, to save memory."),
]
Compile = Annotated[
    str | None,
    _of_model(
        metavar="NAME",
        help=f"Compile the decode step: {', '.join(COMPILE_CHOICES)}; default: off.",
        autocompletion=_compilers,
    ),
]
Linears = Annotated[
    str | None,
    _of_model(
        metavar="NAME",
        help=f"Matrix product of linear layers on a CPU: {', '.join(LINEARS_CHOICES)}; default: auto.",
        autocompletion=_linears,
    ),
]
OnOom = Annotated[
    list[str] | None,
    _of_model(
        metavar="NAME",
        help="Fallback when memory is out; may be repeated, in order. Default: release, chunk, offload, split.",
        autocompletion=_fallbacks,
    ),
]

_of_cache = partial(typer.Option, rich_help_panel="The cache")
Cache = Annotated[
    str | None,
    _of_cache(
        metavar="NAME",
        help="Cache backend, see `engine caches`, or auto for what fits; default: dynamic.",
        autocompletion=_caches,
    ),
]
CacheOption = Annotated[
    list[str] | None,
    _of_cache(metavar="NAME=VALUE", help="An option of the cache, see `engine caches NAME`; may be repeated."),
]

_of_choosing = partial(typer.Option, rich_help_panel="How tokens are chosen")
DoSample = Annotated[bool, _of_choosing("--do-sample", help="Draw tokens instead of taking the best.")]
Temperature = Annotated[
    float | None,
    _of_choosing(metavar="X", help="Sample at this temperature; 0 is greedy.", min=0),
]
TopK = Annotated[
    int | None,
    _of_choosing(metavar="N", help="Sample from this many most probable tokens; 0 is all.", min=0),
]
TopP = Annotated[
    float | None,
    _of_choosing(metavar="X", help="Sample from the most probable tokens that add up to this, 0 to 1.", min=0, max=1),
]
MinP = Annotated[
    float | None,
    _of_choosing(
        metavar="X",
        help="Sample from tokens at least this probable, relative to the most probable, 0 to 1.",
        min=0,
        max=1,
    ),
]
Seed = Annotated[int | None, _of_choosing(metavar="N", help="Seed for sampling.", min=0, max=2**63)]
RepetitionPenalty = Annotated[float | None, _of_choosing(metavar="X", help="Over 1: repeat less.")]
NumReturnSequences = Annotated[
    int | None,
    _of_choosing(
        "--num-return-sequences",
        "--samples",
        metavar="N",
        help="Texts per prompt, sampled or the best of the beams.",
        min=1,
    ),
]
NumBeams = Annotated[int | None, _of_choosing(metavar="N", help="Search with this many beams.", min=1)]
NumBeamGroups = Annotated[
    int | None,
    _of_choosing(metavar="N", help="Diverse beam search in so many groups.", min=1),
]
DiversityPenalty = Annotated[
    float | None,
    _of_choosing(metavar="X", help="How strongly groups avoid each other's tokens."),
]
LengthPenalty = Annotated[float | None, _of_choosing(metavar="X", help="Over 0: beams favour long texts.")]
PenaltyAlpha = Annotated[
    float | None,
    _of_choosing(
        metavar="X",
        help="Contrastive search: how strongly to avoid repetition, 0 to 1; needs --top-k.",
        min=0,
        max=1,
    ),
]
PromptLookup = Annotated[
    int | None,
    _of_choosing(
        "--prompt-lookup-num-tokens",
        "--prompt-lookup",
        metavar="N",
        min=1,
        help="Speculative decoding from the text itself: propose so many tokens at a time.",
    ),
]
AssistantModel = Annotated[
    str | None,
    _of_choosing(
        "--assistant-model",
        "--draft",
        metavar="PATH",
        help="Speculative decoding with a small model of the same kind, which proposes tokens.",
    ),
]
NumAssistantTokens = Annotated[
    int | None,
    _of_choosing(
        "--num-assistant-tokens",
        "--draft-tokens",
        metavar="N",
        min=1,
        help="Tokens to propose at a time, with --assistant-model; default: 20.",
    ),
]
Strategy = Annotated[str | None, _of_choosing(metavar="NAME", help="Decoding strategy by name.")]
SetOption = Annotated[
    list[str] | None,
    _of_choosing(
        "--set",
        metavar="NAME=VALUE",
        help="Any generation parameter of transformers; may be repeated.",
    ),
]

_of_ending = partial(typer.Option, rich_help_panel="When it ends")
MaxNewTokens = Annotated[
    int | None,
    _of_ending(
        "--max-new-tokens",
        "-n",
        metavar="N",
        help="Tokens to generate at most; default: what the model's own settings say, or else 20.",
    ),
]
MinNewTokens = Annotated[int | None, _of_ending(metavar="N", help="Tokens to generate at least.", min=0)]
MaxTime = Annotated[float | None, _of_ending(metavar="SECONDS", help="Stop after this time.", min=0)]
StopStrings = Annotated[
    list[str] | None,
    _of_ending("--stop-strings", "--stop", metavar="TEXT", help="Stop before this text; may be repeated."),
]

_of_output = partial(typer.Option, rich_help_panel="What is printed")
Stream = Annotated[bool, _of_output("--stream", help="Print the text as it is generated.")]
Json = Annotated[bool, _of_output("--json", help="Print JSON: rows (text, tokens, finish_reason) and stats.")]
Stats = Annotated[bool, _of_output("--stats", help="Print speed and cache size to standard error.")]
