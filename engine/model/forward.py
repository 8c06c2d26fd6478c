"""The only caller of the model: which arguments it takes, prefill in pieces, the compiled decode step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import FunctionType
from typing import Any
from weakref import finalize

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import ModelOutput

from caches import Cache, EngineCache, UnknownContentError, UnsupportedLayerError, build, mask_kinds, read_specs
from caches.protocol import attention_view
from engine.errors import InputError, OptionError
from engine.model.accelerate_hooks import is_dispatched, prompt_device
from engine.model.cache_argument import cache_argument
from engine.model.first_layer_probe import Probe, Reached
from engine.model.linear_backend import TORCH, active, table_for
from engine.model.masks import Columns, contiguous, graph_mask, imposed_mask, of_all_rows, one_token_mask
from engine.model.model_lock import turn_of
from engine.model.rope_frequencies import Frequencies, dynamic_ropes
from engine.request.model_kwargs import ENCODED, extend_model_kwargs


class ModelRunner:
    """Runs one model's forwards; threads take turns (`turn_of`).

    takes_cache: whether the model can be given a cache of keys and values. compile: "off", or the `torch.compile`
    backend for decode steps on fixed caches. linears: see `configs.EngineConfig`.
    """

    def __init__(self, model: PreTrainedModel, compile: str = "off", linears: str = "default"):
        self.model = model
        self._table, self._turn = table_for(model, linears), turn_of(model)
        self.dynamic_ropes = dynamic_ropes(model)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        own = type(model).prepare_inputs_for_generation
        self._prepares_itself = own is not GenerationMixin.prepare_inputs_for_generation
        self._cache_argument = cache_argument(model)
        self.takes_cache = self._cache_argument.can_be_ours
        self._backend, self._compiled = compile, None
        if compile != "off":
            self.check_graph(f"compile={compile!r}")
            # A graph per number of rows and size: more of them than torch expects of one function.
            limits: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 64}
            known = inspect.signature(torch.compile).parameters  # both are missing in older releases
            limits = {name: value for name, value in limits.items() if name in known}
            self._step = _own_step(model)
            finalize(self, torch._dynamo.eval_frame.remove_from_cache, self._step).atexit = False
            self._compiled = torch.compile(self._step, backend=compile, fullgraph=True, dynamic=False, **limits)

    @property
    def linears(self) -> str:
        """Which matrix products float32 linear layers on a CPU take, in short."""
        return TORCH if self._table is None else str(self._table)

    def drop_graphs(self) -> None:
        """Forget what was compiled for this model here; a later call compiles again."""
        if self._compiled is not None:
            with self._turn:
                torch._dynamo.eval_frame.remove_from_cache(self._step)

    @property
    def graphs(self) -> int:
        """How many there are: one for each number of rows and size of a cache, for each kind of cache."""
        if self._compiled is None:
            return 0
        return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(self._step))

    def check_graph(self, wanted: str) -> None:
        """Refuse a model whose step cannot be one graph, as far as that can be known before it is tried."""
        if is_dispatched(self.model):
            raise OptionError(
                f"{wanted} makes one graph of a step, but accelerate's hooks move weights and inputs in the middle of "
                "it: do without, or load the whole model onto one device"
            )
        # Models that keep states are marked for what transformers' own caches do; with ours all of them can be.
        if not (self.model._can_compile_fullgraph or self._has_states):
            raise OptionError(
                f"{wanted} makes one graph of a step, but transformers marks {type(self.model).__name__} as a model "
                "whose step cannot be one (_can_compile_fullgraph): do without"
            )

    @cached_property
    def _mask_kinds(self) -> str | dict[str, str]:
        return mask_kinds(self.model.config)

    @cached_property
    def _keeps_columns(self) -> bool:
        return not self.takes_cache or any(spec.keeps_kv for spec in read_specs(self.model.config))

    @cached_property
    def _has_states(self) -> bool:
        return self.takes_cache and any(spec.keeps_state for spec in read_specs(self.model.config))

    @property
    def reads_on(self) -> bool:
        """Whether several tokens can go on from a cache in one step, and be taken back from it as one."""
        if not self._has_states:
            return True
        # Not within `_reads_on`: on Python 3.11 it has a lock for all models, which `feed` takes in a model's turn.
        with self._turn, torch.no_grad():
            return self._reads_on

    @cached_property
    def _reads_on(self) -> bool:
        """Whether a forward of several tokens goes on from the states in the cache.

        Some models (mamba, jamba) do so for one token only and read several as if nothing had been before them, without
        a word. Found out by trying whether other states change what comes out.
        """
        ids = torch.arange(4, device=prompt_device(self.model))[None]
        columns = Columns(torch.ones_like(ids), total=4)
        logits = []
        for change in (0, 1):
            cache = build("dynamic", self.model.config)
            for begin, end in ((0, 2), (2, 4)):
                cache.begin(2)
                inputs = self._inputs(ids, columns, cache, 0, begin, end, begin == 0, {}, {})
                logits.append(self._call(inputs, cache, columns, end, graph=False).logits)
                cache.commit()
                assert isinstance(cache, Cache)
                states = [state for layer in cache.layers for state in layer.recurrent_states.values()]
                for state in states:
                    state += change
        return not states or not torch.allclose(logits[1], logits[3])

    def feed(
        self,
        ids: torch.Tensor,
        columns: Columns,
        cache: EngineCache,
        *,
        before: int = 0,
        prefill: bool = False,
        embeds: torch.Tensor | None = None,
        model_kwargs: dict[str, Any] | None = None,
        axes: dict[str, int] | None = None,
        flags: dict[str, bool] | None = None,
        chunk_tokens: int | None = None,
        look: Callable[[ModelOutput, int], None] | None = None,
        keep: int = 1,
        check: Callable[[], None] | None = None,
        graphs: bool = True,
        routes: bool = True,
        resume: Callable[[], None] | None = None,
    ) -> ModelOutput:
        """Feed what the cache has not seen of `ids` [rows, n] and return the outputs of the last forward.

        The step of that last forward stays open: the caller settles it. When a forward raises, its step is aborted and
        the cache holds what the forwards before it committed.

        before: columns in the cache that come before `ids`. prefill: the first feed of a run. embeds: [rows, n, hidden
        size], fed in place of the first ids. model_kwargs: further model inputs; axes: along which dimension those of
        them go with the columns that do. flags: output_attentions, ... chunk_tokens: feed at most this many at a time.
        look: called with the outputs of every forward and the column that it ends before. keep: after how many of the
        last tokens logits are wanted; each forward's outputs end with its share of them. check: called before every
        forward, and may raise. graphs: whether compiled steps are used. routes: whether linear layers are routed.
        resume: called before every forward, in this model's turn.
        """
        total = before + ids.shape[1]
        view = attention_view(cache)
        most = view.max_step_tokens
        if most is not None and not set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL) & set(model_kwargs or ()):
            chunk_tokens = most if chunk_tokens is None else min(chunk_tokens, most)
        while True:
            if check is not None:
                check()
            with self._turn:
                if resume is not None:
                    resume()
                begin = cache.total_tokens
                if prefill or begin == 0:
                    view.set_padding(columns.pads)
                end = total if chunk_tokens is None else min(total, begin + chunk_tokens)
                if self._has_states and cache.handle is not None:
                    # Models leave pads out of their states only where several tokens are read at once.
                    end = max(end, columns.first_full + 1) if begin == 0 else end
                    if begin > 0 and end - begin > 1 and not self._reads_on:
                        end = begin + 1
                inputs = self._inputs(ids, columns, cache, before, begin, end, prefill, model_kwargs or {}, axes or {})
                if (
                    "logits_to_keep" in inputs
                ):  # some models that prepare their inputs themselves put their own number there
                    inputs["logits_to_keep"] = max(1, end - max(begin, total - keep))
                if embeds is not None and begin - before < embeds.shape[1]:
                    inputs["inputs_embeds"] = self._embedded(embeds, ids, max(begin - before, 0), end - before)
                    inputs.pop("input_ids", None)
                graph = graphs and self._compiled is not None and cache.why_not_compiled is None
                graph = graph and end - begin == 1 and not prefill
                if cache.handle is not None and inputs.get(self._cache_argument.name) is None:
                    # The model wants everything computed again (longrope models do when they switch their scaling).
                    if before > 0:
                        raise InputError(
                            f"the model wants all {total} tokens computed again, but the {before} in the cache were "
                            "not given again: give the whole conversation"
                        )
                    if begin > 0:
                        cache.reset()
                        if cache.total_tokens > 0:
                            raise InputError(
                                f"the model wants all tokens computed again, but a {cache.name} cannot be emptied"
                            )
                        chunk_tokens = None
                        continue
                    inputs[self._cache_argument.name] = cache.handle
                if end - begin > 1 and view.imposes_windows:
                    inputs["attention_mask"] = imposed_mask(self.model, view, self._mask_kinds, columns, begin, end)
                cache.begin(end - begin, graph)
                try:
                    outputs = self._call(inputs | (flags or {}), cache, columns, end, graph, routes)
                    self._check_kept(outputs, cache)
                    if look is not None:
                        look(outputs, end)
                except BaseException:
                    cache.abort()
                    raise
                if end == total:
                    return outputs
                cache.commit()

    def first_keys(
        self,
        ids: torch.Tensor,
        columns: Columns,
        begin: int,
        end: int,
        *,
        embeds: torch.Tensor | None,
        model_kwargs: dict[str, Any],
        cross: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, columns, head_dim] that the first layer makes of the columns of a text.

        A forward that ends there. cross: those of the encoder's columns. For the rest see `feed`. Raises
        `UnknownContentError` where the first layer hands over none.
        """
        probe = Probe(begin, self.model.config.is_encoder_decoder, cross)
        with self._turn, torch.no_grad():
            Frequencies(self.model, self.dynamic_ropes).resume()  # those of a text of its own
            model_kwargs, axes = extend_model_kwargs(self.model, model_kwargs, end)
            inputs = self._inputs(ids, columns, probe, 0, begin, end, begin == 0, model_kwargs, axes)
            if embeds is not None and begin < embeds.shape[1]:
                inputs["inputs_embeds"] = self._embedded(embeds, ids, begin, end)
                inputs.pop("input_ids", None)
            inputs[self._cache_argument.name] = probe.handle
            with suppress(Reached):
                self.model(**inputs, return_dict=True)
        if probe.found is None or not (cross or probe.found[0].shape[-2] == end - begin):
            raise UnknownContentError(
                f"the first layer of {type(self.model).__name__} does not begin with the keys of its tokens"
            )
        return probe.found

    def _check_kept(self, outputs: ModelOutput, cache: EngineCache) -> None:
        kept = outputs.get(self._cache_argument.name)
        if kept is not None and cache.handle is not None and kept is not cache.handle:
            raise UnsupportedLayerError(
                f"{type(self.model).__name__} did not use the {cache.name} cache but made a {type(kept).__name__} of "
                "its own: use cache='none'"
            )

    def _call(
        self, inputs: dict[str, Any], cache: EngineCache, columns: Columns, end: int, graph: bool, routes: bool = True
    ) -> ModelOutput:
        if not graph:
            outer = active.table  # of a step that this one is inside of
            try:
                active.table = self._table if routes else None
                return self.model(**inputs, return_dict=True)
            finally:
                active.table = outer
        assert self._compiled is not None
        part = "decoder_" if self.model.config.is_encoder_decoder else ""
        fixed = self.graph_inputs(inputs[f"{part}input_ids"], columns, cache, end)
        inputs |= {f"{part}{name}": fixed[name] for name in ("input_ids", "attention_mask")}
        inputs |= {name: fixed[name] for name in ("position_ids",) if name in inputs}
        try:
            return self._compiled(**inputs, return_dict=True)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise OptionError(
                f"compile={self._backend!r} makes one graph of a step, and a step of {type(self.model).__name__} "
                f"cannot be one: {_first_reason(error)}. Leave compile off"
            ) from error

    def graph_inputs(self, ids: torch.Tensor, columns: Columns, cache: EngineCache, end: int) -> dict[str, Any]:
        """What a graph gets for the open step of one token per row, `ids` [rows, 1]: every shape is fixed."""
        positions = contiguous(columns.positions(end - 1, end))
        view = attention_view(cache)
        if view.imposes_windows:
            mask = imposed_mask(self.model, view, self._mask_kinds, columns, end - 1, end)
        elif self._keeps_columns:
            mask = graph_mask(self.model, cache.handle, self._mask_kinds, columns.mask(end), positions)
        else:
            mask = None  # a new token is never a pad
        return {"input_ids": contiguous(ids), "position_ids": positions, "attention_mask": of_all_rows(mask, len(ids))}

    def step_logits(self, inputs: dict[str, Any], cache: EngineCache) -> torch.Tensor:
        """Logits [rows, vocabulary] of the open step, from `graph_inputs`: what is exported."""
        inputs = inputs | self._cache_argument.inputs(cache.handle) | {"logits_to_keep": 1}
        return self.model(**self._taken(inputs), return_dict=True).logits[:, -1]

    def _inputs(
        self,
        ids: torch.Tensor,
        columns: Columns,
        cache: EngineCache | Probe,
        before: int,
        begin: int,
        end: int,
        prefill: bool,
        model_kwargs: dict[str, Any],
        axes: dict[str, int],
    ) -> dict[str, Any]:
        """What the model's forward gets for the columns from `begin` to `end`; `ids` are those after `before`."""
        is_encoder_decoder = self.model.config.is_encoder_decoder
        inputs: dict[str, Any] = {
            "decoder_attention_mask" if is_encoder_decoder else "attention_mask": self._mask(columns, begin, end),
            **self._cache_argument.inputs(cache.handle),
            "logits_to_keep": 1,
        }
        if self._prepares_itself or model_kwargs or is_encoder_decoder:
            # As long as the text is, also where its beginning is only in the cache: some models look at that.
            ids = torch.nn.functional.pad(ids[:, : end - before], (before, 0))
            if not is_encoder_decoder:  # decoders reckon theirs themselves
                inputs["position_ids"] = contiguous(columns.positions(0, end))
            model_kwargs = model_kwargs | {name: model_kwargs[name].narrow(axis, 0, end) for name, axis in axes.items()}
            if ENCODED in model_kwargs:  # models write into the containers, and without a cache every step needs them
                model_kwargs[ENCODED] = {kind: type(output)(**output) for kind, output in model_kwargs[ENCODED].items()}
            return self.model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=end - begin,
                is_first_iteration=prefill,
                # It decides whether media are needed again, also where the model does not ask for it.
                **(self._taken(inputs) | {"use_cache": inputs["use_cache"]} | model_kwargs),
            )
        if end - begin == 1:
            mask = one_token_mask(self.model, cache.handle, self._mask_kinds, columns, end)
            inputs["attention_mask"] = inputs["attention_mask"] if mask is None else mask
        inputs["input_ids"] = ids[:, max(begin - before, 0) : end - before]
        inputs["position_ids"] = columns.positions(begin, end)
        if "cache_position" in self._takes:  # code from outside transformers; its own models have dropped it
            inputs["cache_position"] = torch.arange(begin, end, device=ids.device)
        return self._taken(inputs)

    def _mask(self, columns: Columns, begin: int, end: int) -> torch.Tensor | None:
        """2D mask of the columns that the model looks at in a step: models that keep only states see just the new."""
        mask = columns.mask(end)
        if mask is None or self._keeps_columns:
            return mask
        return mask[:, begin:] if end - begin > 1 else None

    def _embedded(self, embeds: torch.Tensor, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Embeddings [rows, end - begin, hidden_size]: those given, then those of the ids that come after them."""
        given = embeds.shape[1]
        parts = [embeds[:, begin:end]]
        if end > given:
            parts.append(self.model.get_input_embeddings()(ids[:, given:end]).to(embeds.dtype))
        return torch.cat(parts, dim=1)

    def _taken(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in inputs.items() if name in self._takes}


def _own_step(model: PreTrainedModel) -> Callable[..., ModelOutput]:
    """The model's forward as a function with code of its own: torch keeps what it compiles with the code, and lets go
    of it for all that was compiled of a code or for none.
    """

    def step(**inputs: Any) -> ModelOutput:
        return model(**inputs)

    return FunctionType(step.__code__.replace(), globals(), "step", None, step.__closure__)


def _first_reason(error: Exception) -> str:
    """What could not be traced and where, from the many lines that torch says about it."""
    lines = str(error).splitlines() or [type(error).__name__]
    context = [line.partition("context: ")[2] for line in lines if "Developer debug context: " in line]
    places = re.findall(r'File ".*/(.*)", (line \d+, in \w+)', str(error))
    where = [", ".join(places[-1])] if places else []
    return "; ".join(part.rstrip(".") for part in [lines[0], *context[:1], *where] if part)
