"""Exports one decode step as a `torch.export` program, which runs without this package."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from caches import Cache
from caches.transfer.convert import can_migrate
from caches.transfer.export_buffers import Buffers, places
from engine.errors import OptionError
from engine.loading.load import unwrapped
from engine.model.columns import Columns
from engine.model.forward_arguments import ForwardArguments
from engine.model.model_lock import turn_of
from engine.model.model_runner import ModelRunner


def export_step(model: PreTrainedModel, cache: Cache) -> torch.export.ExportedProgram:
    """The decode step of one token per row.

    model: may be in a wrapper, see `unwrapped`. cache: of fixed size ("static"), with any prompt in it.

    The program takes, by keyword:
    input_ids, position_ids: LongTensors [rows, 1].
    attention_mask: bool [rows, 1, 1, slots of the cache], True for visible slots (floating point, added to the scores,
        with eager attention); a dict of masks by layer type if layers differ; None if layers keep only states.
    write_index: LongTensor [groups], the slot of the token, one per group of layers with the same attention span; if no
        layer has a window, there is one group, and the slot is the number of tokens before.
    seen: LongTensor [], the number of tokens before.

    It returns logits [rows, vocabulary] and writes keys, values and states into its buffers `cache.layer_0_keys` and so
    on. Until the program is saved these are the tensors of `cache`: with `step_inputs` the cache can be continued.
    Raises `OptionError` for another kind of cache or model.
    """
    model = unwrapped(model)
    ModelRunner(model).check_graph("export_step")
    if not (can_migrate(cache) and len(cache.parts) == 1):
        raise OptionError(f"a {type(cache).__name__} has no tensors that can be exported: use cache='static'")
    with turn_of(model):  # tracing replaces its parameters
        cache.check_fits(model.config)
        step = _Step(model, cache)
        cache.begin(1, graph=True)
        try:
            device = next(step.cache.buffers()).device
            inputs = step_inputs(model, cache, torch.zeros(cache.batch_size, 1, dtype=torch.long, device=device))
            with torch.no_grad():
                return torch.export.export(step, (), inputs, strict=False)
        finally:
            cache.abort()


def step_inputs(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, mask: torch.Tensor | None = None
) -> dict[str, object]:
    """The arguments of the exported program for a step that was opened with `cache.begin(1, graph=True)`.

    input_ids: [rows, 1]. mask: [rows, tokens before + 1], 0 for padding; None without padding.
    """
    end = cache.total_tokens + 1
    if mask is None:
        mask = torch.ones(len(input_ids), end, dtype=torch.long, device=input_ids.device)
    return ForwardArguments(unwrapped(model)).fixed(input_ids, Columns(mask, end), cache, end) | places(cache)


class _Step(torch.nn.Module):
    def __init__(self, model: PreTrainedModel, cache: Cache):
        super().__init__()
        self.model, self.cache = model, Buffers(cache)
        self._arguments = ForwardArguments(model)

    def forward(self, write_index: torch.Tensor, seen: torch.Tensor, **inputs: object) -> torch.Tensor:
        with self.cache.in_use(write_index, seen) as cache:
            inputs |= self._arguments.of_cache.inputs(cache.handle) | {"logits_to_keep": 1}
            logits: torch.Tensor = self.model(**self._arguments.taken(inputs), return_dict=True).logits[:, -1]
            return logits
