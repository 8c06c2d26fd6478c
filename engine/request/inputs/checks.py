"""Whether a model can be given a prompt: checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from caches import EngineCache
from caches.layers.quirks import quirks_of
from caches.platform.accelerate_hooks import input_embeddings, prompt_device
from caches.platform.transformers_api import default_generation_params
from caches.protocol import attention_view
from engine.errors import InputError, OptionError
from engine.model.forward_parameters import forward_parameters
from engine.model.model_sizes import most_positions, vocabulary_of
from engine.parameters import PARAMETERS
from engine.prompt import PER_TOKEN, Prompt
from engine.request.call import SAMPLING
from engine.tables import lengths, outside
from strategies import Strategy
from strategies.operations import needs_of


def check_model(model: PreTrainedModel) -> None:
    if model.training:
        raise InputError("the model is in training mode, where dropout makes its text random: call model.eval() first")
    if any(module.training and module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)):
        raise InputError(
            "the model has dropout in training mode (adapters are added that way), which makes its text random: "
            "call model.eval() first"
        )
    if prompt_device(model).type == "meta":
        raise InputError(
            "the model is on the device 'meta', where weights have no values, so nothing can be computed: load it with "
            "from_pretrained(...), which brings its weights"
        )
    overrides = type(model).generate is not GenerationMixin.generate
    if overrides and not quirks_of(model.config).generates_alike:
        raise InputError(f"{type(model).__name__} generates in a way of its own: call its own generate()")


_REMEDIES = {
    "compile_config": "give EngineConfig(compile=...) to a Generator instead",
    "decoder_start_token_id": "it is for models with an encoder; give the prompt's first token in the prompt",
    "num_beams": "they are for beam search; leave the strategy out",
    "penalty_alpha": "contrastive search also needs top_k=2 or more, and no do_sample",
    "num_return_sequences": "it gives the same text every time; use do_sample=True, or num_beams",
    "num_beam_groups": "groups need num_beams=2 or more",
    "diversity_penalty": "it is for num_beam_groups=2 or more",
    "length_penalty": "it compares the texts of beams; give num_beams=2 or more",
    "early_stopping": "it ends a search with num_beams=2 or more",
    "num_assistant_tokens": "it is for assistant_model",
    "num_assistant_tokens_schedule": "it is for assistant_model",
    "assistant_confidence_threshold": "it is for assistant_model",
    "max_matching_ngram_size": "it is for prompt_lookup_num_tokens",
    "prompt_lookup_num_tokens": "it proposes tokens to greedy search and sampling; leave it out, or give num_beams=1",
    "assistant_early_exit": "layers of the model are no draft here; give a smaller assistant_model",
    "use_mtp": "heads of the model are no draft here; give an assistant_model",
    "assistant_lookbehind": "vocabularies are translated by whole words here; leave it out",
    "target_lookbehind": "vocabularies are translated by whole words here; leave it out",
}

# Fields of a `GenerationConfig` that are carried out whatever the strategy.
_ALWAYS_APPLY = {name for name, parameter in PARAMETERS.items() if parameter.is_setting} - _REMEDIES.keys() | {
    "max_cache_len", "prefill_chunk_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "top_h",
    "remove_invalid_values", "watermarking_config", "return_dict_in_generate", "disable_compile", "bos_token_id",
    "transformers_version",
}  # fmt: skip


# Left out, these would change the text, so a whole configuration may not ask for them either, nor the model's own.
_CHANGE_THE_TEXT = {
    "token_healing": "it is not available, and the text would be another without: trim the prompt's last token "
    "yourself, and set token_healing=False",
    "assistant_ensemble_weight": "it would change the text, and assisted decoding here never does: leave it out",
}


def check_applies(
    model: PreTrainedModel, strategy: Strategy, config: GenerationConfig, options: Mapping[str, object]
) -> None:
    """Refuse options of the call that have no effect. config: all parameters, which may serve other calls too."""
    if strategy.samples and config.temperature == 0:
        raise OptionError("temperature has to be over 0; for the most probable token leave do_sample out")
    neutral = default_generation_params()
    parameters = GenerationConfig().to_dict()
    strategy_options: dict[str, object] = {}
    if is_dataclass(strategy):
        strategy_options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    asked = {name: getattr(config, name, None) for name in _CHANGE_THE_TEXT}
    asked |= {name: value for name, value in options.items() if name in parameters and not name.startswith("_")}
    applies = _ALWAYS_APPLY | ({"decoder_start_token_id"} if model.config.is_encoder_decoder else set())
    for name, value in asked.items():
        if name in strategy_options and value not in (None, strategy_options[name]):
            raise OptionError(
                f"{name}={value!r} contradicts the strategy that was given, {strategy}: say it only there"
            )
        if value is None or value is False or value == neutral.get(name) or name in strategy_options:
            continue
        if name in ("temperature", "top_k") and value == 0 and not strategy.samples:
            continue  # another way to say greedy
        if name in SAMPLING and not strategy.samples:
            raise OptionError(
                f"{name}={value!r} applies to sampling, but {strategy.name} draws nothing: give do_sample=True too, "
                f"or leave {name} out"
            )
        if name in _CHANGE_THE_TEXT:
            raise OptionError(f"{name}={value!r} cannot apply: {_CHANGE_THE_TEXT[name]}")
        if name not in applies:
            remedy = _REMEDIES.get(name, "")
            if name == "num_return_sequences" and strategy.samples:
                remedy = f"texts per prompt are {needs_of(strategy).texts_per_prompt}; give the prompt several times"
            remedy = f"{strategy.name} has no use for it" + (f": {remedy}" if remedy else "")
            raise OptionError(f"{name}={value!r} cannot apply: {remedy}")


# Which ids a model has to know: in any case, or only if the call itself says them, because nothing comes of others.
# The pad id is checked where rows are filled up with them; the id of the beginning where it begins a prompt.
_KNOWN_IDS = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id")
_KNOWN_IF_SAID = ("suppress_tokens", "begin_suppress_tokens")


def check_said_ids(model: PreTrainedModel, config: GenerationConfig, options: Mapping[str, object]) -> None:
    """Whether the ids among the parameters are in the vocabulary. An end id may be any: with -1 no text ends."""
    vocabulary = vocabulary_of(model)
    for name in (*_KNOWN_IDS, *_KNOWN_IF_SAID):
        if vocabulary is None or (name in _KNOWN_IF_SAID and name not in options):
            continue
        wrong = [token for token in _flat(getattr(config, name, None)) if not 0 <= token < vocabulary]
        if wrong and (name != "decoder_start_token_id" or model.config.is_encoder_decoder):
            raise OptionError(name + ": " + outside(wrong[0], vocabulary))
    if config.exponential_decay_length_penalty is not None:
        ends = _flat(config.eos_token_id)
        wrong = [token for token in ends if token < 0 or (vocabulary is not None and token >= vocabulary)]
        if not ends or wrong:
            raise OptionError(
                "exponential_decay_length_penalty makes the end more likely, which takes an eos_token_id that the "
                f"model knows, but it is {config.eos_token_id}: give one, or leave the penalty out"
            )


def _flat(ids: Any) -> list[int]:
    if isinstance(ids, torch.Tensor):
        return _flat(ids.tolist())
    if isinstance(ids, dict):
        return _flat(list(ids))
    if isinstance(ids, (list, tuple)):
        return [token for item in ids for token in _flat(item)]
    return [] if ids is None or isinstance(ids, float) else [ids]


def check_pad_id(model: PreTrainedModel, pad_id: int, texts: int) -> None:
    """Whether what rows are filled up with that end before others can be fed. texts: rows in the end."""
    vocabulary = vocabulary_of(model)
    if vocabulary is None or 0 <= pad_id < vocabulary:
        return
    raise OptionError(
        f"pad_token_id: {outside(pad_id, vocabulary)}. Of {texts} texts some may end before the others and are "
        "then filled up with it: give a pad_token_id from the vocabulary"
    )


def check_embeds(model: PreTrainedModel, prompt: Prompt) -> None:
    """Embeddings have to fit the model, and the ids that come with them."""
    if prompt.embeds is None:
        return
    if "inputs_embeds" not in forward_parameters(model):
        raise OptionError(f"{type(model).__name__} takes no inputs_embeds: give the prompt as token ids")
    embeddings = model.get_input_embeddings()
    width = embeddings(torch.zeros(1, dtype=torch.long, device=prompt.embeds.device)).shape[-1]
    shape, rows = list(prompt.embeds.shape), len(prompt.ids)
    if shape[0] != rows or shape[2] != width:
        raise InputError(
            f"inputs_embeds have shape {shape} where the model and the ids given with them ask for [{rows} "
            f"rows, columns, {width}]"
        )
    if prompt.columns_without_ids < 0:
        raise InputError(
            f"there are {prompt.ids.shape[1]} token ids but only {prompt.columns} columns of inputs_embeds: ids given "
            "beside embeddings name the last of their columns"
        )


def check_ids(model: PreTrainedModel, prompt: Prompt) -> None:
    rows, tokens = prompt.ids.shape
    if rows == 0 or prompt.columns == 0:
        raise InputError(f"the prompt is empty ({rows} rows of {tokens} tokens): the model needs a token to begin with")
    is_encoder_decoder = model.config.is_encoder_decoder
    where, reader = ("decoder_input_ids: ", model.get_decoder()) if is_encoder_decoder else ("", model)
    if prompt.mask is not None and prompt.mask.shape == prompt.ids.shape:
        check_vocabulary(reader, prompt.ids[prompt.mask != 0], where)
        where = "pad_token_id, or the id in place of a pad: "
    check_vocabulary(reader, prompt.ids, where)


def check_vocabulary(reader: object, ids: torch.Tensor, where: str = "") -> None:
    """Whether `reader`, a model or its encoder, knows all of these ids. where: goes before the message."""
    vocabulary = len(getattr(input_embeddings(reader), "weight", ()))
    if vocabulary == 0 or ids.numel() == 0:  # embeddings of a kind of its own
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(where + outside(wrong, vocabulary))


def check_mask(prompt: Prompt, mask: torch.Tensor, cached_tokens: int, name: str) -> int:
    """The columns of `mask` before the prompt's: those in the cache, or 0. name: of the mask, in errors."""
    rows, tokens = len(prompt.ids), prompt.columns
    cached_columns = cached_tokens if cached_tokens > 0 and list(mask.shape) == [rows, cached_tokens + tokens] else 0
    if cached_columns == 0 and list(mask.shape) != [rows, tokens]:
        inputs = "token ids" if prompt.embeds is None else "embeddings"
        raise InputError(
            f"{name} has shape {list(mask.shape)}, but the {inputs} have {[rows, tokens]}: it needs one entry per token"
        )
    padded_rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
    if padded_rows and cached_tokens > 0:
        raise InputError(
            f"row {padded_rows[0]} has ended and is filled up with pad tokens: give all rows new tokens, or go on "
            "without it"
        )
    if padded_rows and not mask[padded_rows[0]].any():
        raise InputError(
            f"row {padded_rows[0]} has no token to begin with: its {name} is 0 everywhere. Give 1 where there is a "
            "token, also where the pad id stands for one"
        )
    if padded_rows:
        raise InputError(
            f"row {padded_rows[0]} is padded on the right, so the model would continue after padding: pad on the left "
            "(tokenizer.padding_side = 'left'), or give attention_mask where the pad id stands for a token"
        )
    if cached_tokens >= cached_columns + tokens:
        raise InputError(
            f"the cache holds {cached_tokens} tokens and the prompt has {cached_columns + tokens}: nothing is left to "
            "feed. Give the whole conversation, with at least one token that the cache has not seen; or the new tokens "
            "alone, with an attention_mask that covers those in the cache too"
        )
    return cached_columns


def check_model_kwargs(model: PreTrainedModel, prompt: Prompt, mask: torch.Tensor) -> None:
    """Whether what has an entry per token is a tensor of the right shape, with numbers that the model can look up."""
    for name in PER_TOKEN:
        value = prompt.model_kwargs.get(name)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} is a tensor [rows, tokens], not a {type(value).__name__}")
        if value.ndim == 0 or value.shape[-1] != mask.shape[1]:
            raise InputError(
                f"{name} has shape {list(value.shape)}, but the mask covers {mask.shape[1]} tokens: "
                "its last dimension needs one entry per token"
            )
        if value.ndim > 1 and value.shape[-2] not in (1, len(mask)):
            raise InputError(f"{name} has shape {list(value.shape)}, but there are {len(mask)} rows")
        table_size = _table_of(model, name)
        if value.dtype == torch.bool and (name == "position_ids" or table_size is not None):
            raise InputError(f"{name} are integers, one for each token, not truth values")
        if table_size is not None and (
            value.is_floating_point() or not 0 <= int(value.min()) <= int(value.max()) < table_size
        ):
            low, high = value.min().item(), value.max().item()
            raise InputError(
                f"{name} has {value.dtype} from {low} to {high}, but the model looks them up in a table of {table_size}"
            )


def _table_of(model: PreTrainedModel, name: str) -> int | None:
    """How many entries of this kind the model has embeddings for; None where it has no table of them."""
    if name == "position_ids":
        tables = [module for path, module in model.named_modules() if path.endswith(("wpe", "position_embeddings"))]
        tables = [module for module in tables if isinstance(module, nn.Embedding)]
        return tables[0].num_embeddings if tables else None
    if name == "token_type_ids" and "token_type_ids" in forward_parameters(model):
        return getattr(model.config, "type_vocab_size", None) or vocabulary_of(model)
    return None


def check_ids_are_known(read_ids: torch.Tensor, options: Mapping[str, object]) -> None:
    """Refuse what compares with the ids that were read, where there are none. read_ids: ids [rows, columns] if 2-D."""
    for name, neutral in (("encoder_repetition_penalty", 1), ("encoder_no_repeat_ngram_size", 0)):
        if options.get(name) not in (None, neutral) and read_ids.ndim != 2:
            raise OptionError(
                f"{name}={options[name]!r} compares with the token ids that were read, and none were given, only what "
                "was made of them: give input_ids, or leave it out"
            )


def check_length(prompt_columns: int, total: int) -> None:
    if total <= prompt_columns:
        raise OptionError(
            f"max_length={total} leaves no room after {prompt_columns} prompt tokens: raise it, or use max_new_tokens"
        )


class PositionsError(InputError):
    """A text is longer than the model has positions. room: tokens that its prompt may have."""

    def __init__(self, message: str, room: int):
        super().__init__(message)
        self.room = room


def check_positions(
    model: PreTrainedModel, cache: EngineCache | None, prompt_columns: int, total: int, fed: int
) -> None:
    """Raise `PositionsError` where the model lacks positions for `fed` of `total` columns: the last may not be fed."""
    positions = most_positions(model)
    if positions is None:
        return
    needed = attention_view(cache).positions_needed(fed)
    if needed > positions:
        raise PositionsError(
            f"{lengths(prompt_columns, total - prompt_columns)} need {needed:,} positions, but the model "
            f"has {positions:,}: shorten the text, or keep a window of it with cache='sink' (or raise "
            "config.max_position_embeddings if its positions are known to reach further)",
            room=prompt_columns - (needed - positions),
        )


def is_fixed(cache: EngineCache) -> bool:
    """Whether tensors of it never move, so that it cannot become more rows than they were made for."""
    return any(subcache.fixed for subcache in getattr(cache, "parts", ()))


def check_pieces(prompt: Prompt, chunk_tokens: int | None) -> None:
    raw = sorted(set(prompt.model_kwargs) & set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL))
    if chunk_tokens is not None and raw:
        raise OptionError(
            f"{', '.join(raw)} cannot be cut into pieces of {chunk_tokens} tokens: read the prompt at once, without "
            "prefill_chunk_tokens or prefill_chunk_size"
        )
