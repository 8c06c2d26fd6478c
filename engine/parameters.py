"""The parameters of `generate`, each declared here alone: type, reader, default, help, option and field of a request.

What follows from this table: the signatures and docstrings that editors show, the checks of a call
(`engine.request.parameters`), the options of the command line (`engine.cli.options`), the fields of a request
(`engine.serving.http.protocol`) and a page of the reference. A new parameter is a row, and the code that uses it.
Nothing is imported here that takes time: `import engine` shows the parameters to editors before torch is there.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    panel: str
    metavar: str = ""
    names: tuple[str, ...] = ()
    help: str = ""
    type: Any = None
    complete: Callable[[], list[str]] | None = None


@dataclass(frozen=True)
class Field:
    """A field of a request. name: in OpenAI's protocol; "" for a field of `engine` by the name of the parameter.

    type: of the value, if it is not the reader's. over, least, most: what the server reads, where that is less than
    the reader does; of a text its characters.
    """

    name: str = ""
    type: Any = None
    over: float | None = None
    least: float | None = None
    most: int | None = None


@dataclass(frozen=True)
class Parameter:
    """A row. help: its first sentence is also that of the command line. reader: None where another file reads it.

    default: in words, if no configuration has one. of_config: whether it is a field of transformers' GenerationConfig.
    draws: whether it shapes a distribution to draw from.
    """

    help: str
    reader: Reader | None = None
    default: str = ""
    of_config: bool = False
    draws: bool = False
    flag: Flag | None = None
    field: Field | None = None


# fmt: off
def generate_parameters(
    inputs: Annotated[Any, Parameter(
        "A text, a list of texts, chat messages, ids (LongTensor [rows, tokens] or lists), or a mapping with "
        "`input_ids` or `inputs_embeds`, `attention_mask` and whatever else the model takes (pixels, ...). Default: "
        "the `bos_token_id`, as in transformers.")] = None,
    generation_config: Annotated["transformers.GenerationConfig | dict[str, Any] | None", Parameter(
        "transformers' parameters as a whole. Those of the call win.")] = None,
    *,
    tokenizer: Annotated[Any, Parameter(
        "Needed for text prompts, text results and stop strings, unless the model was given as a path.",
        TOKENIZER)] = None,
    # The cache.
    cache: Annotated["str | CacheConfig | transformers.Cache | EngineCache | None", Parameter(
        'A registered name ("dynamic", "static", "none", ...: `engine caches` lists them), "auto" for the first of the '
        "backends that lose nothing and fit (see `plan`), a `CacheConfig`, or a cache object that holds the beginning "
        'of the prompt. The default is "none" for a model that keeps no keys and values.', default='"dynamic"',
        flag=Flag(CACHE, "NAME", help="Cache backend, see `engine caches`, or auto for what fits; default: dynamic.",
            type=str, complete=lambda: [*CacheConfig.names(), "auto"]),
        field=Field(type=str))] = None,
    cache_config: Annotated["dict[str, Any] | CacheConfig | None", Parameter(
        "Options of that backend; without `cache` they change the cache of a `Generator`'s `EngineConfig`.",
        Reader("a dict of options or a CacheConfig", readers.cache_options), of_config=True)] = None,
    trust_cache: Annotated[bool, Parameter(
        "With a live cache: whether its content is taken for the beginning of the prompt where that cannot be checked, "
        "also where its model has changed since. Tokens that are known to differ are refused in any case.",
        FLAG, "False")] = False,
    past_key_values: Annotated["transformers.Cache | tuple | None", Parameter(
        "A live cache, as in transformers.",
        Reader("a cache, or a tuple of 2 or 4 tensors for each layer", readers.past))] = None,
    cache_implementation: Annotated[str | None, Parameter(
        "A name of `cache`, as in transformers.", TEXT, of_config=True)] = None,
    use_cache: Annotated[bool | None, Parameter('False is `cache="none"`.', FLAG, of_config=True)] = None,
    return_legacy_cache: Annotated[bool | None, Parameter(
        "Whether `Generation.cache` is tuples in place of a cache.", FLAG)] = None,
    on_oom: Annotated[Sequence[str] | None, Parameter(
        "What is tried when memory is out, in place of `EngineConfig.on_oom`; `stats.fallbacks` says what was. With a "
        "live cache the one to continue is then `Generation.cache`, and no longer the one that was given.")] = None,
    # How tokens are chosen.
    strategy: Annotated["str | Strategy | None", Parameter(
        "A strategy's name or object; by default it follows from the parameters below, as in transformers.",
        Reader("a strategy's name, or an object with name, samples and flow()", readers.strategy),
        flag=Flag(CHOOSING, "NAME", type=str, help="Decoding strategy: greedy, sampling, beam, diverse_beam, "
            "contrastive, assisted, prompt_lookup, or one of a plug-in, whose options --set gives."),
        field=Field(type=str))] = None,
    seed: Annotated[int | None, Parameter(
        "The strategy draws the random numbers that follow `torch.manual_seed(seed)`, and torch's global ones stay as "
        "they are. Default: it draws torch's global ones. Logits processors that draw always take those. Greedy and "
        "beam search without `do_sample` draw nothing.",
        readers.SEED, flag=Flag(CHOOSING, "N", help="Seed for sampling."), field=Field("seed"))] = None,
    do_sample: Annotated[bool | None, Parameter(
        "Draw tokens instead of taking the most probable.", FLAG, "False", of_config=True,
        flag=Flag(CHOOSING))] = None,
    temperature: Annotated[float | None, Parameter(
        "Logits are divided by this value, over 0.", readers.TEMPERATURE, of_config=True, draws=True,
        flag=Flag(CHOOSING, "X", help="Sample at this temperature; 0 is greedy."),
        field=Field("temperature", most=100))] = None,
    top_k: Annotated[int | None, Parameter(
        "Draw from this many most probable tokens; 0 is all.", COUNT, of_config=True, draws=True,
        flag=Flag(CHOOSING, "N"), field=Field())] = None,
    top_p: Annotated[float | None, Parameter(
        "Draw from the most probable tokens whose probabilities add up to this, 0 to 1.",
        SHARE, of_config=True, draws=True, flag=Flag(CHOOSING, "X"), field=Field("top_p", over=0))] = None,
    min_p: Annotated[float | None, Parameter(
        "Draw from tokens with at least this share of the highest probability, 0 to 1.",
        SHARE, of_config=True, draws=True, flag=Flag(CHOOSING, "X"), field=Field())] = None,
    typical_p: Annotated[float | None, Parameter(
        "Draw from the most typical tokens whose probabilities add up to this, 0 to 1.",
        SHARE, of_config=True, draws=True)] = None,
    epsilon_cutoff: Annotated[float | None, Parameter(
        "Draw from tokens with at least this probability, 0 to 1.", SHARE, of_config=True, draws=True)] = None,
    eta_cutoff: Annotated[float | None, Parameter(
        "Draw as `epsilon_cutoff`, with a lower limit where the distribution has a high entropy.",
        SHARE, of_config=True, draws=True)] = None,
    num_return_sequences: Annotated[int | None, Parameter(
        "Texts per prompt: drawn, or the best of a search.", POSITIVE, "1", of_config=True,
        flag=Flag(CHOOSING, "N", ("--samples",)), field=Field("n"))] = None,
    num_beams: Annotated[int | None, Parameter(
        "Beams of a beam search; 1 is no search.", POSITIVE, "1", of_config=True,
        flag=Flag(CHOOSING, "N"), field=Field())] = None,
    num_beam_groups: Annotated[int | None, Parameter(
        "Groups of beams of a diverse beam search.", POSITIVE, "1", of_config=True,
        flag=Flag(CHOOSING, "N"), field=Field())] = None,
    diversity_penalty: Annotated[float | None, Parameter(
        "What a token's score loses for each beam of the earlier groups that chose the token in this step.",
        FINITE, of_config=True, flag=Flag(CHOOSING, "X"), field=Field(least=-100, most=100))] = None,
    length_penalty: Annotated[float | None, Parameter(
        "Exponent of the length by which the scores of beams are divided: over 0 favours long texts.",
        FINITE, "1.0", of_config=True, flag=Flag(CHOOSING, "X"), field=Field(least=-100, most=100))] = None,
    early_stopping: Annotated[bool | str | None, Parameter(
        "Whether a beam search ends as soon as it has `num_beams` complete texts.",
        Reader("True, False or 'never'", readers.early_stopping), "False", of_config=True,
        field=Field(type=bool | Literal["never"]))] = None,
    penalty_alpha: Annotated[float | None, Parameter(
        "Contrastive search, with `top_k`: how strongly to avoid what was said, 0 to 1.",
        SHARE, of_config=True, flag=Flag(CHOOSING, "X"), field=Field())] = None,
    assistant_model: Annotated["transformers.PreTrainedModel | str | Path | None", Parameter(
        "A small model that proposes tokens, of which the model verifies several at once. A path or hub id also brings "
        "its tokenizer; a `Generator` keeps the last one that it loaded.",
        flag=Flag(CHOOSING, "PATH", ("--draft",), type=str))] = None,
    assistant_tokenizer: Annotated[Any, Parameter(
        "That of an assistant that was given as an object, if it has a vocabulary of its own.", TOKENIZER)] = None,
    num_assistant_tokens: Annotated[int | None, Parameter(
        "Tokens that the assistant proposes at a time.", POSITIVE, "20", of_config=True,
        flag=Flag(CHOOSING, "N", ("--draft-tokens",)))] = None,
    prompt_lookup_num_tokens: Annotated[int | None, Parameter(
        "Propose so many tokens from the text itself, where its last tokens have been there before.",
        POSITIVE, of_config=True, flag=Flag(CHOOSING, "N", ("--prompt-lookup",)), field=Field(most=256))] = None,
    max_matching_ngram_size: Annotated[int | None, Parameter(
        "With `prompt_lookup_num_tokens`: how many last tokens have to have been there before.",
        POSITIVE, of_config=True)] = None,
    # How scores are changed before a token is chosen.
    repetition_penalty: Annotated[float | None, Parameter(
        "Scores of tokens that the text has are divided by this, or multiplied where negative: over 1 repeats less.",
        readers.OVER_0, of_config=True, flag=Flag(CHOOSING, "X"), field=Field(least=0.01, most=100))] = None,
    no_repeat_ngram_size: Annotated[int | None, Parameter(
        "So many tokens in a row appear once in a text.", COUNT, of_config=True, field=Field())] = None,
    bad_words_ids: Annotated[list[list[int]] | None, Parameter(
        "Token ids of words that do not appear.",
        Reader("a list of lists of one or more token ids", readers.id_lists), of_config=True)] = None,
    sequence_bias: Annotated[Any, Parameter(
        "What is added to the score of the last token of each of these sequences.",
        Reader("a dict of tuples of token ids and numbers, or a list of pairs of these", readers.bias), of_config=True,
        field=Field("logit_bias"))] = None,
    suppress_tokens: Annotated[list[int] | None, Parameter("Ids that do not appear.", IDS, of_config=True)] = None,
    begin_suppress_tokens: Annotated[list[int] | None, Parameter(
        "Ids that no text begins with.", IDS, of_config=True)] = None,
    forced_bos_token_id: Annotated[int | None, Parameter(
        "The id of the first token.", SOME_IDS, of_config=True)] = None,
    forced_eos_token_id: Annotated[int | list[int] | None, Parameter(
        "The id of the last token, where the length ends a text.", SOME_IDS, of_config=True)] = None,
    exponential_decay_length_penalty: Annotated[tuple[int, float] | None, Parameter(
        "The score of the end grows by this factor per token, after so many tokens.",
        Reader("a pair: the tokens before it begins, and a factor", readers.decay), of_config=True)] = None,
    renormalize_logits: Annotated[bool | None, Parameter(
        "Whether changed scores are made log probabilities again.", FLAG, of_config=True)] = None,
    guidance_scale: Annotated[float | None, Parameter(
        "More than 1 steers away from the text without its prompt, or from the text after a negative prompt, with any "
        "strategy.", FINITE, of_config=True)] = None,
    negative_prompt: Annotated[str | Sequence[str] | None, Parameter(
        "The text to steer away from: one for all rows or a list.")] = None,
    negative_prompt_ids: Annotated["torch.Tensor | None", Parameter("The same as token ids.")] = None,
    negative_prompt_attention_mask: Annotated["torch.Tensor | None", Parameter(
        "The mask of `negative_prompt_ids`.")] = None,
    logits_processor: Annotated[Sequence[Any] | Callable[..., Any] | None, Parameter(
        "Of transformers or of your own: called with ids [rows, tokens] and scores [rows, vocabulary], returns scores. "
        "A processor that keeps something per row is a `StatefulLogitsProcessor`.", CALLABLES)] = None,
    prefix_allowed_tokens_fn: Annotated["Callable[[int, torch.Tensor], list[int]] | None", Parameter(
        "Called with the prompt's index and a row's ids; returns the ids that may come next.",
        Reader("something callable", readers.constraint))] = None,
    # How chat messages are read.
    continue_final_message: Annotated[bool | None, Parameter(
        "Of chat messages, as of `apply_chat_template`: the answer goes on with the last message. Default: with one "
        "of the assistant, as in transformers' pipeline.", FLAG, field=Field("continue_final_message"))] = None,
    add_generation_prompt: Annotated[bool | None, Parameter(
        "Of chat messages, as of `apply_chat_template`: what makes the model answer comes last. Default: unless the "
        "last message is continued.", FLAG, field=Field("add_generation_prompt"))] = None,
    sanitize_control_tokens: Annotated[bool | None, Parameter(
        "Whether control tokens that chat messages spell (`<|im_end|>`) are read as text.", FLAG, "False",
        field=Field("sanitize_control_tokens"))] = None,
    # What form texts have.
    response_format: Annotated[dict[str, Any] | type | Sequence[Any] | None, Parameter(
        'As in OpenAI\'s interface: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": '
        "...}}`. This and the four below take a list too, with one or None for each prompt, and need the extra "
        "`grammar` and a tokenizer. The texts of a row that ends by itself have the form; `Generation.parsed` has "
        "their values.",
        Reader("a dict as in OpenAI's interface, or a list of one for each prompt",
            readers.or_each(readers.response_format)), field=Field("response_format"))] = None,
    json_schema: Annotated[dict[str, Any] | str | type | Sequence[Any] | None, Parameter(
        "Texts are JSON that follows this schema.",
        Reader("a JSON schema as a dict or its text, a pydantic model, or a list of one for each prompt",
            readers.or_each(readers.schema)),
        flag=Flag(FORM, "FILE", type=Path,
            help="Texts are JSON after the schema in this file; needs the extra grammar."),
        field=Field(type=dict))] = None,
    regex: Annotated[str | Sequence[str | None] | None, Parameter(
        "Texts match this regular expression as a whole.",
        Reader("a regular expression as a text, or a list of one for each prompt", readers.or_each(readers.form)),
        flag=Flag(FORM, "PATTERN", type=str), field=Field(type=str, most=2000))] = None,
    choices: Annotated[Sequence[str] | Sequence[Sequence[str] | None] | None, Parameter(
        "Texts are one of these.",
        Reader("a list of texts, or a list of such lists, one for each prompt", readers.all_choices),
        flag=Flag(FORM, "TEXT", ("--choice",), type=list[str], help="Texts are one of these; repeat it for each."),
        field=Field(type=list))] = None,
    grammar: Annotated[str | Sequence[str | None] | None, Parameter(
        "Texts follow this grammar, in Lark's notation.",
        Reader("a grammar in Lark's notation as a text, or a list of one for each prompt",
            readers.or_each(readers.form)),
        # Larger ones may nest so deeply that the library for grammars, which is recursive, has no stack left.
        field=Field(type=str, most=8192))] = None,
    # When it ends.
    max_new_tokens: Annotated[int | None, Parameter(
        "Tokens per row at most.", POSITIVE, "20", of_config=True,
        flag=Flag(ENDING, "N", ("-n",),
            help="Tokens to generate at most; default: what the model's own settings say, or else 20."),
        field=Field("max_tokens"))] = None,
    min_new_tokens: Annotated[int | None, Parameter(
        "New tokens per row at least.", COUNT, of_config=True, flag=Flag(ENDING, "N"), field=Field())] = None,
    max_length: Annotated[int | None, Parameter(
        "Tokens per row at most, with those of the prompt.", POSITIVE, of_config=True)] = None,
    min_length: Annotated[int | None, Parameter(
        "Tokens per row at least, with those of the prompt.", COUNT, of_config=True)] = None,
    max_time: Annotated[float | None, Parameter(
        "Seconds after which the run ends, with one token at least.", readers.SECONDS, of_config=True,
        flag=Flag(ENDING, "SECONDS"))] = None,
    stop_strings: Annotated[str | list[str] | None, Parameter(
        "A row ends where one of them appears. Needs a tokenizer.",
        Reader("a text or a list of texts", readers.texts), of_config=True,
        flag=Flag(ENDING, "TEXT", ("--stop",), type=list[str], help="Stop before this text; may be repeated."),
        field=Field("stop"))] = None,
    eos_token_id: Annotated[int | list[int] | None, Parameter(
        "The ids that end a row. Default: the model's; an answer to chat messages also ends with the tokenizer's end "
        "token and with what closes an answer in the chat template.",
        Reader("a token id, a list of them, or [] for no end", readers.end_ids), of_config=True)] = None,
    pad_token_id: Annotated[int | None, Parameter(
        "The id that fills up rows that have ended. Default: the model's.", readers.ID, of_config=True)] = None,
    stopping_criteria: Annotated[Sequence[Any] | Callable[..., Any] | None, Parameter(
        "Of transformers or of your own: called with ids and scores, returns which rows have ended.",
        CALLABLES)] = None,
    cancellation: Annotated[Any, Parameter(
        "Once it is set, no further step is made.",
        readers.having("is_set", words="a threading.Event, and set() it to stop the run"))] = None,
    # What comes back.
    streamer: Annotated["BaseStreamer | None", Parameter(
        "One of transformers' text streamers, which gets the first row while it comes, then the others line by line; "
        "or an object with `put`, which gets columns of ids, and `end`. It is ended whatever happens.",
        readers.having("put", "end", words="a TextStreamer or another BaseStreamer of transformers"))] = None,
    top_logprobs: Annotated[int | None, Parameter(
        "Report the log probability of every new token, and of so many of the likeliest tokens in its place: see "
        "`Generation.logprobs`. 0: of the new token alone. Not for searches and contrastive search.",
        COUNT, field=Field("top_logprobs", most=20))] = None,
    output_scores: Annotated[bool | None, Parameter(
        "Whether the `Generation` holds the scores that tokens were chosen from.", FLAG, "False",
        of_config=True)] = None,
    output_logits: Annotated[bool | None, Parameter(
        "Whether it holds the logits.", FLAG, "False", of_config=True)] = None,
    output_attentions: Annotated[bool | None, Parameter(
        "Whether it holds the attention weights.", FLAG, "False", of_config=True)] = None,
    output_hidden_states: Annotated[bool | None, Parameter(
        "Whether it holds the hidden states.", FLAG, "False", of_config=True)] = None,
    **model_inputs: Annotated[Any, Parameter(
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
    text = getattr(annotation, "__forward_arg__", "")
    text = text or (annotation.__name__ if isinstance(annotation, type) else str(annotation))
    return re.sub(r"\b(typing|collections\.abc)\.", "", text)


def words_of(name: str) -> str:
    """The type of what is given, for a page: None is "not said" everywhere."""
    text, reader = type_of(name).removesuffix(" | None"), PARAMETERS[name].reader
    return reader.words if text == "Any" and reader is not None else text


def help_of(name: str) -> str:
    """What a parameter means to a call."""
    row = PARAMETERS[name]
    return f"With `do_sample`: {row.help[0].lower()}{row.help[1:]}" if row.draws else row.help


def _documentation() -> str:
    """The parameters in the notation of numpy's docstrings."""
    lines = []
    for name, row in PARAMETERS.items():
        default = f"default {row.default}" if row.default else "optional"
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
    rows = [each.replace(annotation=type_of(name)) for name, each in table.parameters.items()]

    def decorated(function: Callable[Concatenate[F, ...], R]) -> Callable[Concatenate[F, P], R]:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters.values()))
        function.__signature__ = signature.replace(parameters=[first, *rows])  # type: ignore[attr-defined]
        text = inspect.getdoc(function) or ""
        if documented_by is None:
            head, returns, more = text.partition("\n\nReturns\n")
            function.__doc__ = f"{head}\n{_documentation()}{returns}{more}"
        else:
            documentation = inspect.getdoc(documented_by) or ""
            sections = documentation[documentation.index("inputs :") :]  # the first parameter is another one here
            function.__doc__ = f"{text}\n\nParameters\n----------\n{sections}"
        return function

    return decorated
