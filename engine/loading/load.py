"""Loads models and tokenizers, and unwraps models that were given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from caches.platform.host_allocator import give_back_freed_memory
from caches.platform.out_of_memory import first_line, in_words, is_out_of_memory
from caches.platform.torch_api import inside_compiled
from caches.platform.warn_once import warn_once
from configs import EngineConfig
from engine.errors import EngineError, InputError, OptionError
from engine.loading.gguf import load_codes, settings_of, why_damaged
from engine.loading.location import ADAPTER, GGUF, locate
from engine.loading.placement import check_here, is_on_cpu, read_dtype
from engine.parallel.tensor_parallel import arguments_of_part

_IN_WORDS = (OSError, ValueError, ImportError, SafetensorError)  # whose texts say what happened

SHIPPED_MODEL = Path(__file__).parents[1] / "shipped"
"""The folder of the package's small model, a Llama trained on Python's standard library."""


def load(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    reads_images: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer), loaded if `model` is a local path or a hub id; else the model without its wrappers.

    tokenizer: None loads the model's. reads_images: with what reads images, where a model can be loaded without it.
    Raises `InputError` if `model` is neither or cannot be loaded, `OptionError` for an unknown data type and a missing
    device.
    """
    if not isinstance(model, (str, Path)):
        if config.tp > 1:
            raise OptionError(f"tp={config.tp} is about how a model is loaded, and this one is: give its path")
        return unwrapped(model), tokenizer
    dtype = config.dtype if config.dtype == "auto" else read_dtype(config.dtype)
    check_here(config.device_map)
    model, trust = _source(model)
    if "gguf_file" in trust and config.tp == 1:
        loaded = _load_gguf(Path(model, str(trust["gguf_file"])), tokenizer, dtype, config)
        give_back_freed_memory()  # of the file's tensors
        return loaded
    trust["trust_remote_code"] = config.trust_remote_code  # without a value, transformers asks on standard input
    remedy = (
        "which may not run by default: read that code, then load the model with Generator(..., "
        "config=EngineConfig(trust_remote_code=True)), on the command line with --trust-remote-code"
    )
    with _errors_in_one_line(model, remedy):
        where: dict[str, object] = {"device_map": config.device_map}
        try:
            model_config = AutoConfig.from_pretrained(model, **trust)
            model_class = auto_class(model_config, reads_images)
        except ValueError:  # an adapter's folder has the model's name in another file
            model_config, model_class = None, AutoModelForCausalLM
        if tokenizer is None:
            with _errors_of_tokenizer(model):
                tokenizer = _load_tokenizer(model, is_adapter=model_config is None, options=trust)
        if config.tp > 1:
            if model_config is None:
                raise InputError(f"tp={config.tp} splits a model's weights, and {str(model)!r} is an adapter")
            where = arguments_of_part(model_config, config.tp)
        return _loaded(model_class, model, dtype=dtype, **where, **trust), tokenizer


def _loaded(model_class: Any, source: str | Path, **options: object) -> PreTrainedModel:
    """What `from_pretrained` makes of it, with a warning where weights are missing."""
    model, loading_info = model_class.from_pretrained(source, output_loading_info=True, **options)
    if missing := sorted(loading_info["missing_keys"]):
        warn_once(
            f"{len(missing)} weights of the model are not in {str(source)!r} (the first is {missing[0]}): they are "
            "random, so its text is too. Does config.json belong to these weights?"
        )
    return model.eval()


def _load_gguf(
    file: Path, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype | str, config: EngineConfig
) -> tuple[PreTrainedModel, Any]:
    """As `load`, of a GGUF file."""
    with _errors_in_one_line(file, "which a GGUF file cannot"), settings_of(file) as settings:
        if tokenizer is None:
            with _errors_of_tokenizer(str(file)):
                tokenizer = AutoTokenizer.from_pretrained(settings)
        model_config = AutoConfig.from_pretrained(settings)
        model_class = auto_class(model_config)
        if config.weights == "file" and is_on_cpu(config.device_map):
            of_others = dtype if isinstance(dtype, torch.dtype) else torch.float32
            loaded = load_codes(file, model_config, model_class, of_others)
            if loaded is not None:
                return loaded.eval(), tokenizer
        options = {"gguf_file": file.name, "device_map": config.device_map}
        return _loaded(model_class, file.parent, dtype=dtype, **options), tokenizer


def load_with_adapter(
    model: str | Path, adapter: Path, config: EngineConfig, reads_images: bool = False
) -> tuple[PreTrainedModel, object]:
    """(model, tokenizer) as of `load`, with the adapter of PEFT in that folder. Raises as `load`."""
    if config.tp > 1:
        raise OptionError(f"tp={config.tp} splits a model's weights, and not an adapter's: leave one of them out")
    if not (adapter / ADAPTER).is_file():
        raise InputError(f"{str(adapter)!r} has no {ADAPTER}: give the folder that PEFT's save_pretrained wrote")
    loaded, tokenizer = load(model, None, config, reads_images)
    with _errors_in_one_line(adapter, "which never runs for an adapter"):
        loaded.load_adapter(str(adapter))
    return loaded.eval(), tokenizer


def _source(model: str | Path) -> tuple[str, dict[str, object]]:
    """The folder or hub id of a model, and further arguments of `from_pretrained`: the name of a GGUF file in it."""
    source = locate(model)
    if not (source.endswith(GGUF) and Path(source).is_file()):
        return source, {}
    if find_spec("gguf") is None:
        raise InputError(f"{source!r} is read with the package gguf, which is not installed: pip install gguf")
    return str(Path(source).parent), {"gguf_file": Path(source).name}


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that this path or name means; None where it means something else."""
    folder, options = _source(model)
    return Path(folder, str(options["gguf_file"])) if options else None


def _load_tokenizer(model: str, is_adapter: bool, options: Mapping[str, object]) -> PreTrainedTokenizerBase:
    """Of the folder or hub id; of an adapter without one that of the model to which it belongs."""
    try:
        return AutoTokenizer.from_pretrained(model, **options)
    except (OSError, ValueError):
        file = find_adapter_config_file(model) if is_adapter else None
        if file is None:
            raise
    base = json.loads(Path(file).read_bytes())["base_model_name_or_path"]
    return AutoTokenizer.from_pretrained(locate(base), **options)


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside wrappers of PEFT, `torch.compile`, DataParallel and DistributedDataParallel.

    Raises `InputError` if there is no `PreTrainedModel` inside.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if (compiled := inside_compiled(inner)) is not None:
            inner = compiled
            warn_once(
                "torch.compile's wrapper of the model is ignored: use EngineConfig(compile='auto') for compiled steps"
            )
        elif isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif hasattr(inner, "peft_config"):
            inner = _out_of_peft(inner)
        else:
            raise InputError(_what_is_expected(model))
    if not isinstance(inner, GenerationMixin):
        raise InputError(
            f"a {type(inner).__name__} has no head that predicts tokens, so it cannot generate: load it with "
            "AutoModelForCausalLM or another class for generation"
        )
    return inner


def _what_is_expected(model: PreTrainedModel) -> str:
    if isinstance(model, type):
        description, remedy = f"the class {model.__name__}", f": load it with {model.__name__}.from_pretrained(...)"
    else:
        description, inner = f"a {type(model).__name__}", getattr(model, "model", None)
        remedy = ": give its .model" if isinstance(inner, PreTrainedModel) else ""
    return (
        "model has to be a transformers PreTrainedModel (also in PEFT's, torch.compile's or DistributedDataParallel's "
        f"wrapper), a local path or hub id, but {description} was given{remedy}"
    )


def _out_of_peft(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside PEFT's wrapper; adapters in its layers stay active."""
    tuner = model.base_model
    for adapter, config in model.peft_config.items():
        # aLoRA searches the prompt for its invocation tokens; methods like Poly wrap the model's forward.
        reads_prompt = config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None)
        if reads_prompt or "forward" in vars(type(tuner)):
            raise InputError(
                f"the PEFT adapter {adapter!r} ({type(config).__name__}) is more than layers of the model: PEFT puts "
                "something into the prompt, the cache or every forward. Call the wrapper's own generate()"
            )
    return tuner.model


def auto_class(config: PreTrainedConfig, reads_images: bool = False) -> Any:
    """transformers' auto class for the text-generating model of this configuration."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and (
        reads_images or not (config.is_encoder_decoder or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING)
    ):
        return AutoModelForImageTextToText
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    texts = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return AutoModelForSeq2SeqLM if texts else AutoModelForSpeechSeq2Seq


def load_config(model: str | Path) -> PreTrainedConfig:
    """The configuration of the model at a local path or a hub id. Code in its repository never runs."""
    remedy = (
        "which never runs to read a configuration: give a model that is part of transformers, or, to engine.plan, a "
        "model that was loaded with Generator(..., config=EngineConfig(trust_remote_code=True))"
    )
    model, options = _source(model)
    file = Path(model, str(options["gguf_file"])) if "gguf_file" in options else None
    with _errors_in_one_line(file or model, remedy):
        if file is not None:
            with settings_of(file) as settings:
                return AutoConfig.from_pretrained(settings)
        return AutoConfig.from_pretrained(model, trust_remote_code=False, **options)


@contextmanager
def _errors_in_one_line(model: str | Path, remedy: str) -> Iterator[None]:
    """Turn errors of loading into an `InputError` of one line. remedy: the end of the message for remote code."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # transformers checks little of what a configuration says
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise InputError(f"{str(model)!r} brings Python code of its own, {remedy}") from error
        reason = first_line(error) if isinstance(error, _IN_WORDS) else in_words(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "its weights have other shapes than its config.json says"
        file = Path(model).expanduser()
        if file.suffix == GGUF and file.is_file() and (damage := why_damaged(file)) is not None:
            reason = f"{damage}: copy or download it again"
        raise InputError(f"no model could be loaded from {str(model)!r}: {reason}") from error


@contextmanager
def _errors_of_tokenizer(model: str | Path) -> Iterator[None]:
    """Turn errors of loading the tokenizer into an `InputError`, but those that `_errors_in_one_line` knows."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or "trust_remote_code" in str(error):
            raise
        missing = "backend tokenizer" in str(error)  # transformers then lists all ways that it has tried
        reason = "its files are missing, or need sentencepiece or tiktoken" if missing else in_words(error)
        raise InputError(
            f"{str(model)!r} has no tokenizer that can be loaded ({reason}): give one, Generator(path, tokenizer) or "
            "generate(..., tokenizer=...), or save one there with tokenizer.save_pretrained(...)"
        ) from error
