"""`Request`: one call's arguments, checked and complete before any work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from engine.prompt import Prompt
from engine.request.constraints.grammar import Grammar
from engine.request.inputs.encoder import Recover, Source, encode
from engine.request.inputs.guidance import Guidance
from engine.request.lengths import Lengths
from engine.request.logits_processors import Processing
from engine.request.run_shape import RunShape
from engine.request.strategy import score_copies
from strategies import Needs, SpeculationStats, Strategy, Task, Translation
from strategies.operations import needs_of, nothing


@dataclass(frozen=True)
class Request:
    """lengths: without the columns that guidance adds. source: of an encoder. stops_from: the first column in which a
    stop string may begin. inputs: those of a decoder besides ids, with images and sounds as they were given: a draft
    has its own encoder.
    """

    prompt: Prompt
    mask: torch.Tensor
    lengths: Lengths
    config: GenerationConfig
    strategy: Strategy
    processing: Processing
    criteria: StoppingCriteriaList
    eos_ids: tuple[int, ...]
    candidates_per_beam: int
    pad_id: int
    stop_strings: tuple[str, ...]
    stops_from: int
    ended: Callable[[], Callable[[torch.Tensor], torch.Tensor]]
    chunk_tokens: int | None
    source: Source | None
    guidance: Guidance | None
    generator: torch.Generator | None
    grammar: Grammar | None
    top_logprobs: int | None
    inputs: dict[str, object]
    drafts: SpeculationStats = field(default_factory=SpeculationStats)
    translation: Translation | None = None

    @property
    def needs(self) -> Needs:
        """What the strategy needs of the engine."""
        return needs_of(self.strategy)

    @property
    def belongs(self) -> Callable[..., torch.Tensor] | None:
        """`Grammar.belongs`, where an end token may be text of a form."""
        grammar = self.grammar
        return None if grammar is None or not grammar.ordinary_ends else grammar.belongs

    @property
    def output_flags(self) -> dict[str, bool]:
        """What the model is asked to return besides its logits."""
        return {name: True for name in ("output_attentions", "output_hidden_states") if getattr(self.config, name)}

    @property
    def source_tokens(self) -> int:
        """Tokens read besides the prompts, by an encoder or for guidance, without padding."""
        if self.source is not None:
            return self.source.tokens or 0
        return 0 if self.guidance is None else self.guidance.other_tokens

    @property
    def is_encoded(self) -> bool:
        """Whether the encoder has run, if there is one."""
        return self.source is None or self.source.tokens is not None

    def encoded(self, model: PreTrainedModel, recover: Recover) -> Request:
        """The same with the outputs of the encoder of `model`: see `encode`."""
        if self.source is None:
            return self
        model_kwargs, source = encode(model, self.prompt.model_kwargs, self.source, recover)
        return replace(self, prompt=replace(self.prompt, model_kwargs=model_kwargs), source=source)

    @property
    def rows(self) -> int:
        """Rows of the run, after each row of the prompt became several."""
        return len(self.read[0].ids) * self.needs.rows_per_prompt

    @property
    def read(self) -> tuple[Prompt, torch.Tensor]:
        """The prompt that the model reads and its mask: with guidance, also the texts without the prompt."""
        return (self.prompt, self.mask) if self.guidance is None else (self.guidance.prompt, self.guidance.mask)

    @property
    def columns(self) -> int:
        """Columns of the model at the end of the longest run."""
        return self.read[1].shape[1] + self.lengths.new

    @property
    def cached_columns(self) -> int:
        """Columns that a cache holds at the end of the longest run: the last token is not fed, but where the strategy
        looks at the states behind its candidates."""
        return self.columns - (not self.needs.hidden_states)

    @property
    def run_shape(self) -> RunShape:
        """The numbers that memory depends on."""
        outputs = self.prompt.model_kwargs.get("encoder_outputs")
        return RunShape(
            prompt_tokens=self.read[1].shape[1],
            new_tokens=self.lengths.new,
            prompts=len(self.read[0].ids),
            branches=self.needs.rows_per_prompt,
            source_tokens=0 if outputs is None else outputs[0].shape[1],
            chunk_tokens=self.chunk_tokens,
            ends_early=not self.length_is_known,
            max_cache_len=getattr(self.config, "max_cache_len", None),
            score_copies=score_copies(self.strategy, self.processing.given),
        )

    @property
    def task(self) -> Task:
        """The argument of the strategy's flow."""
        return Task(
            ids=self.prompt.ids,
            mask=self.mask[:, self.lengths.cached :],
            process=self.processing,
            ended=self.ended(),
            max_columns=self.lengths.ids,
            eos_ids=self.eos_ids,
            candidates_per_beam=self.candidates_per_beam,
            pad_id=self.pad_id,
            drafts=self.drafts,
            translation=self.translation,
            generator=self.generator,
            forced=None if self.grammar is None else self.grammar.forced,
            announce=nothing if self.grammar is None else self.grammar.announce,
            belongs=self.belongs,
        )

    @property
    def length_is_known(self) -> bool:
        """Whether only the length can end the run."""
        return not (self.eos_ids or self.stop_strings or self.criteria or self.config.max_time is not None)
