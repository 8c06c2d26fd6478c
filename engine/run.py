"""The one loop. A strategy's flow says what to do and `Run` does it: it owns the tokens, the records, the streams and
the clean end; the model's side of it is a `Lane`."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from caches import Log
from engine.errors import Interrupted
from engine.lane import Lane
from engine.request import Request
from engine.result import Generation, Piece, Stats
from engine.text import RowText
from strategies import Crop, Emit, Forward, Operation, Rows

RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Run:
    """One generation under way.

    tokenizer: None when nobody wants text. stream_text: whether text is wanted piece by piece. started: when the call
    began, of `time.perf_counter`.
    """

    def __init__(
        self,
        request: Request,
        lane: Lane,
        *,
        tokenizer: Any,
        streamer: BaseStreamer | None,
        stream_text: bool,
        started: float,
    ):
        self._request, self._lane, self._tokenizer, self._streamer = request, lane, tokenizer, streamer
        prompt = request.prompt.ids
        self._prompt_tokens = int(request.mask[:, lane.cache.seen :].sum())
        self._stopping = request.stopping()
        # Emitted tokens, the prompt first; the part in use is [:, :_length].
        self._ids = prompt.new_full((len(prompt), request.total - request.before), request.pad_id)
        self._ids[:, : prompt.shape[1]] = prompt
        self._length = prompt.shape[1]
        self._mask = torch.zeros_like(self._ids)  # 1 where a token is that is no pad
        self._mask[:, : self._length] = request.mask[:, request.before :]
        self._texts: list[RowText] | None = None
        if tokenizer is not None and (stream_text or request.stop_strings):
            self._texts = [RowText(tokenizer, request.stop_strings) for _ in prompt]
        self._records: dict[str, list[Any]] = {name: [] for name in RECORDS if getattr(request.config, name, None)}
        self._new_tokens = 0
        self._started = started
        self._away_s = 0.0  # time that the consumer of a stream took, which is none of ours
        self._ready_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self._device = prompt.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def pieces(self) -> Generator[Piece, None, None]:
        """Run to the end, piece by piece. Whatever stops it, the cache is consistent and the streamer has ended."""
        self._away_s += time.perf_counter() - self._ready_s
        flow = self._request.strategy.flow(self._ids[:, : self._length], self._request.processors)
        try:
            if self._streamer is not None:
                self._streamer.put(self._ids[:, : self._length].cpu())
            answer: Any = None
            while not self._stopping.done:
                with torch.no_grad():
                    try:
                        operation = flow.send(answer)
                    except StopIteration:
                        return
                    answer, pieces = self._perform(operation)
                for piece in pieces:
                    left_s = time.perf_counter()
                    try:
                        yield piece
                    finally:
                        self._away_s += time.perf_counter() - left_s
        except Exception as error:
            new = self._length - self._request.prompt.ids.shape[1]
            raise Interrupted(
                f"generation stopped after {new} new tokens per row ({type(error).__name__}: {error}); what was "
                "generated is in `partial`, with its cache where that can be continued",
                self.result(),
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
                return self._emit(tokens, scores)
            case Crop(tokens):
                self._lane.settle(drop=tokens)
            case Rows(index):
                self._reorder(index)
        return None, []

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = self._lane.forward(tokens)
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        found = {"output_logits": logits, "output_attentions": outputs.get("attentions")}
        found["output_hidden_states"] = outputs.get("hidden_states")
        for name in found.keys() & self._records.keys():
            self._records[name].append(found[name])
        return logits

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[Piece]]:
        pieces: list[Piece] = []
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            new = tokens[:, column].tolist()  # waits for the device, so the clock below is honest
            if self._first_token_s is None:
                self._first_token_s = self._now()
            running = [reason is None for reason in self._stopping.reasons]
            new = [token if runs else self._request.pad_id for token, runs in zip(new, running, strict=True)]
            self._ids[:, self._length] = torch.tensor(new)
            self._mask[:, self._length] = torch.tensor(running)
            self._length += 1
            self._new_tokens += sum(running)
            if "output_scores" in self._records and scores:
                self._records["output_scores"].append(scores[column])
            if self._streamer is not None:
                self._streamer.put(torch.tensor(new))
            pieces += self._end_rows(new, running)
        return self._ids[:, : self._length], pieces

    def _end_rows(self, new: list[int], running: list[bool]) -> list[Piece]:
        """Find the rows that end with their new token; one piece for each that was running."""
        deltas: list[str | None] = [None] * len(new)
        if self._texts is not None:
            deltas = [
                text.push(token) if runs else "" for text, token, runs in zip(self._texts, new, running, strict=True)
            ]
        recorded = self._records.get("output_scores")
        scores = None if recorded is None else tuple(recorded)
        self._stopping.check(self._ids[:, : self._length], new, scores, self._texts)
        pieces = []
        for row, reason in enumerate(self._stopping.reasons):
            if not running[row]:
                continue
            delta = deltas[row]
            if reason is not None and self._texts is not None:
                delta = (delta or "") + self._texts[row].flush()
            pieces.append(Piece(row, (new[row],), delta, reason))
        return pieces

    def _reorder(self, index: torch.Tensor) -> None:
        self._lane.rows(index)
        self._ids, self._mask = self._ids[index], self._mask[index]
        self._stopping.rows(index)
        if self._texts is not None:
            self._texts = [self._texts[row].copy() for row in index.tolist()]

    def _now(self) -> float:
        return time.perf_counter() - self._away_s

    def _close(self) -> None:
        if self._ended_s is not None:
            return
        self._lane.close(Log(self._ids[:, : self._length], self._mask[:, : self._length]))
        self._ended_s = self._now()
        if self._streamer is not None:
            self._streamer.end()

    def result(self) -> Generation:
        """What was generated. Ends the run."""
        self._close()
        sequences = self._ids[:, : self._length]
        records = {name.removeprefix("output_"): tuple(values) for name, values in self._records.items()}
        return Generation(
            sequences=sequences,
            text=self._text(sequences),
            finish_reasons=list(self._stopping.reasons),
            stats=self._stats(),
            cache=self._lane.cache.handle,
            **records,
        )

    def _text(self, sequences: torch.Tensor) -> list[str] | None:
        if self._tokenizer is None:
            return None
        if self._texts is not None:
            for text in self._texts:
                text.flush()
            return [text.text for text in self._texts]
        new = sequences[:, self._request.prompt.ids.shape[1] :].tolist()
        return [
            self._tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in new
        ]

    def _stats(self) -> Stats:
        assert self._ended_s is not None
        prefill_s = None if self._first_token_s is None else self._first_token_s - self._started
        decode_s = None if self._first_token_s is None else self._ended_s - self._first_token_s
        decoded = self._new_tokens - len(self._ids)  # the first token of each row comes from the prefill
        return Stats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=prefill_s,
            prefill_tokens_per_s=None if not prefill_s else self._prompt_tokens / prefill_s,
            decode_tokens_per_s=None if not decode_s or decoded < 1 else decoded / decode_s,
            total_s=self._ended_s - self._started,
            cache_bytes=self._lane.cache.bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )
