"""`Draft`: a second model that proposes tokens, and its session in a run."""

from __future__ import annotations

import logging
from contextlib import suppress

from transformers import PreTrainedModel

import caches
from caches import EngineCache
from configs.cache import DEFAULT_CACHE, NO_CACHE
from engine.decoding.feeder import CachedPrefix, SessionOptions
from engine.decoding.model_session import ModelSession
from engine.errors import InputError, OptionError
from engine.loading.load import unwrapped
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_runner import ModelRunner
from engine.parallel.ranks import ranks_of
from engine.request.draft_request import DraftRequest
from engine.request.inputs.checks import check_model
from strategies import SpeculationStats, Strategy
from strategies.operations import ENOUGH_PROPOSALS, needs_of


class Draft:
    """A model that proposes tokens. A `Generator` keeps the last one. given: that model, maybe in a wrapper."""

    def __init__(self, model: PreTrainedModel, linears: str):
        self.given = model
        try:
            model = unwrapped(model)
            check_model(model)
        except InputError as error:
            raise OptionError(f"assistant_model: {error}") from error
        self.model, self._runner = model, ModelRunner(model, linears=linears)
        self._learned: tuple[Strategy, SpeculationStats] | None = None
        self._was_judged = False

    def drafts(self, strategy: Strategy, model: PreTrainedModel) -> SpeculationStats:
        """The statistics of a new run of `model`; where the strategy asks for it, with the length that the last run
        ended with. A step takes about as long as reading the weights.
        """
        price = self.model.get_memory_footprint() / model.get_memory_footprint()
        # Ranks may hold parts of different sizes, and have to propose the same.
        statistics = SpeculationStats(price=price if ranks_of(model).size == 1 else 0)
        if needs_of(strategy).keeps_draft_length:
            learned = self._learned
            if learned is not None and learned[0] == strategy:
                statistics.length = learned[1].length
            self._learned = strategy, statistics
        return statistics

    def judge(self, drafts: SpeculationStats) -> None:
        """Warn, once, of a draft that costs more time than it saves. drafts: of a run that has ended."""
        if self._was_judged or drafts.drafted < ENOUGH_PROPOSALS or drafts.accepted >= drafts.price * drafts.drafted:
            return
        self._was_judged = True
        logging.getLogger("engine").warning(
            f"the assistant_model does not pay: {drafts.accepted} of {drafts.drafted} proposed tokens were accepted "
            f"({drafts.accepted / drafts.drafted:.0%}), and each costs about {drafts.price:.0%} of a step of the "
            "model, so it proposed more rarely. Leave it out, give a smaller or a better one, or use "
            "prompt_lookup_num_tokens"
        )

    def session(self, request: DraftRequest, options: SessionOptions) -> ModelSession:
        """A session of its own for one run, with an empty cache."""
        prefix, model_kwargs = request.prefix_ids, dict(request.model_kwargs)
        return ModelSession(
            self._runner,
            self._new_cache(),
            Columns(request.mask, request.total, model_kwargs.pop("position_ids", None)),
            ModelInputs(model_kwargs=model_kwargs),
            CachedPrefix(columns_without_ids=0 if prefix is None else prefix.shape[1], ids=prefix),
            options,
        )

    def _new_cache(self) -> EngineCache:
        with suppress(caches.UnsupportedLayerError):
            if self._runner.takes_cache:
                return caches.build(DEFAULT_CACHE, self.model.config)
        return caches.build(NO_CACHE, self.model.config)
