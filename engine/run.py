"""The one loop. A strategy's flow says what to do and `Run` does it: it owns the tokens, the records, the streams and
the clean end; the model's side of it is a `Lane`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from engine.errors import Interrupted
from engine.lane import Lane
from engine.request import Request
from engine.result import Generation, Piece, Stats
from engine.text import RowText
from engine.tokens import Tokens
from strategies import Crop, Emit, Forward, Operation, Rows

# What may be recorded of a call: the parameter that asks for it, and where a forward's outputs have it.
_RECORDS = {
    "scores": ("output_scores", ()),
    "logits": ("output_logits", ()),
    "attentions": ("output_attentions", ("attentions", "decoder_attentions")),
    "cross_attentions": ("output_attentions", ("cross_attentions",)),
    "hidden_states": ("output_hidden_states", ("hidden_states", "decoder_hidden_states")),
}


@dataclass(frozen=True)
class _Mark:
    """Where a run stood after a column was written, to come back to: lengths of its records, the random state."""

    records: dict[str, int]
    generator: torch.Tensor | None


class Run:
    """One generation under way.

    tokenizer: None when nobody wants text. stream_text: whether text is wanted piece by piece. legacy: whether the
    result gives its cache as tuples. started: when the call began, of `time.perf_counter`.
    """

    def __init__(
        self,
        request: Request,
        lane: Lane,
        *,
        tokenizer: Any,
        streamer: BaseStreamer | None,
        stream_text: bool,
        legacy: bool,
        started: float,
    ):
        self._request, self._lane, self._tokenizer, self._streamer = request, lane, tokenizer, streamer
        self._legacy = legacy
        prompt = request.prompt.ids
        self._device = prompt.device
        self._prompt_tokens = int(request.mask[:, lane.cache.seen :].sum()) + request.source_tokens
        self._stopping = request.stopping()
        columns = request.total - request.untold
        self._tokens = Tokens(prompt, request.mask[:, request.untold :], columns, request.pad_id)
        self._last_column = columns
        self._texts: list[RowText] | None = None
        if tokenizer is not None and (stream_text or request.stop_strings):
            self._texts = [RowText(tokenizer, request.stop_strings) for _ in prompt]
        self._records: dict[str, list[Any]] = {
            name: [] for name, (asked, _) in _RECORDS.items() if getattr(request.config, asked, None)
        }
        self._unread: deque[_Mark] = deque()  # one per column that is read late
        self._read = self._mark()
        self._new_tokens = 0
        self._started = started
        self._away_s = 0.0  # time that the consumer of a stream took, which is none of ours
        self._ready_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def pieces(self) -> Generator[Piece, None, None]:
        """Run to the end, piece by piece. Whatever stops it, the cache is consistent and the streamer has ended."""
        self._away_s += time.perf_counter() - self._ready_s
        flow = self._request.strategy.flow(self._tokens.ids, self._request.processors)
        try:
            if self._streamer is not None:
                self._streamer.put(self._tokens.ids.cpu())
            answer: Any = None
            ended = False
            while not (ended or self._stopping.done):
                with torch.no_grad():
                    try:
                        operation = flow.send(answer)
                    except StopIteration:
                        ended, pieces = True, self._read_all()
                    else:
                        answer, pieces = self._perform(operation)
                for piece in pieces:
                    left_s = time.perf_counter()
                    try:
                        yield piece
                    finally:
                        self._away_s += time.perf_counter() - left_s
        except GeneratorExit:  # the consumer has left: what it was not shown has not happened
            self._forget_unread()
            raise
        except Exception as error:
            result = self.result()
            new = result.sequences.shape[1] - self._tokens.prompt
            raise Interrupted(
                f"generation stopped after {new} new tokens per row ({type(error).__name__}: {error}); what was "
                "generated is in `partial`, with its cache where that can be continued",
                result,
            ) from error
        finally:
            flow.close()
            self._close()

    def _perform(self, operation: Operation) -> tuple[Any, list[Piece]]:
        """Carry out one operation of the flow: its result, and what there is to show."""
        match operation:
            case Forward(tokens):
                return self._forward(tokens), []
            case Emit(tokens, scores):
                pieces = self._emit(tokens, scores)
                return self._tokens.ids, pieces
            case Crop(tokens):
                self._lane.settle(drop=tokens)
                return None, []
            case Rows(index):
                pieces = self._read_all()
                self._reorder(index)
                return None, pieces

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = self._lane.forward(tokens)
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        for name, values in self._records.items():
            found = next((outputs[field] for field in _RECORDS[name][1] if field in outputs), None)
            if found is not None or name == "logits":
                values.append(logits if name == "logits" else found)
        return logits

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> list[Piece]:
        pieces: list[Piece] = []
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            self._tokens.write(tokens[:, column])
            if "scores" in self._records and scores:
                self._records["scores"].append(scores[column])
            if self._tokens.late:
                self._unread.append(self._mark())
            # The first token is waited for, so that the time to it is honest, and nothing can come after the last.
            at_once = not self._tokens.late or self._first_token_s is None
            at_once = at_once or self._tokens.written == self._last_column
            while self._tokens.unread > (0 if at_once else 1):
                pieces += self._read_column()
        return pieces

    def _mark(self) -> _Mark:
        generator = _random_state(self._device) if self._request.strategy.samples else None
        return _Mark({name: len(values) for name, values in self._records.items()}, generator)

    def _read_all(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._tokens.unread and not self._stopping.done:
            pieces += self._read_column()
        return pieces

    def _read_column(self) -> list[Piece]:
        """Look at the first column not read yet: show it, and find the rows that end with it."""
        running = [reason is None for reason in self._stopping.reasons]
        new = [
            token if runs else self._request.pad_id for token, runs in zip(self._tokens.next(), running, strict=True)
        ]
        if self._unread:
            self._read = self._unread.popleft()
        if self._first_token_s is None:
            self._first_token_s = self._now()
        self._new_tokens += sum(running)
        if self._streamer is not None:
            self._streamer.put(torch.tensor(new))
        return self._end_rows(new, running)

    def _forget_unread(self) -> None:
        """As if nothing had been done after the column read last."""
        if not self._tokens.unread:
            return
        self._tokens.forget_unread()
        self._unread.clear()
        for name, length in self._read.records.items():
            del self._records[name][length:]
        if self._read.generator is not None:
            _set_random_state(self._read.generator, self._device)

    def _end_rows(self, new: list[int], running: list[bool]) -> list[Piece]:
        """Find the rows that end with their new token; one piece for each that was running."""
        deltas: list[str | None] = [None] * len(new)
        if self._texts is not None:
            deltas = [
                text.push(token) if runs else "" for text, token, runs in zip(self._texts, new, running, strict=True)
            ]
        self._stopping.check(self._tokens.read, new, self._texts, self._seen_by_criteria)
        pieces = []
        for row, reason in enumerate(self._stopping.reasons):
            if not running[row]:
                continue
            delta = deltas[row]
            if reason is not None:
                self._tokens.end_row(row)
                if self._texts is not None:
                    delta = (delta or "") + self._texts[row].flush()
            pieces.append(Piece(row, (new[row],), delta, reason))
        return pieces

    def _seen_by_criteria(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        scores = self._records.get("scores")
        read = len(scores) - self._tokens.unread if scores is not None else 0
        return self._tokens.ids[:, : self._tokens.read], None if scores is None else tuple(scores[:read])

    def _reorder(self, index: torch.Tensor) -> None:
        self._lane.rows(index)
        self._tokens.rows(index)
        self._stopping.rows(index)
        if self._texts is not None:
            self._texts = [self._texts[row].copy() for row in index.tolist()]

    def _now(self) -> float:
        return time.perf_counter() - self._away_s

    def _close(self) -> None:
        if self._ended_s is not None:
            return
        with suppress(Exception):  # a run that was stopped: what raised once may raise again
            self._read_all()
        self._forget_unread()
        self._lane.close(self._tokens.log())
        self._ended_s = self._now()
        if self._streamer is not None:
            self._streamer.end()

    def result(self) -> Generation:
        """What was generated. Ends the run."""
        self._close()
        sequences = self._tokens.ids
        records = {name: tuple(values) for name, values in self._records.items()}
        if not records.get("cross_attentions"):
            records.pop("cross_attentions", None)
        return Generation(
            sequences=sequences,
            tokens=self._tokens.new(),
            text=self._text(sequences),
            finish_reasons=list(self._stopping.reasons),
            stats=self._stats(),
            cache=self._lane.cache.handle,
            legacy=self._legacy,
            **records,
        )

    def _text(self, sequences: torch.Tensor) -> list[str] | None:
        if self._tokenizer is None:
            return None
        if self._texts is not None:
            for text in self._texts:
                text.flush()
            return [text.text for text in self._texts]
        new = sequences[:, self._tokens.prompt :].tolist()
        return [
            self._tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in new
        ]

    def _stats(self) -> Stats:
        assert self._ended_s is not None
        prefill_s = None if self._first_token_s is None else self._first_token_s - self._started
        decode_s = None if self._first_token_s is None else self._ended_s - self._first_token_s
        decoded = self._new_tokens - len(self._tokens.ids)  # the first token of each row comes from the prefill
        return Stats(
            cache=self._lane.cache.name,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=prefill_s,
            prefill_tokens_per_s=None if not prefill_s else self._prompt_tokens / prefill_s,
            decode_tokens_per_s=None if not decode_s or decoded < 1 else decoded / decode_s,
            total_s=self._ended_s - self._started,
            cache_bytes=self._lane.cache.bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
