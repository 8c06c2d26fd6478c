"""Every private name of transformers and accelerate that the project uses, one function each; here and nowhere else.

All are in transformers 5.17 to 5.23 and accelerate 1.x; where releases differ, the function says so.
`tests/unit/test_private_names.py` calls each of them on the installed release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

_READING = Lock()  # headers of GGUF files


def records_outputs(hook: object) -> bool:
    """Whether a hook of a module is transformers' own, which records outputs where a call asks for them."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def attn_implementation(config: PreTrainedConfig) -> str | None:
    """Which attention a model computes: "sdpa", "eager", ...; None where a configuration does not say."""
    return config._attn_implementation


def rank_count(model: PreTrainedModel) -> int:
    """How many processes transformers has split a model's weights over (tensor parallel)."""
    return getattr(model, "_tp_size", None) or 1


def plan_name(name: str) -> str:
    """The name of a module in transformers' plans, where * is the number of a layer."""
    return re.sub(r"\b\d+\b", "*", name)


def rank_mesh(model: PreTrainedModel) -> object:
    """The device mesh of the ranks of such a model: the only dimension in 5.17, one of several in later releases."""
    mesh = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def supports_attention_backend(model: PreTrainedModel) -> bool:
    """Whether a model's attention is a function that can be replaced, which takes 4D masks as they are."""
    return model._supports_attention_backend


def supports_default_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether transformers' `generate` gives a model a `DynamicCache`, not a cache of the model's own class."""
    return model._supports_default_dynamic_cache()


def can_compile_fullgraph(model: PreTrainedModel) -> bool:
    """Whether transformers marks a model as one whose decode step can be one graph."""
    return model._can_compile_fullgraph


def model_from_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, **options: object
) -> PreTrainedModel:
    """A model of class `model_class` with new weights. options: `dtype`, `attn_implementation`, ..."""
    return model_class._from_config(config, **options)


def accelerate_hook(module: object) -> object:
    """The hook by which accelerate brings weights and inputs of a module together; None where there is none."""
    return getattr(module, "__dict__", {}).get("_hf_hook")  # a module takes longer to say that it has none


def default_generation_params() -> dict[str, Any]:
    """The values that transformers gives parameters of `GenerationConfig` which are None in a call and its model."""
    return GenerationConfig._get_default_generation_params()


def prepare_generation_config(
    model: PreTrainedModel, config: GenerationConfig | None, /, **options: object
) -> tuple[GenerationConfig, dict[str, Any]]:
    """All parameters of a call: `options` before `config` before the model's own; and `options` that are no parameters.

    Raises `ValueError`, `TypeError` and `AttributeError` for values that transformers refuses.
    """
    return model._prepare_generation_config(config, **options)


class SpecialTokens(NamedTuple):
    """Ids as tensors on the model's device, None for tokens that a model does not have.

    eos: [ids]. pad: a scalar. decoder_start: a scalar, or [rows]; for encoder-decoder models.
    """

    eos: torch.Tensor | None
    pad: torch.Tensor | None
    decoder_start: torch.Tensor | None


def prepare_special_tokens(
    model: PreTrainedModel, config: GenerationConfig, has_mask: bool, device: torch.device, rows: int
) -> None:
    """Add to `config` what `special_tokens` reads. has_mask: False warns where the mask cannot be inferred.

    Raises `ValueError` where an encoder-decoder model has no token to begin with.
    """
    model._prepare_special_tokens(config, has_mask, device=device, batch_size=rows)


def special_tokens(config: GenerationConfig) -> SpecialTokens:
    """The special tokens of a configuration that was given to `prepare_special_tokens`."""
    return SpecialTokens(config._eos_token_tensor, config._pad_token_tensor, config._decoder_start_token_tensor)


def prepare_generated_length(
    model: PreTrainedModel, config: GenerationConfig, inputs: torch.Tensor, tokens: int, chosen: set[str]
) -> None:
    """Set `max_length` and `min_length` of `config` from `max_new_tokens` and `min_new_tokens`.

    inputs: ids [rows, tokens] or embeddings [rows, tokens, width]. tokens: of the ids. chosen: which of "max_length"
    and "min_length" were chosen.
    """
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length="max_length" not in chosen,
        has_default_min_length="min_length" not in chosen,
        model_input_name="input_ids" if inputs.ndim == 2 else "inputs_embeds",
        input_ids_length=tokens,
        inputs_tensor=inputs,
    )


def prepare_attention_mask(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The mask [rows, tokens] that transformers infers from pad ids; see `prepare_special_tokens`."""
    return model._prepare_attention_mask_for_generation(ids, config, {})


def prepare_model_inputs(
    model: PreTrainedModel, bos_id: int | None, model_kwargs: Mapping[str, object]
) -> tuple[torch.Tensor, str, dict[str, Any]]:
    """What an encoder reads, its name, and the other inputs. Without any: `bos_id`, or ids below 0."""
    return model._prepare_model_inputs(None, bos_id, model_kwargs)


def prepare_decoder_input_ids(
    model: PreTrainedModel,
    rows: int,
    name: str,
    model_kwargs: Mapping[str, object],
    start: object,
    device: torch.device,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The ids [rows, tokens] that a decoder begins with, and `model_kwargs` without them.

    name: of what the encoder reads. start: `SpecialTokens.decoder_start`.
    """
    return model._prepare_decoder_input_ids_for_generation(
        batch_size=rows, model_input_name=name, model_kwargs=model_kwargs, decoder_start_token_id=start, device=device
    )


def prepare_encoder_kwargs(
    model: PreTrainedModel, config: GenerationConfig, name: str, inputs: torch.Tensor, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """`model_kwargs` with the outputs of the model's encoders; what was encoded before stays.

    inputs: what an encoder reads, called `name`. In 5.17 the encoder of encoder-decoder models alone; media of other
    models are encoded in their forward there.
    """
    prepare = getattr(model, "_maybe_prepare_encoder_kwargs_for_generation", None)
    if prepare is None:  # 5.17
        if not model.config.is_encoder_decoder or "encoder_outputs" in model_kwargs:
            return model_kwargs
        prepare = model._prepare_encoder_decoder_kwargs_for_generation
    encoded = prepare(inputs, model_kwargs, model_input_name=name, generation_config=config)
    if not encoded.get("mm_encoder_outputs", True):  # of a prompt of text alone
        encoded = {name: value for name, value in encoded.items() if name != "mm_encoder_outputs"}
    return encoded


def has_own_position_ids(model: PreTrainedModel) -> bool:
    """Whether a model's class overrides how position ids are prepared (multimodal rotary embeddings)."""
    usual = GenerationMixin._prepare_position_ids_for_generation
    return type(model)._prepare_position_ids_for_generation is not usual


def prepare_position_ids(
    model: PreTrainedModel, inputs: torch.Tensor, model_kwargs: Mapping[str, object]
) -> torch.Tensor | None:
    """The position ids of a prompt; None for models that take none. inputs: ids or embeddings."""
    return model._prepare_position_ids_for_generation(inputs, model_kwargs)


def update_model_kwargs(model: PreTrainedModel, outputs: object, model_kwargs: Mapping[str, object]) -> dict[str, Any]:
    """`model_kwargs` for the next forward: masks, token types and positions are one token longer."""
    return model._update_model_kwargs_for_generation(
        outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
    )


def logits_processors(model: PreTrainedModel, config: GenerationConfig, **arguments: object) -> LogitsProcessorList:
    """The logits processors that `config` asks for, in transformers' order, with those that the call gives.

    arguments: `input_ids_seq_length`, `encoder_input_ids`, `logits_processor`, `prefix_allowed_tokens_fn`, `device`,
    `model_kwargs`. Raises `ValueError` and `TypeError` for values that transformers refuses.
    """
    return model._get_logits_processor(generation_config=config, **arguments)


def stopping_criteria(
    model: PreTrainedModel, config: GenerationConfig, criteria: StoppingCriteriaList, tokenizer: PreTrainedTokenizerBase
) -> StoppingCriteriaList:
    """The stopping criteria that `config` asks for, and `criteria`."""
    return model._get_stopping_criteria(config, criteria, tokenizer)


def constraint_of(processor: Any) -> Callable[[int, torch.Tensor], list[int]]:
    """The function that a `PrefixConstrainedLogitsProcessor` asks which tokens may come next."""
    return processor._prefix_allowed_tokens_fn


def quantized_parts(layer: object) -> list[Any]:
    """What a quantized layer of a cache holds beside its exact tokens: codes, and an index of rows not applied yet."""
    return [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values", "_pending_beam_idx")]


def quantized_rows(layer: object) -> int:
    """Rows of such a layer after its first update."""
    codes, _, pending = quantized_parts(layer)
    if pending is not None:
        return len(pending)
    tensor, meta = codes if isinstance(codes, tuple) else (codes, None)
    return (meta["shape"] if isinstance(meta, dict) else tensor.shape)[0]


def follows_rows(layer: object) -> bool:
    """Whether `reorder_cache` of a quantized layer reorders its codes: that of 5.17 leaves them as they are."""
    return hasattr(layer, "_pending_beam_idx") or "reorder_cache" in vars(type(layer))


class _WithoutLayers:
    """What the map of a model's names reads of a model. Of every submodule it makes a map too: for 30 layers that takes
    10 s, and the base model alone has names of its own."""

    def __init__(self, model: PreTrainedModel):
        self.config, self.state_dict = model.config, model.state_dict
        base = model.base_model
        self._children = [] if base is model else [(model.base_model_prefix, _WithoutLayers(base))]

    def named_children(self) -> list[tuple[str, _WithoutLayers]]:
        return self._children


class GgufTensor:
    """A tensor of a GGUF file, which is read when it is asked for.

    type_name: "Q8_0", "F32", ... order: int64 [outs], which output of the file each output of the model is; None where
    transformers changes more than the order of the outputs, or there are not two axes.
    """

    def __init__(self, info: Any, content: Any, change: Callable[[str, np.ndarray], np.ndarray | None]):
        """info, content: of transformers' reader. change: what transformers does with a tensor of that name; None where
        it puts it into others."""
        from gguf import GGMLQuantizationType

        self._info, self._content, self._change = info, content, change
        self._type = GGMLQuantizationType(info.ggml_type)
        self.type_name: str = self._type.name
        self.order = self._order() if len(info.shape) == 2 else None

    def _order(self) -> torch.Tensor | None:
        outs = self._info.shape[0]
        numbered = self._change(self._info.name, np.arange(outs, dtype=np.float32)[:, None])
        if numbered is None or numbered.shape != (outs, 1):
            return None
        order = torch.from_numpy(numbered[:, 0].astype(np.int64))
        return order if torch.equal(order.sort().values, torch.arange(outs)) else None

    def raw(self) -> torch.Tensor:
        """Its bytes, uint8 [outs, bytes], in the file's order."""
        raw: torch.Tensor = self._content[...]
        return raw

    def rows(self, outs: torch.Tensor) -> torch.Tensor:
        """Outputs of the model in full [n, width], in the order of `order`."""
        from gguf import dequantize

        assert self.order is not None
        return torch.from_numpy(dequantize(self.raw()[self.order[outs]].numpy(), self._type))

    @property
    def is_separate(self) -> bool:
        """Whether it is a weight of the model by itself; nothing is read."""
        with np.errstate(all="ignore"):  # some models take logarithms
            return self._change(self._info.name, np.broadcast_to(np.float32(1), self._info.shape)) is not None

    def values(self) -> torch.Tensor | None:
        """All in full, as the model has it; None where transformers puts it into others."""
        from gguf import dequantize

        raw = self.raw()
        full = dequantize(raw.numpy(), self._type) if raw.dtype == torch.uint8 else raw.float().numpy()
        changed = self._change(self._info.name, full.reshape(self._info.shape))
        return None if changed is None else torch.from_numpy(np.ascontiguousarray(changed))


@contextmanager
def _known_blocks() -> Iterator[None]:
    """Let transformers' reader of headers know the sizes of blocks that its table lacks for so long: of Q5_0 and Q5_1,
    and in 5.17 also of Q4_0 and Q4_1."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    types = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    with _READING:
        added = {int(number): GGML_QUANT_SIZES[number] for number in types if number not in GGML_BLOCK}
        GGML_BLOCK.update(added)
        try:
            yield
        finally:
            for number in added:
                del GGML_BLOCK[number]


def gguf_tensors(file: Path, model: PreTrainedModel) -> dict[str, GgufTensor] | None:
    """The tensors of a GGUF file by the names of `model`, which may have no memory.

    None for architectures of which transformers does not tell which tensor is which, and for files with types that it
    cannot decode.
    """
    try:
        from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
    except ImportError:
        return None
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    settings = model.config.to_dict()
    try:
        with _known_blocks():
            header = GgufHeader.from_file(str(file))
            content = load_gguf_state_dict(header)
    except ValueError:
        return None
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=settings)
    try:
        names = get_gguf_hf_weights_map(_WithoutLayers(model), processor)
    except NotImplementedError:
        return None

    def change(name: str, values: np.ndarray) -> np.ndarray | None:
        parsed: dict[str, Any] = {"tensors": {}, "config": settings}
        result = processor.process(values, name, tensor_key_mapping=names, parsed_parameters=parsed)
        return None if parsed["tensors"] or result.name != name else result.weights

    known = [info for info in header.tensors if info.name in names]
    return {names[info.name]: GgufTensor(info, content[info.name], change) for info in known}
