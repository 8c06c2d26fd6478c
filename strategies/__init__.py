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
    Drafts,
    Emit,
    Finish,
    Flow,
    Forward,
    NoChoice,
    Operation,
    Process,
    Rows,
    Show,
    Strategy,
    Task,
    Text,
    Translation,
    each,
    one_token_per_step,
    read_prompt,
)
from strategies.prompt_lookup import PromptLookup
from strategies.registry import build, names, options, register
from strategies.sampling import Sampling

__all__ = [
    "Assisted",
    "Beam",
    "Contrastive",
    "Crop",
    "DiverseBeam",
    "Drafts",
    "Emit",
    "Finish",
    "Flow",
    "Forward",
    "Greedy",
    "NoChoice",
    "Operation",
    "Process",
    "PromptLookup",
    "Rows",
    "Sampling",
    "Show",
    "Strategy",
    "Task",
    "Text",
    "Translation",
    "build",
    "each",
    "names",
    "one_token_per_step",
    "options",
    "read_prompt",
    "register",
]
