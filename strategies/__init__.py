"""Decoding strategies as flows of operations. They know neither models nor caches."""

from strategies.flow import Crop, Emit, Flow, Forward, Operation, Process, Rows, Strategy, one_token_per_step
from strategies.greedy import Greedy
from strategies.registry import build, names, register
from strategies.sampling import Sampling

__all__ = [
    "Crop",
    "Emit",
    "Flow",
    "Forward",
    "Greedy",
    "Operation",
    "Process",
    "Rows",
    "Sampling",
    "Strategy",
    "build",
    "names",
    "one_token_per_step",
    "register",
]
