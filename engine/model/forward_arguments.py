"""`ForwardArguments`: what a model's forward gets for the columns of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin, PreTrainedModel

from caches import EngineCache
from engine.model.cache_argument import cache_argument
from engine.model.columns import Columns
from engine.model.first_layer_probe import Probe
from engine.model.forward_parameters import forward_parameters
from engine.model.masks import StepMasks, contiguous
from engine.model.model_inputs import ModelInputs
from engine.prompt import ENCODED


class Step(NamedTuple):
    """One forward: the columns from `begin` to `end`; `ids` [rows, n] are those after column `before`.

    prefill: of the first feed of a run.
    """

    ids: torch.Tensor
    columns: Columns
    cache: EngineCache | Probe
    before: int
    begin: int
    end: int
    prefill: bool


class ForwardArguments:
    """Of one model. of_cache: the one that takes the cache.

    masks: its attention masks. prepares_itself: whether the model's class makes the arguments of a forward in a way of
    its own.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._is_encoder_decoder = model.config.is_encoder_decoder  # attributes of configurations take microseconds
        self._takes = forward_parameters(model)
        prepare = type(model).prepare_inputs_for_generation
        self.prepares_itself = prepare is not GenerationMixin.prepare_inputs_for_generation
        self.of_cache = cache_argument(model)
        self.masks = StepMasks(model, self.of_cache.can_be_ours)

    def of(self, step: Step, inputs: ModelInputs, logits: int) -> dict[str, object]:
        """Those of a step. logits: after how many of the last tokens."""
        arguments = self._before_embeddings(step, inputs)
        if "logits_to_keep" in arguments:  # some models that prepare their inputs set a number of their own
            arguments["logits_to_keep"] = logits
        first_column = step.begin - step.before
        if inputs.embeds is not None and first_column < inputs.embeds.shape[1]:
            arguments["inputs_embeds"] = self._embedded(
                inputs.embeds, step.ids, max(first_column, 0), step.end - step.before
            )
            arguments.pop("input_ids", None)
        if step.end - step.begin > 1:
            mask = self.masks.in_place_of_2d(step.cache, step.columns, step.begin, step.end)
            if mask is not None:
                arguments["attention_mask"] = mask
        return arguments

    def of_compiled(self, arguments: dict[str, Any], step: Step) -> dict[str, object]:
        """`arguments` of a step of one token per row, with those of fixed shape."""
        prefix = "decoder_" if self._is_encoder_decoder else ""
        assert not isinstance(step.cache, Probe)
        fixed = self.fixed(arguments[f"{prefix}input_ids"], step.columns, step.cache, step.end)
        arguments |= {f"{prefix}{name}": fixed[name] for name in ("input_ids", "attention_mask")}
        return arguments | {name: fixed[name] for name in ("position_ids",) if name in arguments}

    def fixed(self, ids: torch.Tensor, columns: Columns, cache: EngineCache, end: int) -> dict[str, object]:
        """Ids, positions and mask of a compiled step of one token per row, `ids` [rows, 1]: every shape is fixed."""
        positions = contiguous(columns.positions(end - 1, end))
        mask = self.masks.of_graph(cache, columns, positions, end, len(ids))
        return {"input_ids": contiguous(ids), "position_ids": positions, "attention_mask": mask}

    def taken(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """Those of the inputs that the model's forward takes."""
        return {name: value for name, value in inputs.items() if name in self._takes}

    def _before_embeddings(self, step: Step, inputs: ModelInputs) -> dict[str, object]:
        """Those of a step, before embeddings take the place of ids."""
        columns, cache, begin, end = step.columns, step.cache, step.begin, step.end
        is_encoder_decoder = self._is_encoder_decoder
        mask = self.masks.of_columns(columns, begin, end)
        arguments: dict[str, object] = {
            "decoder_attention_mask" if is_encoder_decoder else "attention_mask": mask,
            **self.of_cache.inputs(cache.handle),
            "logits_to_keep": 1,
        }
        if self.prepares_itself or inputs.model_kwargs or is_encoder_decoder:
            # As long as the text, also where only the cache has its first tokens: some models read the length.
            ids = torch.nn.functional.pad(step.ids[:, : end - step.before], (step.before, 0))
            if not is_encoder_decoder and self._gives_positions(columns):  # decoders compute their own
                arguments["position_ids"] = contiguous(columns.positions(0, end))
            model_kwargs = inputs.until(end)
            if ENCODED in model_kwargs:  # models write into the containers, and without a cache every step needs them
                model_kwargs[ENCODED] = {
                    modality: type(output)(**output) for modality, output in model_kwargs[ENCODED].items()
                }
            return self._model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=end - begin,
                is_first_iteration=step.prefill,
                # It decides whether media are needed again, also where the model does not ask for it.
                **(self.taken(arguments) | {"use_cache": arguments["use_cache"]} | model_kwargs),
            )
        if end - begin == 1:
            own_mask = self.masks.in_place_of_2d(cache, columns, begin, end)
            arguments["attention_mask"] = mask if own_mask is None else own_mask
        arguments["input_ids"] = step.ids[:, max(begin - step.before, 0) : end - step.before]
        if self._gives_positions(columns):
            arguments["position_ids"] = columns.positions(begin, end)
        if "cache_position" in self._takes:  # code from outside transformers; its own models have dropped it
            arguments["cache_position"] = torch.arange(begin, end, device=step.ids.device)
        return self.taken(arguments)

    def _gives_positions(self, columns: Columns) -> bool:
        """Models without a cache count the tokens themselves: reformer fails where it has to pad given positions."""
        return self.of_cache.can_be_ours or not columns.are_plain

    def _embedded(self, embeds: torch.Tensor, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Embeddings [rows, end - begin, hidden_size]: those given, then those of the ids that come after them."""
        embedded_columns = embeds.shape[1]
        embeddings = [embeds[:, begin:end]]
        if end > embedded_columns:
            embeddings.append(self._model.get_input_embeddings()(ids[:, embedded_columns:end]).to(embeds.dtype))
        return torch.cat(embeddings, dim=1)
