"""`ModelInputs`: what a model reads besides ids, mask and positions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from caches.platform.transformers_api import update_model_kwargs
from engine.rows import index_rows


@dataclass(frozen=True)
class ModelInputs:
    """embeds: [rows, columns, hidden_size], fed in place of the first ids; None where every column has an id.

    model_kwargs: further inputs by name. axes: the names among them that grow by one entry per token, and the dimension
    that grows. flags: the outputs that are asked for, as `output_attentions`.
    """

    embeds: torch.Tensor | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)

    def extended(self, model: PreTrainedModel, columns: int) -> ModelInputs:
        """The same with `columns` entries, at least, in the inputs that grow with every token.

        The values of a new token come from the model, which appends one.
        """
        model_kwargs = self.model_kwargs
        grown = update_model_kwargs(model, _NoOutputs(), dict(model_kwargs))
        extended, axes = dict(model_kwargs), {}
        for name, value in model_kwargs.items():
            longer = grown.get(name)
            if not (isinstance(value, torch.Tensor) and isinstance(longer, torch.Tensor)):
                continue
            axis = next((axis for axis in range(value.ndim) if longer.shape[axis] != value.shape[axis]), None)
            if axis is None:
                continue
            entry = longer.narrow(axis, longer.shape[axis] - 1, 1)
            missing = max(0, columns - value.shape[axis])
            extended[name] = torch.cat([value, entry.repeat_interleave(missing, dim=axis)], dim=axis)
            axes[name] = axis
        return replace(self, model_kwargs=extended, axes=axes)

    def has_room_for(self, columns: int) -> bool:
        """Whether the inputs that grow with every token have `columns` entries."""
        return all(self.model_kwargs[name].shape[axis] >= columns for name, axis in self.axes.items())

    def until(self, columns: int) -> dict[str, Any]:
        """The further inputs of the first `columns` columns."""
        return self.model_kwargs | {
            name: self.model_kwargs[name].narrow(axis, 0, columns) for name, axis in self.axes.items()
        }

    def of_rows(self, index: torch.Tensor | slice, rows: int) -> ModelInputs:
        """The same of the rows at `index`, of `rows` in all."""
        return replace(
            self,
            embeds=None if self.embeds is None else self.embeds[index],
            model_kwargs={name: index_rows(value, index, rows) for name, value in self.model_kwargs.items()},
        )


class _NoOutputs(dict):
    """The outputs of a forward that did not run: every field is None."""

    def __getattr__(self, name: str) -> None:
        return None
