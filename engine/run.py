"""The one loop. A strategy's flow says what to do and `Run` does it: it owns the clock, the tokens, the mask, the steps
of the cache, the streams and the clean end."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import caches
from caches import Driven
from engine.errors import EngineError, Interrupted, OptionError
from engine.masks import Columns
from engine.request import Request
from engine.result import Generation, Piece, Stats
from engine.runner import Runner, extend_extras
from engine.session import remember
from engine.text import RowText
from strategies import Crop, Emit, Forward, Operation, Rows


class Run:
    """One generation under way."""

    def __init__(
        self,
        runner: Runner,
        request: Request,
        cache: Driven,
        chunk_tokens: int | None,
        tokenizer: Any,
        streamer: BaseStreamer | None,
        stream_text: bool,
        started: float,
    ):
        self._started = started
        self._runner, self._request, self._cache, self._tokenizer = runner, request, cache, tokenizer
        self._streamer = streamer
        self._chunk_tokens = chunk_tokens
        prompt = request.prompt.ids
        self._rows = prompt.shape[0]
        self._before = request.before
        self._prompt_tokens = int(request.mask[:, cache.seen :].sum())
        extras = dict(request.prompt.extras)
        self._columns = Columns(request.mask, request.total, extras.pop("position_ids", None))
        self._extras = extend_extras(extras, request.total)
        self._stopping = request.stopping()
        # Emitted tokens, the prompt first; the part in use is [:, :_length].
        self._ids = prompt.new_full((self._rows, request.total - request.before), request.pad_id)
        self._ids[:, : prompt.shape[1]] = prompt
        self._length = prompt.shape[1]
        self._fed = prompt[:, :0]  # tokens given to the model in this run, committed or in the open step
        self._step_open = False
        self._texts: list[RowText] | None = None
        if tokenizer is not None and (stream_text or request.stop_strings):
            self._texts = [RowText(tokenizer, request.stop_strings) for _ in range(self._rows)]
        wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        self._records: dict[str, list[Any]] = {name: [] for name in wanted if getattr(request.config, name, None)}
        self._new_tokens = 0
        self._first_token_s: float | None = None
        self._ended_s: float | None = None
        self._device = prompt.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def pieces(self) -> Generator[Piece, None, None]:
        """Run to the end, piece by piece. Whatever stops it, the cache is consistent and the streamer has ended."""
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
                yield from pieces
        except EngineError:
            raise
        except Exception as error:
            new = self._length - self._request.prompt.ids.shape[1]
            raise Interrupted(
                f"generation stopped after {new} new tokens per row ({type(error).__name__}: {error}); what was "
                "generated is in `partial`, and its cache can be continued",
                self.result(),
            ) from error
        finally:
            flow.close()
            self._close()

    def _perform(self, operation: Operation) -> tuple[Any, list[Piece]]:
        """Carry out one operation of the flow: its result, and what there is to show."""
        match operation:
            case Forward(tokens):
                self._settle()
                return self._forward(tokens), []
            case Emit(tokens, scores):
                return self._emit(tokens, scores)
            case Crop(tokens):
                self._settle(drop=tokens)
            case Rows(index):
                self._settle()
                self._reorder(index)
        return None, []

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        prefill = self._fed.shape[1] == 0
        self._fed = torch.cat([self._fed, tokens], dim=1)
        flags: dict[str, bool] = {
            name: True for name in ("output_attentions", "output_hidden_states") if name in self._records
        }
        outputs = self._runner.feed(
            self._fed,
            self._columns,
            self._cache,
            before=self._before,
            prefill=prefill,
            extras=self._extras,
            flags=flags,
            chunk_tokens=self._chunk_tokens,
        )
        self._step_open = True
        for name in flags:
            self._records[name].append(getattr(outputs, name.removeprefix("output_")))
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        if "output_logits" in self._records:
            self._records["output_logits"].append(logits)
        return logits

    def _emit(self, tokens: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[Piece]]:
        pieces: list[Piece] = []
        for column in range(tokens.shape[1]):
            if self._stopping.done:
                break
            new = tokens[:, column].tolist()  # waits for the device, so the clock below is honest
            if self._first_token_s is None:
                self._first_token_s = time.perf_counter()
            running = [reason is None for reason in self._stopping.reasons]
            new = [token if runs else self._request.pad_id for token, runs in zip(new, running, strict=True)]
            self._ids[:, self._length] = torch.tensor(new)
            self._length += 1
            self._new_tokens += sum(running)
            if "output_scores" in self._records and scores:
                self._records["output_scores"].append(scores[column])
            if self._streamer is not None:
                self._streamer.put(torch.tensor(new))
            pieces += self._end_rows(new, running, scores[: column + 1] or None)
        return self._ids[:, : self._length], pieces

    def _end_rows(self, new: list[int], running: list[bool], scores: tuple[torch.Tensor, ...] | None) -> list[Piece]:
        """Find the rows that end with their new token; one piece for each that was running."""
        deltas: list[str | None] = [None] * self._rows
        if self._texts is not None:
            deltas = [
                text.push(token) if runs else "" for text, token, runs in zip(self._texts, new, running, strict=True)
            ]
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
        if self._texts is not None:
            raise OptionError("stop strings and streamed text cannot follow a strategy that reorders rows")
        self._cache.rows(index)
        self._columns.rows(index)
        self._ids, self._fed = self._ids[index], self._fed[index]
        self._stopping.rows(index)

    def _settle(self, drop: int = 0) -> None:
        if not self._step_open:
            if drop:
                raise EngineError(f"Crop({drop}) has to follow a Forward")
            return
        self._cache.settle(drop)
        self._step_open = False
        if drop:
            self._fed = self._fed[:, :-drop]

    def _close(self) -> None:
        if self._ended_s is not None:
            return
        # Continuing needs a token that the cache has not seen: a run that failed may have fed the last one.
        fed_too_far = max(0, self._fed.shape[1] - (self._length - 1)) if self._step_open else 0
        try:
            self._settle(drop=fed_too_far)
        except caches.StepError:  # a cache that cannot take it back keeps it
            self._settle()
        self._ended_s = time.perf_counter()
        if self._streamer is not None:
            self._streamer.end()
        if self._cache.handle is not None and self._before == 0:
            remember(self._cache.handle, self._fed[:, : self._cache.seen])

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
            cache=self._cache.handle,
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
        decoded = self._new_tokens - self._rows  # the first token of each row comes from the prefill
        return Stats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_s=prefill_s,
            prefill_tokens_per_s=None if not prefill_s else self._prompt_tokens / prefill_s,
            decode_tokens_per_s=None if not decode_s or decoded < 1 else decoded / decode_s,
            total_s=self._ended_s - self._started,
            cache_bytes=self._cache.bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )
