"""The decode step of one model as a function that `torch.compile` makes one graph of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


def makes_graphs(compile: str) -> bool:
    """Whether steps of the model become graphs of `torch.compile`; "auto" compiles layers one by one instead."""
    return compile not in ("off", "auto")


def compiled(step: Callable[..., ModelOutput], backend: str) -> Callable[..., ModelOutput]:
    """`step` compiled as one graph per number of rows and size of a cache. backend: of `torch.compile`."""
    # More graphs than torch expects of one function.
    limits: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 64}
    parameters = inspect.signature(torch.compile).parameters  # both are missing in older releases
    limits = {name: value for name, value in limits.items() if name in parameters}
    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False, **limits)


def step_of(model: PreTrainedModel) -> Callable[..., ModelOutput]:
    """The model's forward as a function with its own code object: torch frees compiled graphs per code object."""

    def step(**inputs: object) -> ModelOutput:
        return model(**inputs)

    return FunctionType(step.__code__.replace(), globals(), "step", None, step.__closure__)


def first_reason(error: Exception) -> str:
    """What could not be traced and where, from the lines of torch's error."""
    lines = str(error).splitlines() or [type(error).__name__]
    context = [line.partition("context: ")[2] for line in lines if "Developer debug context: " in line]
    frames = re.findall(r'File ".*/(.*)", (line \d+, in \w+)', str(error))
    where = [", ".join(frames[-1])] if frames else []
    return "; ".join(reason.rstrip(".") for reason in [lines[0], *context[:1], *where] if reason)
