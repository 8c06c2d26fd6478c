"""The parameters of `generate`, each declared here alone: type, reader, default, help, option and field of a request.

What follows from this table: the signatures and docstrings that editors show, the checks of a call
(`engine.request.call`), the options of the command line (`engine.cli.options`), the fields of a request
(`engine.server.bodies`) and a page of the reference. A new parameter is a row, and the code that uses it.
Nothing is imported here that takes time: `import engine` shows the parameters to editors before torch is there.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent, wrap
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

from configs import CacheConfig
from engine import readers
from engine.readers import CALLABLES, COUNT, FINITE, FLAG, IDS, POSITIVE, SHARE, SOME_IDS, TEXT, TOKENIZER, Reader

if TYPE_CHECKING:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    from caches import EngineCache
    from strategies import Strategy

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F")

# Headings of options in the help of the command line.
CACHE, CHOOSING, FORM, ENDING = "The cache", "How tokens are chosen", "What form texts have", "When it ends"


@dataclass(frozen=True)
class Flag:
    """An option of the command line. metavar: its value in the help, "" for none. names: besides its own.

    help: in place of the parameter's first sentence. type: of the value, if it is not the reader's. complete: what a
    shell may complete it to.
    """

    metavar: str = ""
    names: tuple[str, ...] = ()
    panel: str = CHOOSING
    help: str = ""
    type: Any = None
    complete: Callable[[], list[str]] | None = None


@dataclass(frozen=True)
class Field:
    """A field of a request. name: in OpenAI's protocol; "" for a field of `engine` by the name of the parameter.

    type: of the value, if it is not the reader's. least, most: what the server reads, where that is less than
    the reader does; of a text its characters.
    """

    name: str = ""
    type: Any = None
    least: float | None = None
    most: int | None = None


@dataclass(frozen=True)
class Parameter:
    """A row. reader: None where another file reads it. default: in words, if no configuration has one.

    is_setting: whether transformers' GenerationConfig has it. draws: whether it shapes a distribution to draw from.
    help: its first sentence is also that of the command line.
    """

    reader: Reader | None = None
    default: str = ""
    is_setting: bool = False
    draws: bool = False
    flag: Flag | None = None
    field: Field | None = None
    help: str = ""


Setting = partial(Parameter, is_setting=True)
Sampling = partial(Setting, draws=True)


# fmt: off
def generate_parameters(
    inputs: Annotated[Any, Parameter(help=
        "A text, a list of texts, chat messages, ids (LongTensor [rows, tokens] or lists), or a mapping with "
        "`input_ids` or `inputs_embeds`, `attention_mask` and whatever else the model takes (pixels, ...). Default: "
        "the `bos_token_id`, as in transformers.")] = None,
    generation_config: Annotated["transformers.GenerationConfig | dict[str, Any] | None", Parameter(
        help="transformers' parameters as a whole. Those of the call win.")] = None,
    *,
    tokenizer: Annotated[Any, Parameter(TOKENIZER,
        help="Needed for text prompts, text results and stop strings, unless the model was given as a path.")] = None,
    # The cache.
    cache: Annotated["str | CacheConfig | transformers.Cache | EngineCache | None", Parameter(default='"dynamic"',
        flag=Flag("NAME", panel=CACHE, type=str, complete=lambda: [*CacheConfig.names(), "auto"],
            help="Cache backend, see `engine caches`, or auto for what fits; default: dynamic."),
        field=Field(type=str), help=
        'A registered name ("dynamic", "static", "none", ...: `engine caches` lists them), "auto" for the first of the '
        "backends that lose nothing and fit (see `plan`), a `CacheConfig`, or a cache object that holds the beginning "
        'of the prompt. The default is "none" for a model that keeps no keys and values.')] = None,
    cache_config: Annotated["dict[str, Any] | CacheConfig | None", Setting(
        Reader("a dict of options or a CacheConfig", readers.cache_options), help=
        "Options of that backend; without `cache` they change the cache of a `Generator`'s `EngineConfig`.")] = None,
    trust_cache: Annotated[bool, Parameter(FLAG, "False", help=
        "With a live cache: whether its content is taken for the beginning of the prompt where that cannot be checked, "
        "also where its model has changed since. Tokens that are known to differ are refused in any case.")] = False,
    past_key_values: Annotated["transformers.Cache | tuple | None", Parameter(
        Reader("a cache, or a tuple of 2 or 4 tensors for each layer", readers.past),
        help="A live cache, as in transformers.")] = None,
    cache_implementation: Annotated[str | None, Setting(TEXT, help="A name of `cache`, as in transformers.")] = None,
    use_cache: Annotated[bool | None, Setting(FLAG, help='False is `cache="none"`.')] = None,
    return_legacy_cache: Annotated[bool | None, Parameter(FLAG,
        help="Whether `Generation.cache` is tuples in place of a cache.")] = None,
    on_oom: Annotated[Sequence[str] | None, Parameter(help=
        "What is tried when memory is out, in place of `EngineConfig.on_oom`; `stats.fallbacks` says what was. With a "
        "live cache the one to continue is then `Generation.cache`, and no longer the one that was given.")] = None,
    # How tokens are chosen.
    strategy: Annotated["str | Strategy | None", Parameter(
        Reader("a strategy's name, or an object with name, samples and flow()", readers.strategy),
        flag=Flag("NAME", type=str, help="Decoding strategy: greedy, sampling, beam, diverse_beam, contrastive, "
            "assisted, prompt_lookup, or one of a plug-in, whose options --set gives."),
        field=Field(type=str), help=
        "A strategy's name or object; by default it follows from the parameters below, as in transformers.")] = None,
    seed: Annotated[int | None, Parameter(readers.SEED, flag=Flag("N", help="Seed for sampling."), field=Field("seed"),
        help=
        "The strategy draws the random numbers that follow `torch.manual_seed(seed)`, and torch's global ones stay as "
        "they are. Default: it draws torch's global ones. Logits processors that draw always take those. Greedy and "
        "beam search without `do_sample` draw nothing.")] = None,
    do_sample: Annotated[bool | None, Setting(FLAG, "False", flag=Flag(),
        help="Draw tokens instead of taking the most probable.")] = None,
    temperature: Annotated[float | None, Sampling(readers.TEMPERATURE,
        flag=Flag("X", help="Sample at this temperature; 0 is greedy."), field=Field("temperature", most=100),
        help="Logits are divided by this value, over 0.")] = None,
    top_k: Annotated[int | None, Sampling(COUNT, flag=Flag("N"), field=Field(),
        help="Draw from this many most probable tokens; 0 is all.")] = None,
    top_p: Annotated[float | None, Sampling(SHARE, flag=Flag("X"), field=Field("top_p"),
        help="Draw from the most probable tokens whose probabilities add up to this, 0 to 1.")] = None,
    min_p: Annotated[float | None, Sampling(SHARE, flag=Flag("X"), field=Field(),
        help="Draw from tokens with at least this share of the highest probability, 0 to 1.")] = None,
    typical_p: Annotated[float | None, Sampling(SHARE,
        help="Draw from the most typical tokens whose probabilities add up to this, 0 to 1.")] = None,
    epsilon_cutoff: Annotated[float | None, Sampling(SHARE,
        help="Draw from tokens with at least this probability, 0 to 1.")] = None,
    eta_cutoff: Annotated[float | None, Sampling(SHARE,
        help="Draw as `epsilon_cutoff`, with a lower limit where the distribution has a high entropy.")] = None,
    num_return_sequences: Annotated[int | None, Setting(POSITIVE, "1", flag=Flag("N", ("--samples",)), field=Field("n"),
        help="Texts per prompt: drawn, or the best of a search.")] = None,
    num_beams: Annotated[int | None, Setting(POSITIVE, "1", flag=Flag("N"), field=Field(),
        help="Beams of a beam search; 1 is no search.")] = None,
    num_beam_groups: Annotated[int | None, Setting(POSITIVE, "1", flag=Flag("N"), field=Field(),
        help="Groups of beams of a diverse beam search.")] = None,
    diversity_penalty: Annotated[float | None, Setting(FINITE, flag=Flag("X"), field=Field(least=-100, most=100), help=
        "What a token's score loses for each beam of the earlier groups that chose the token in this step.")] = None,
    length_penalty: Annotated[float | None, Setting(FINITE, "1.0", flag=Flag("X"), field=Field(least=-100, most=100),
        help="Exponent of the length by which the scores of beams are divided: over 0 favours long texts.")] = None,
    early_stopping: Annotated[bool | str | None, Setting(Reader("True, False or 'never'", readers.early_stopping),
        default="False", field=Field(type=bool | Literal["never"]),
        help="Whether a beam search ends as soon as it has `num_beams` complete texts.")] = None,
    penalty_alpha: Annotated[float | None, Setting(SHARE, flag=Flag("X",
            help="Contrastive search, with --top-k: how strongly to avoid what was said, 0 to 1."), field=Field(),
        help="Contrastive search, with `top_k`: how strongly to avoid what was said, 0 to 1.")] = None,
    assistant_model: Annotated["transformers.PreTrainedModel | str | Path | None", Parameter(
        flag=Flag("PATH", ("--draft",), type=str), help=
        "A small model that proposes tokens, of which the model verifies several at once. A path or hub id also brings "
        "its tokenizer; a `Generator` keeps the last one that it loaded.")] = None,
    assistant_tokenizer: Annotated[Any, Parameter(TOKENIZER,
        help="That of an assistant that was given as an object, if it has a vocabulary of its own.")] = None,
    num_assistant_tokens: Annotated[int | None, Setting(POSITIVE, "20", flag=Flag("N", ("--draft-tokens",)),
        help="Tokens that the assistant proposes at a time.")] = None,
    prompt_lookup_num_tokens: Annotated[int | None, Setting(POSITIVE, flag=Flag("N", ("--prompt-lookup",)),
        field=Field(most=256),
        help="Propose so many tokens from the text itself, where its last tokens have been there before.")] = None,
    max_matching_ngram_size: Annotated[int | None, Setting(POSITIVE,
        help="With `prompt_lookup_num_tokens`: how many last tokens have to have been there before.")] = None,
    # How scores are changed before a token is chosen.
    repetition_penalty: Annotated[float | None, Setting(readers.OVER_0, flag=Flag("X"),
        field=Field(least=0.01, most=100), help=
        "Scores of tokens of the text are divided by this, or multiplied where negative: over 1 repeats less.")] = None,
    no_repeat_ngram_size: Annotated[int | None, Setting(COUNT, field=Field(),
        help="So many tokens in a row appear once in a text.")] = None,
    bad_words_ids: Annotated[list[list[int]] | None, Setting(
        Reader("a list of lists of one or more token ids", readers.id_lists), help="Words that do not appear.")] = None,
    sequence_bias: Annotated[Any, Setting(
        Reader("a dict of tuples of token ids and numbers, or a list of pairs of these", readers.bias),
        field=Field("logit_bias"),
        help="What is added to the score of the last token of each of these sequences.")] = None,
    suppress_tokens: Annotated[list[int] | None, Setting(IDS, help="Ids that do not appear.")] = None,
    begin_suppress_tokens: Annotated[list[int] | None, Setting(IDS, help="Ids that no text begins with.")] = None,
    forced_bos_token_id: Annotated[int | None, Setting(SOME_IDS, help="The id of the first token.")] = None,
    forced_eos_token_id: Annotated[int | list[int] | None, Setting(SOME_IDS,
        help="The id of the last token, where the length ends a text.")] = None,
    exponential_decay_length_penalty: Annotated[tuple[int, float] | None, Setting(
        Reader("a pair: the tokens before it begins, and a factor", readers.decay),
        help="The score of the end grows by this factor per token, after so many tokens.")] = None,
    renormalize_logits: Annotated[bool | None, Setting(FLAG,
        help="Whether changed scores are made log probabilities again.")] = None,
    guidance_scale: Annotated[float | None, Setting(FINITE, help=
        "More than 1 steers away from the text without its prompt, or from the text after a negative prompt, with any "
        "strategy.")] = None,
    negative_prompt: Annotated[str | Sequence[str] | None, Parameter(
        help="The text to steer away from: one for all rows or a list.")] = None,
    negative_prompt_ids: Annotated["torch.Tensor | None", Parameter(help="The same as token ids.")] = None,
    negative_prompt_attention_mask: Annotated["torch.Tensor | None", Parameter(
        help="The mask of `negative_prompt_ids`.")] = None,
    logits_processor: Annotated[Sequence[Any] | Callable[..., Any] | None, Parameter(CALLABLES, help=
        "Of transformers or of your own: called with ids [rows, tokens] and scores [rows, vocabulary], returns scores. "
        "A processor that keeps something per row is a `StatefulLogitsProcessor`.")] = None,
    prefix_allowed_tokens_fn: Annotated["Callable[[int, torch.Tensor], list[int]] | None", Parameter(
        Reader("something callable", readers.constraint),
        help="Called with the prompt's index and a row's ids; returns the ids that may come next.")] = None,
    # How chat messages are read.
    continue_final_message: Annotated[bool | None, Parameter(FLAG, field=Field("continue_final_message"), help=
        "Of chat messages, as of `apply_chat_template`: the answer goes on with the last message. Default: with one of "
        "the assistant, as in transformers' pipeline.")] = None,
    add_generation_prompt: Annotated[bool | None, Parameter(FLAG, field=Field("add_generation_prompt"), help=
        "Of chat messages, as of `apply_chat_template`: what makes the model answer comes last. Default: unless the "
        "last message is continued.")] = None,
    sanitize_control_tokens: Annotated[bool | None, Parameter(FLAG, "False", field=Field("sanitize_control_tokens"),
        help="Whether control tokens that chat messages spell (`<|im_end|>`) are read as text.")] = None,
    # What form texts have.
    response_format: Annotated[dict[str, Any] | type | Sequence[Any] | None, Parameter(
        readers.or_each("a dict as in OpenAI's interface,", readers.response_format), field=Field("response_format"),
        help=
        'As in OpenAI\'s interface: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": '
        "...}}`. This and the four below take a list too, with one or None for each prompt, and need the extra "
        "`grammar` and a tokenizer. The texts of a row that ends by itself have the form; `Generation.parsed` has "
        "their values.")] = None,
    json_schema: Annotated[dict[str, Any] | str | type | Sequence[Any] | None, Parameter(
        readers.or_each("a JSON schema as a dict or its text, a pydantic model,", readers.schema),
        flag=Flag("FILE", panel=FORM, type=Path,
            help="Texts are JSON that follows the schema in this file; needs the extra grammar."),
        field=Field(type=dict), help="Texts are JSON that follows this schema.")] = None,
    regex: Annotated[str | Sequence[str | None] | None, Parameter(
        readers.or_each("a regular expression as a text,", readers.form), flag=Flag("PATTERN", panel=FORM, type=str),
        field=Field(type=str, most=2000), help="Texts match this regular expression as a whole.")] = None,
    choices: Annotated[Sequence[str] | Sequence[Sequence[str] | None] | None, Parameter(
        Reader("a list of texts, or a list of such lists, one for each prompt", readers.all_choices),
        flag=Flag("TEXT", ("--choice",), panel=FORM, type=list[str]), field=Field(type=list),
        help="Texts are one of these.")] = None,
    # Of a request: larger ones may nest so deeply that the library, which is recursive, has no stack left.
    grammar: Annotated[str | Sequence[str | None] | None, Parameter(
        readers.or_each("a grammar in Lark's notation as a text,", readers.form), field=Field(type=str, most=8192),
        help="Texts follow this grammar, in Lark's notation.")] = None,
    # When it ends.
    max_new_tokens: Annotated[int | None, Setting(POSITIVE, "20", flag=Flag("N", ("-n",), panel=ENDING),
        field=Field("max_tokens"), help="New tokens per row at most.")] = None,
    min_new_tokens: Annotated[int | None, Setting(COUNT, flag=Flag("N", panel=ENDING), field=Field(),
        help="New tokens per row at least.")] = None,
    max_length: Annotated[int | None, Setting(POSITIVE,
        help="Tokens per row at most, with those of the prompt.")] = None,
    min_length: Annotated[int | None, Setting(COUNT, help="Tokens per row at least, with those of the prompt.")] = None,
    max_time: Annotated[float | None, Setting(readers.SECONDS, flag=Flag("SECONDS", panel=ENDING),
        help="Seconds after which the run ends, with one token at least.")] = None,
    stop_strings: Annotated[str | list[str] | None, Setting(Reader("a text or a list of texts", readers.texts),
        flag=Flag("TEXT", ("--stop",), panel=ENDING, type=list[str],
            help="End a text before this string; may be repeated."), field=Field("stop"),
        help="A row ends where one of them appears. Needs a tokenizer.")] = None,
    eos_token_id: Annotated[int | list[int] | None, Setting(
        Reader("a token id, a list of them, or [] for no end", readers.end_ids), help=
        "The ids that end a row. Default: the model's; an answer to chat messages also ends with the tokenizer's end "
        "token and with what closes an answer in the chat template.")] = None,
    pad_token_id: Annotated[int | None, Setting(readers.ID,
        help="The id that fills up rows that have ended. Default: the model's.")] = None,
    stopping_criteria: Annotated[Sequence[Any] | Callable[..., Any] | None, Parameter(CALLABLES,
        help="Of transformers or of your own: called with ids and scores, returns which rows have ended.")] = None,
    cancellation: Annotated[Any, Parameter(
        readers.having("is_set", words="a threading.Event, and set() it to stop the run"),
        help="Once it is set, no further step is made.")] = None,
    # What comes back.
    streamer: Annotated["BaseStreamer | None", Parameter(
        readers.having("put", "end", words="a TextStreamer or another BaseStreamer of transformers"), help=
        "One of transformers' text streamers, which gets the first row while it comes, then the others line by line; "
        "or an object with `put`, which gets columns of ids, and `end`. It is ended whatever happens.")] = None,
    top_logprobs: Annotated[int | None, Parameter(COUNT, field=Field("top_logprobs", most=20), help=
        "Report the log probability of every new token, and of so many of the likeliest tokens in its place: see "
        "`Generation.logprobs`. 0: of the new token alone. Not for searches and contrastive search.")] = None,
    output_scores: Annotated[bool | None, Setting(FLAG, "False",
        help="Whether the `Generation` holds the scores that tokens were chosen from.")] = None,
    output_logits: Annotated[bool | None, Setting(FLAG, "False", help="Whether it holds the logits.")] = None,
    output_attentions: Annotated[bool | None, Setting(FLAG, "False",
        help="Whether it holds the attention weights.")] = None,
    output_hidden_states: Annotated[bool | None, Setting(FLAG, "False",
        help="Whether it holds the hidden states.")] = None,
    **model_inputs: Annotated[Any, Parameter(help=
        "Further inputs of the model (`attention_mask`, `pixel_values`, ...), and the rarer parameters of a "
        "`GenerationConfig`.")],
) -> None:
    """What `generate` and `stream` take besides a model, None for "not said". It is the table, and never called."""
# fmt: on


PARAMETERS: Mapping[str, Parameter] = {
    name: annotation.__metadata__[0]
    for name, annotation in generate_parameters.__annotations__.items()
    if name != "return"
}
"""The rows by name."""


def type_of(name: str) -> str:
    """The type of a parameter as editors show it."""
    annotation = generate_parameters.__annotations__[name].__origin__
    text = annotation.__name__ if isinstance(annotation, type) else getattr(annotation, "__forward_arg__", annotation)
    return re.sub(r"\b(typing|collections\.abc)\.", "", str(text))


def words_of(name: str) -> str:
    """The type of what is given, for a page: None is "not said" everywhere."""
    text, reader = type_of(name).removesuffix(" | None"), PARAMETERS[name].reader
    return reader.words if text == "Any" and reader is not None else text


def help_of(name: str) -> str:
    """What a parameter means to a call."""
    parameter = PARAMETERS[name]
    return f"With `do_sample`: {parameter.help[0].lower()}{parameter.help[1:]}" if parameter.draws else parameter.help


def _documentation() -> str:
    """The parameters in the notation of numpy's docstrings."""
    lines = []
    for name, parameter in PARAMETERS.items():
        default = f"default {parameter.default}" if parameter.default else "optional"
        lines.append("**model_inputs" if name == "model_inputs" else f"{name} : {words_of(name)}, {default}")
        lines += [indent(line, "    ") for line in wrap(help_of(name), 116, break_on_hyphens=False)]
    return "\n".join(lines)


def takes(
    source: Callable[P, Any], documented_by: Callable[..., Any] | None = None
) -> Callable[[Callable[Concatenate[F, ...], R]], Callable[Concatenate[F, P], R]]:
    """Decorate a function of `(first, ..., **arguments)` whose parameters after the first are those of `source`.

    documented_by: a function that takes them too; what its docstring says of them is added. Without it, the
    parameters are described in front of the section Returns.
    """
    table = inspect.signature(source)
    rows = [parameter.replace(annotation=type_of(name)) for name, parameter in table.parameters.items()]

    def decorated(function: Callable[Concatenate[F, ...], R]) -> Callable[Concatenate[F, P], R]:
        signature = inspect.signature(function)
        subject = next(iter(signature.parameters.values()))
        function.__signature__ = signature.replace(parameters=[subject, *rows])  # type: ignore[attr-defined]
        text = inspect.getdoc(function) or ""
        if documented_by is None:
            head, returns, results = text.partition("\n\nReturns\n")
            function.__doc__ = f"{head}\n{_documentation()}{returns}{results}"
        else:
            documentation = inspect.getdoc(documented_by) or ""
            sections = documentation[documentation.index("inputs :") :]  # the first parameter is another one here
            function.__doc__ = f"{text}\n\nParameters\n----------\n{sections}"
        return function

    return decorated
