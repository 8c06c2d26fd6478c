"""`Ranks`: the processes that compute one model together, and what they agree on (tensor parallel).

Each rank runs the same calls with the same arguments and has a part of every layer's weights and of the cache. Ranks
exchange a few numbers at the same places of their programs: before every collective operation of the model, at the end
of every piece of work that may fail, and before decisions that depend on time, memory or the user. A rank that fails
does its next exchange at once, so that all fail at their next exchange, and none waits in a collective operation. No
rank leads: each may fail, be stopped or run out of memory, and what one alone decided would not reach it in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from caches.platform.device_state import random_state, set_random_state
from caches.platform.out_of_memory import Exhausted, in_words, is_out_of_memory
from caches.platform.transformers_api import plan_name, rank_count, rank_mesh
from engine.errors import EngineError, OptionError
from engine.parallel.board import shared_board

T = TypeVar("T")
_FINE, _MEMORY_OUT, _FAILED = range(3)  # the last one ends the call on all ranks
_GATHERING = ("colwise_gather_output", "colwise_rep")  # styles of transformers' plans whose outputs are put together
# Styles whose modules compute on one rank alone.
_WITHOUT_OPERATIONS = ("colwise", "packed_colwise", "local_params", "replicate", "replicated_with_grad_allreduce")
_NOTHING = nullcontext()
_TIMEOUT = timedelta(days=1)  # ranks wait while a user types; one that ends is noticed at once


class PeerError(EngineError):
    """Another rank has failed, ended, or computed something else."""


class PeerOutOfMemory(MemoryError):
    """Memory is out on another rank."""


class OneProcess:
    """The ranks of a model that one process computes: it agrees with itself."""

    size, is_first = 1, True
    exchanges = 0  # how many there were so far

    def resume(self) -> None:
        """Before a call is read, or a batch is made: go on together after a call that has failed."""

    def begin(self, device: torch.device, *call: object) -> None:
        """Start a call together, with rank 0's random numbers of `device`. call: what has to be equal on all ranks."""

    def together(self) -> AbstractContextManager[None]:
        """For work that may fail. Where it does on a rank, all raise: a `PeerError` or `PeerOutOfMemory` the others."""
        return _NOTHING

    def recovers(self, can: bool) -> bool:
        """After a failure: whether all ranks can recover from it."""
        return can

    def most(self, value: int) -> int:
        """The largest value of all ranks."""
        return value

    def agree(self, value: int) -> bool:
        """Whether the value is the same on all ranks."""
        return self.most(value) == -self.most(-value)

    def share(self, value: T) -> T:
        """The value of rank 0, which can be pickled."""
        return value

    def check(self) -> None:
        """Raise a `PeerError` where another rank has failed or has computed other tokens."""

    def note(self, tokens: Iterable[int]) -> None:
        """Tokens that have to be equal on all ranks."""

    def end(self) -> None:
        """The call ends with an error. Until the next one, this rank does not wait for the others."""

    def meet(self) -> None:
        """Go on together after an error that all ranks have seen."""


class Ranks(OneProcess):
    """All processes of torch's default group. The exchanges go through the hosts, also where the model is on GPUs:
    through memory that the processes share on one host, else through gloo."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        self._rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._board = shared_board(self._group)
        self.is_first = self._rank == 0
        self._noted = 0
        self._is_failing = False  # a failure was exchanged that `recovers` has not decided about
        self._is_apart = False  # all know that the call has failed, and this rank decides for itself
        self._why_lost = ""  # why another rank cannot be reached

    def resume(self) -> None:
        if self._is_apart:
            self.meet()

    def begin(self, device: torch.device, *call: object) -> None:
        self._is_failing = self._is_apart = False
        self._noted = crc32(repr(call).encode())
        self.check()
        state = random_state(device).cpu()
        with self._noticing_ends():
            distributed.broadcast(state, 0, group=self._group)
        set_random_state(state, device)

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not (self._is_failing or self._is_apart):
                is_memory = isinstance(error, Exhausted) or is_out_of_memory(error)
                self._exchange(_MEMORY_OUT if is_memory else _FAILED)
            raise
        self.check()

    def recovers(self, can: bool) -> bool:
        if self._is_apart:
            return False
        self._is_failing = False
        self._is_apart = self.most(not can) > 0
        return not self._is_apart

    def most(self, value: int) -> int:
        return value if self._is_apart else self._exchange(_FINE, int(value))

    def share(self, value: T) -> T:
        if self._is_apart:
            return value
        self.check()
        shared = [value]
        with self._noticing_ends():
            distributed.broadcast_object_list(shared, 0, group=self._group)
        return shared[0]

    def check(self) -> None:
        if not self._is_apart:
            self._exchange(_FINE)

    def note(self, tokens: Iterable[int]) -> None:
        self._noted = crc32(repr(tuple(tokens)).encode(), self._noted)

    def end(self) -> None:
        try:
            if not self._is_apart:
                self._exchange(_FAILED)
        except PeerError:  # the error that ends the call says more
            pass
        finally:
            self._is_apart = True

    def meet(self) -> None:
        self._is_failing = self._is_apart = False
        self._noted = 0  # one of them may have come further than the others
        self.check()

    def _swapped(self, values: list[int]) -> list[list[int]]:
        """The values of each rank."""
        self.exchanges += 1
        with self._noticing_ends():
            if self._board is not None:
                return self._board.swap(values)
            received = torch.empty(self.size, len(values), dtype=torch.int64, device="cpu")
            distributed.all_gather(list(received), torch.tensor(values, device="cpu"), group=self._group)
            return received.tolist()

    @contextmanager
    def _noticing_ends(self) -> Iterator[None]:
        try:
            if self._why_lost:
                raise RuntimeError(self._why_lost)
            yield
        except RuntimeError as lost:
            self._is_apart, self._why_lost = True, in_words(lost)
            raise PeerError(f"another rank of the {self.size} has ended or cannot be reached: {lost}") from lost

    def _exchange(self, state: int, value: int = 0) -> int:
        """The largest value of all ranks. Raises where this rank is fine and another one is not."""
        of_all = self._swapped([state, self._noted, value])
        states, noted, values = zip(*of_all, strict=True)
        worst, largest = max(states), max(values)
        rank = states.index(worst)
        is_different = worst == _FINE and len(set(noted)) > 1
        self._is_failing, self._is_apart = worst == _MEMORY_OUT, worst == _FAILED or is_different
        if state != _FINE:
            return largest
        if worst == _MEMORY_OUT:
            raise PeerOutOfMemory(f"memory is out on rank {rank} of {self.size}")
        if worst == _FAILED:
            raise PeerError(f"rank {rank} of {self.size} has failed: see its own error")
        if is_different:
            raise PeerError(
                f"the {self.size} ranks compute different texts: call them with the same arguments, on the same "
                "processors and releases"
            )
        return largest


ONE_PROCESS = OneProcess()
_ranks: list[Ranks] = []  # one for all models of the process, so that exchanges have one order
_guarded: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def ranks_of(model: PreTrainedModel) -> OneProcess:
    """The ranks that compute this model. From the first call on, they agree before its collective operations.

    Raises `OptionError` unless these are all processes of torch's default group.
    """
    if rank_count(model) == 1:
        return ONE_PROCESS
    if rank_count(model) != distributed.get_world_size():
        raise OptionError(
            f"{type(model).__name__} is split over {rank_count(model)} of {distributed.get_world_size()} processes: "
            "start as many processes as compute the model"
        )
    if not _ranks:
        _ranks.append(Ranks())
    if model not in _guarded:
        _guard(model, _ranks[0])
        _guarded[model] = True
    return _ranks[0]


def _guard(model: PreTrainedModel, ranks: Ranks) -> None:
    """Let the ranks agree before the collective operations of the modules that transformers has split."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    mesh = rank_mesh(model)
    for name, module in model.named_modules():
        style = model.tp_plan.get(plan_name(name))
        if "forward" in vars(module) and style is not None and style not in _WITHOUT_OPERATIONS:
            del module.forward  # transformers' own, which does the same without the agreement
            times = ranks.size if style in _GATHERING else 0
            module.forward = _agreed(module, ALL_PARALLEL_STYLES[style], mesh, ranks, times)


def _agreed(module: nn.Module, style: Any, mesh: Any, ranks: Ranks, times: int) -> Callable[..., Any]:
    """The forward of a module of this style of transformers. times: how many outputs of a rank are put together into a
    new one; 0 where none is made."""
    forward = module.forward

    def agreed_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
        with style.context_around_forward(module, mesh):
            output = forward(*args, **kwargs)
        if times and type(output) is torch.Tensor:  # memory that is out has to show before the others wait
            output.new_empty(times * output.numel())
        ranks.check()
        return style.transform_output_post_forward(module, output, mesh)

    return agreed_forward
