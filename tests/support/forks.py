"""Rows that share their prompt: our loop as small as it can be, and models to run it on."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from architectures import prompt, tiny_model
from encoder_decoders import source, tiny_encoder_decoder

import caches
from caches.timeline.shared_timeline import ForkedTimeline

PROMPTS, SIBLINGS, STEPS = 2, 3, 6
ROWS = PROMPTS * SIBLINGS
ENCODED = ["t5", "bart", "whisper"]


def model_with(name: str, attention: str | None = None):
    model = tiny_encoder_decoder(name) if name in ENCODED else tiny_model(name)
    if attention is None:
        return model
    if name in ("gemma2", "gpt_oss") and attention == "sdpa":
        pytest.skip("has no such attention")
    if name in ("bloom", "falcon", "mamba2"):
        if attention == "eager":
            pytest.skip("chooses its attention itself")
        return model
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    return model


class Loop:
    """Our loop, as little of it as there has to be: two prompts, the first of them padded, then any tokens."""

    def __init__(self, model, cache="dynamic", **options):
        self.model, self.takes = model, inspect.signature(model.forward).parameters
        self.cache = caches.build(cache, model.config, **options)
        self.model_kwargs, self.is_encoder_decoder = {}, model.config.is_encoder_decoder
        inputs = source(model.config.model_type) if self.is_encoder_decoder else prompt()
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        ids = prompt()["input_ids"][:, 4:].to(model.device) if self.is_encoder_decoder else inputs["input_ids"]
        mask = torch.ones_like(ids) if self.is_encoder_decoder else inputs["attention_mask"]
        if self.is_encoder_decoder:
            with torch.no_grad():
                self.model_kwargs["encoder_outputs"] = (model.get_encoder()(**inputs).last_hidden_state,)
            if model.config.model_type != "whisper":
                self.model_kwargs["attention_mask"] = inputs["attention_mask"]
        self.mask = mask[:, :0]
        self.tokens = torch.Generator().manual_seed(1)
        self.feed(ids, mask)

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(ids) if mask is None else mask], dim=1)
        arguments = {"past_key_values" if "past_key_values" in self.takes else "cache_params": self.cache.handle}
        arguments |= {"decoder_input_ids" if self.is_encoder_decoder else "input_ids": ids} | self.model_kwargs
        if not self.is_encoder_decoder:
            arguments["attention_mask"] = self.mask
            if "position_ids" in self.takes:
                arguments["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self.cache.begin(ids.shape[1])
        logits = self.model(**arguments, use_cache=True).logits
        self.cache.commit()
        return logits

    def step(self, tokens: int = 1) -> torch.Tensor:
        return self.feed(torch.randint(3, 95, (len(self.mask), tokens), generator=self.tokens).to(self.mask.device))

    def select_rows(self, index: torch.Tensor) -> None:
        self.cache.select_rows(index)
        self._others(index)

    def fork(self, times: int) -> None:
        self._others(torch.arange(len(self.mask)).repeat_interleave(times))
        self.cache.fork(times)

    def _others(self, index: torch.Tensor) -> None:
        self.mask = self.mask[index]
        if "attention_mask" in self.model_kwargs:
            self.model_kwargs["attention_mask"] = self.model_kwargs["attention_mask"][index]
        if self.is_encoder_decoder:
            self.model_kwargs["encoder_outputs"] = (self.model_kwargs["encoder_outputs"][0][index],)

    def reorder(self) -> None:
        """Within prompts, as beams do."""
        chosen = torch.randint(0, SIBLINGS, (ROWS,), generator=self.tokens)
        self.select_rows(torch.arange(ROWS) // SIBLINGS * SIBLINGS + chosen)

    def beams(self, tokens: int = 1) -> torch.Tensor:
        """The logits of all steps."""
        logits = []
        for _ in range(STEPS):
            logits.append(self.step(tokens))
            self.reorder()
        return torch.stack(logits)

    @property
    def forks(self) -> list[ForkedTimeline]:
        return [fork for part in self.cache.parts for fork in part.stack.shared_timelines]

    @property
    def storage(self) -> set[int]:
        """Where the trunks are."""
        layers = [layer for part in self.cache.parts for layer in part.layers]
        stores = [
            getattr(store, "prefix", store) for layer in layers for store in getattr(layer, "stores", {}).values()
        ]
        return {tensor.data_ptr() for store in stores for tensor in store.tensors()}


def feed_columns(cache, count: int, rows: int = PROMPTS, layers: int = 4) -> None:
    cache.begin(count)
    for layer in range(layers):
        cache.update(*[torch.randn(rows, 2, count, 8)] * 2, layer)
    cache.commit()
