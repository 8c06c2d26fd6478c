"""`ModelRunner`, the only caller of a model: its arguments, chunked prefill, the compiled decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple
from weakref import finalize, proxy

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from caches import EngineCache, UnknownContentError, UnsupportedLayerError, read_specs
from caches.attention.dispatch import FULL_PRECISION
from caches.platform.accelerate_hooks import is_dispatched, prompt_device
from caches.platform.host_allocator import keep_freed_memory
from caches.platform.native import HALF_PRECISION
from caches.platform.torch_api import compiled_graphs, discard_compiled, graph_errors
from caches.platform.transformers_api import can_compile_fullgraph
from caches.protocol import attention_view
from engine.compiling.full_step import compiled, first_reason, makes_graphs, step_of
from engine.compiling.layer_compiler import ComputeAgain, LayerCompiler
from engine.errors import InputError, OptionError
from engine.kernels import attention_hook
from engine.kernels.linear_backend import RoutedLinear, RoutedLinears, active, changes, table_for
from engine.kernels.linear_routes import TORCH
from engine.model.columns import Columns
from engine.model.facts import ModelFacts
from engine.model.first_layer_probe import Probe, Reached
from engine.model.forward_arguments import ForwardArguments, Step
from engine.model.joined_step import Feed, Part, can_be_joined, joined_step
from engine.model.model_inputs import ModelInputs
from engine.model.model_lock import turn_of
from engine.model.rope_frequencies import Frequencies
from engine.parallel.ranks import ranks_of


class ForwardOptions(NamedTuple):  # made for every forward: a frozen dataclass takes 1 µs more
    """How tokens are fed: see `ModelRunner.feed`.

    prefill: the first feed of a run. chunk_tokens: at most this many tokens per forward; None for no limit.
    logits_for_last: logits are wanted after this many of the last tokens; each forward's outputs end with its share.
    hidden_states: whether the outputs have them. on_outputs: called with the outputs of every forward and the column it
    ends before. check: called before every forward, and may raise. resume: called before every forward too, in this
    model's turn. compiled: whether compiled steps are used. routed: whether linear layers are routed.
    """

    prefill: bool = False
    chunk_tokens: int | None = None
    logits_for_last: int = 1
    hidden_states: bool = False
    on_outputs: Callable[[ModelOutput, int], None] | None = None
    check: Callable[[], None] | None = None
    resume: Callable[[], None] | None = None
    compiled: bool = True
    routed: bool = True


_NO_INPUTS, _NO_OPTIONS = ModelInputs(), ForwardOptions()


class ModelRunner:
    """Runs one model's forwards; threads take turns (`turn_of`). ranks: the processes that compute it together.

    takes_cache: whether the model takes a cache of keys and values. compile, linears: see `configs.EngineConfig`.
    """

    def __init__(self, model: PreTrainedModel, compile: str = "off", linears: str = "default"):
        self.model = model
        self.ranks, self._turn = ranks_of(model), turn_of(model)
        # What is fastest is measured, and may differ between ranks, which have to compute the same.
        self._table = None if self.ranks.size > 1 else table_for(model, linears)
        self._linears = None if self._table is None else RoutedLinears(model, self._table)
        # In half precision "default" is transformers' text to the last bit.
        in_half = HALF_PRECISION if linears == "auto" and self.ranks.size == 1 else ()
        self._attention_dtypes = (*FULL_PRECISION, *in_half)
        attention_hook.install(self)
        if prompt_device(model).type == "cpu":
            keep_freed_memory()
        self.arguments = ForwardArguments(model)
        self.takes_cache = self.arguments.of_cache.can_be_ours
        self.facts = ModelFacts(proxy(self))  # no circle: what a run holds is freed with it
        self._backend, self._compiled = compile, None
        self._packages = LayerCompiler(model, self._table) if compile == "auto" else None
        if makes_graphs(compile):
            self.check_graph(f"compile={compile!r}")
            self._step = step_of(model)
            finalize(self, discard_compiled, self._step).atexit = False
            self._compiled = compiled(self._step, compile)

    @property
    def linears(self) -> str:
        """Which matrix products linear layers on a CPU take, in short."""
        return TORCH if self._table is None else str(self._table)

    @property
    def compiled(self) -> str:
        """What of decode steps is compiled code, in short."""
        return self._backend if self._packages is None else self._packages.state

    def finish_compiling(self) -> None:
        """Wait for the process that compiles this model's layers, if there is one."""
        if self._packages is not None:
            self._packages.wait()

    def retry_compiling(self) -> None:
        """Let later calls compile layers that could not be compiled before."""
        if self._packages is not None:
            with self._turn:
                self._packages.retry()

    def discard_graphs(self) -> None:
        """Discard the compiled code of this runner; a later call loads or compiles it again."""
        with self._turn:
            if self._compiled is not None:
                discard_compiled(self._step)
            if self._packages is not None:
                self._packages.clear()

    @property
    def graphs(self) -> int:
        """How many compiled steps exist: one per kind of cache, number of rows and size."""
        if self._packages is not None:
            return len(self._packages)
        return 0 if self._compiled is None else compiled_graphs(self._step)

    def check_graph(self, wanted: str) -> None:
        """Refuse a model whose step cannot be one graph, as far as that can be known before it is tried."""
        if is_dispatched(self.model):
            raise OptionError(
                f"{wanted} makes one graph of a step, but accelerate's hooks move weights and inputs in the middle of "
                "it: do without, or load the whole model onto one device"
            )
        # Models that keep states are marked for what transformers' own caches do; with ours all of them can be.
        if not (can_compile_fullgraph(self.model) or self.has_states):
            raise OptionError(
                f"{wanted} makes one graph of a step, but transformers marks {type(self.model).__name__} as a model "
                "whose step cannot be one (_can_compile_fullgraph): do without"
            )

    @cached_property
    def has_states(self) -> bool:
        """Whether the model keeps states that change with every token."""
        return self.takes_cache and any(spec.keeps_state for spec in read_specs(self.model.config))

    def can_be_joined(self) -> bool | str | None:
        """The trial of joined steps: see `engine.model.joined_step`."""
        read, feed = (self._feed_with(ForwardOptions(prefill, compiled=False)) for prefill in (True, False))
        return can_be_joined(self.model, read, feed)

    def _feed_with(self, options: ForwardOptions) -> Feed:
        return lambda ids, columns, cache, before: self.feed(ids, columns, cache, _NO_INPUTS, before, options)

    def why_not_shown(self, cache: EngineCache) -> str | None:
        """Why the steps of this cache cannot be joined with those of others; None where they can.

        A cache that imposes a window needs a mask of its own for each row, and some models make the masks themselves.
        """
        view = attention_view(cache)
        if not view.imposes_windows or (not self.arguments.prepares_itself and self.arguments.masks.can_make(view)):
            return None
        return f"the window of its {cache.name} cache needs masks that the model does not take for each row"

    def step_together(
        self, parts: Sequence[Part], hidden_states: bool, routed: bool, compiled: bool
    ) -> list[ModelOutput]:
        """See `joined_step`; hidden_states, routed, compiled: see `ForwardOptions`."""
        options = ForwardOptions(hidden_states=hidden_states, routed=routed, compiled=compiled)
        return joined_step(self._feed_with(options), parts)

    def feed(
        self,
        ids: torch.Tensor,
        columns: Columns,
        cache: EngineCache,
        inputs: ModelInputs = _NO_INPUTS,
        before: int = 0,
        options: ForwardOptions = _NO_OPTIONS,
    ) -> ModelOutput:
        """Feed the tokens of `ids` [rows, n] that the cache does not hold, and return the outputs of the last forward.

        before: columns in the cache that come before `ids`. The step of the last forward stays open: the caller commits
        it. When a forward raises, its step is aborted, and the cache holds what earlier forwards committed.
        """
        total = before + ids.shape[1]
        chunk_tokens = options.chunk_tokens
        view = attention_view(cache)
        most = view.max_step_tokens
        has_media = not set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL).isdisjoint(inputs.model_kwargs)
        if most is not None and not has_media:
            chunk_tokens = most if chunk_tokens is None else min(chunk_tokens, most)
        while True:
            if options.check is not None:
                options.check()
            with self._turn:
                begin, handle = cache.total_tokens, cache.handle
                end = self._end_of_step(cache, columns, begin, total, chunk_tokens, has_media)
                if begin > 0 and not self.facts.is_as_left(cache, begin):
                    _start_again(cache, before, total)
                    continue
                if options.resume is not None:  # after trials, which are texts of their own
                    options.resume()
                if options.prefill and self._packages is not None:
                    self._packages.begin_run()
                begins = options.prefill or (begin == 0 and handle is not None)  # or again, with its media
                if options.prefill or begin == 0:
                    view.set_padding(columns.left_padding)
                step = Step(ids, columns, cache, before, begin, end, begins)
                logits = max(1, end - max(begin, total - options.logits_for_last))
                arguments = self.arguments.of(step, inputs, logits)
                if handle is not None and arguments.get(self.arguments.of_cache.name) is None:
                    if max(begin, before) > 0:
                        _start_again(cache, before, total)
                        chunk_tokens = None
                        continue
                    arguments[self.arguments.of_cache.name] = handle
                arguments |= inputs.flags
                if options.hidden_states:
                    arguments["output_hidden_states"] = True
                compute = self._compiled_step(arguments, step) if options.compiled else None
                cache.begin(end - begin, compute is not None and self._packages is None)
                try:
                    outputs = self._call(arguments, step, compute, options.routed)
                    self._check_kept(outputs, cache)
                    if options.on_outputs is not None:
                        options.on_outputs(outputs, end)
                    self.facts.note(cache, end)
                except BaseException as error:
                    self.facts.note(None)
                    cache.abort()
                    if isinstance(error, ComputeAgain):
                        continue
                    raise
                if end == total:
                    return outputs
                cache.commit()

    def _end_of_step(
        self, cache: EngineCache, columns: Columns, begin: int, total: int, chunk_tokens: int | None, has_media: bool
    ) -> int:
        """The column that the next forward ends before. has_media: the first forward alone gets images or sounds."""
        end = total if chunk_tokens is None else min(total, begin + chunk_tokens)
        if cache.handle is None or end - begin == 1:
            return end
        if begin > 0:
            return end if self.facts.why_not_several is None else begin + 1
        is_read_again = columns.prompt < end and not has_media
        if is_read_again and self.facts.why_not_cut is not None:
            return columns.prompt
        # Models leave padding out of their states only where several tokens are read at once.
        return max(end, columns.first_full + 1) if self.has_states else end

    def forward_once(self, step: Step, inputs: ModelInputs) -> ModelOutput:
        """One forward of a trial: of the tokens of `step` at once, with the logits behind each of them."""
        Frequencies(self.model, self.facts.dynamic_ropes).resume()
        return self._call(self.arguments.of(step, inputs, step.end - step.begin) | inputs.flags, step)

    def first_keys(
        self, ids: torch.Tensor, columns: Columns, begin: int, end: int, inputs: ModelInputs, cross: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, columns, head_dim] that the first layer makes of columns `begin` to `end`.

        The forward ends after that layer. cross: of the encoder's columns. Raises `UnknownContentError` where the first
        layer does not call the cache.
        """
        probe = Probe(begin, self.model.config.is_encoder_decoder, cross)
        with self._turn, torch.no_grad():
            self.facts.note(None)
            Frequencies(self.model, self.facts.dynamic_ropes).resume()  # of a text that starts here
            step = Step(ids, columns, probe, 0, begin, end, begin == 0)
            arguments = self.arguments.of(step, inputs.extended(self.model, end), 1)
            arguments[self.arguments.of_cache.name] = probe.handle
            with suppress(Reached):
                self.model(**arguments, return_dict=True)
        if probe.found is None or not (cross or probe.found[0].shape[-2] == end - begin):
            raise UnknownContentError(
                f"the first layer of {type(self.model).__name__} does not begin with the keys of its tokens"
            )
        return probe.found

    def _check_kept(self, outputs: ModelOutput, cache: EngineCache) -> None:
        kept = outputs.get(self.arguments.of_cache.name)
        if kept is not None and cache.handle is not None and kept is not cache.handle:
            raise UnsupportedLayerError(
                f"{type(self.model).__name__} did not use the {cache.name} cache but made a {type(kept).__name__} of "
                "its own: use cache='none'"
            )

    def _compiled_step(self, inputs: dict[str, Any], step: Step) -> Callable[..., ModelOutput] | None:
        """What computes this step in place of the model, if it is a decode step that can be compiled."""
        cache, tokens = step.cache, step.end - step.begin
        if step.prefill or isinstance(cache, Probe):
            return None
        if self._packages is not None:
            return self._packages.next_step(cache, inputs, len(step.ids), tokens)
        can_be_one = self._compiled is not None and tokens == 1 and cache.why_not_compiled is None
        return self._in_one_graph if can_be_one else None

    def _call(
        self,
        inputs: dict[str, Any],
        step: Step,
        compute: Callable[..., ModelOutput] | None = None,
        routed: bool = True,
    ) -> ModelOutput:
        """compute: what computes the step in place of the model."""
        if compute is not None and self._packages is None:
            inputs, routed = self.arguments.of_compiled(inputs, step), False
        outer = active.routes, attention_hook.active.dtypes  # of a step that this one is inside of
        layers, routes = dict[Any, Any](), None
        if routed and self._linears is not None:
            layers = self._linears.of_step(None if step.prefill else len(step.ids) * (step.end - step.begin))
            routes = layers or active.routes
        enter, leave = changes(layers, RoutedLinear)
        try:
            active.routes, attention_hook.active.dtypes = routes, self._attention_dtypes
            enter()
            return (self.model if compute is None else compute)(**inputs, return_dict=True)
        finally:  # Ctrl-C may come behind a call: there is one, the last
            active.routes, attention_hook.active.dtypes = outer
            leave()

    def _in_one_graph(self, **inputs: object) -> ModelOutput:
        assert self._compiled is not None
        try:
            return self._compiled(**inputs)
        except graph_errors() as error:
            raise OptionError(
                f"compile={self._backend!r} makes one graph of a step, and a step of {type(self.model).__name__} "
                f"cannot be one: {first_reason(error)}. Leave compile off"
            ) from error


def _start_again(cache: EngineCache, before: int, total: int) -> None:
    """Empty the cache for a model that wants every token computed again, as longrope models do at one length.

    Raises `InputError` where that is not possible.
    """
    if before > 0:
        raise InputError(
            f"the model wants all {total} tokens computed again, but the {before} in the cache were not given again: "
            "give the whole conversation"
        )
    cache.reset()
    if cache.total_tokens > 0:
        raise InputError(f"the model wants all tokens computed again, but a {cache.name} cannot be emptied")
