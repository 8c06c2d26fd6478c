"""Decoding strategies as flows of operations. They know neither models nor caches."""

from kvengine import check_siblings

check_siblings(__file__, "configs")

from strategies.assisted import Assisted
from strategies.beam import Beam
from strategies.contrastive import Contrastive
from strategies.diverse_beam import DiverseBeam
from strategies.greedy import Greedy
from strategies.operations import (
    Crop,
    Emit,
    Finish,
    Flow,
    Forward,
    Hypothesis,
    Needs,
    NoCandidateError,
    Operation,
    Process,
    Report,
    Rows,
    SpeculationStats,
    Strategy,
    Task,
    Translation,
    one_token_per_step,
    read_prompt,
    repeat_rows_index,
)
from strategies.prompt_lookup import PromptLookup
from strategies.registry import build, names, options, register
from strategies.sampling import Sampling

__all__ = [
    "Assisted", "Beam", "Contrastive", "Crop", "DiverseBeam", "Emit", "Finish", "Flow", "Forward", "Greedy",
    "Hypothesis", "Needs", "NoCandidateError", "Operation", "Process", "PromptLookup", "Report", "Rows", "Sampling",
    "SpeculationStats", "Strategy", "Task", "Translation", "build", "names", "one_token_per_step", "options",
    "read_prompt", "register", "repeat_rows_index",
]  # fmt: skip
