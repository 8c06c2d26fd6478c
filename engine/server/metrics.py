"""What the server measures, for Prometheus and for the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.result import Generation, StreamChunk
from engine.serving.counts import BatchState

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PLACES = ("device", "host", "disk", "staging")


class Shown(Protocol):
    """What the gauges are read from: a `Batch`, and the `Generator.pools`."""

    @property
    def state(self) -> BatchState: ...

    @property
    def prefix_bytes(self) -> int: ...

    @property
    def prefix_failures(self) -> int: ...


class Metrics:
    """Counters and histograms of all requests, and gauges of what runs now."""

    def __init__(self, shown: Shown):
        self._shown, self.registry = shown, CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"kvengine_{name}", description, labels, registry=self.registry)

        self._requests = counter("requests", "Requests that came to their end, by how.", "outcome")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_prompt_tokens", "Tokens of prompts that a stored prefix had already.")
        self._new = counter("generated_tokens", "Tokens generated.")
        self._hits = counter("prefix_hits", "Prompts that began with a stored prefix.")
        self._fallbacks = counter("fallbacks", "Fallbacks applied when memory was out.", "name")
        self._first = Histogram(
            "kvengine_time_to_first_token_seconds", "From the request to its first token.", buckets=_FIRST_S,
            registry=self.registry,
        )  # fmt: skip
        self._next = Histogram(
            "kvengine_time_between_tokens_seconds", "Between two tokens of a text.", buckets=_NEXT_S,
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)

    def clock(self) -> TokenClock:
        """For the texts of one prompt, which begins to wait now."""
        return TokenClock(self._first, self._next, self._new)

    def ended(self, outcome: str) -> None:
        """outcome: of a request, "ok", "cancelled", "refused", "failed", "full"."""
        self._requests.labels(outcome).inc()

    def add(self, result: Generation, prompt_tokens: int) -> None:
        """Count what a prompt's run has read, also where it failed."""
        stats = result.stats
        self._prompt.inc(prompt_tokens)
        self._cached.inc(stats.cached_tokens)
        self._hits.inc(stats.cached_tokens > 0)
        for fallback in stats.fallbacks:
            self._fallbacks.labels(fallback.name).inc()

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The gauges, for the registry."""
        state = self._shown.state
        running = GaugeMetricFamily("kvengine_requests_in_state", "Prompts by what they do.", labels=["state"])
        for name in ("waiting", "running", "parked"):
            running.add_metric([name], getattr(state, name))
        yield running
        yield GaugeMetricFamily("kvengine_rows", "Rows in the batch.", value=state.rows)
        cache_bytes = GaugeMetricFamily(
            "kvengine_cache_bytes", "Bytes of the caches of prompts that run.", labels=["place"]
        )
        for tier in _PLACES:
            cache_bytes.add_metric([tier], state.cache_bytes.get(tier, 0))
        yield cache_bytes
        stored = self._shown.prefix_bytes
        yield GaugeMetricFamily("kvengine_prefix_store_bytes", "Bytes of stored prefixes in memory.", value=stored)
        failures, description = self._shown.prefix_failures, "Prefixes that could not be stored, written or read."
        yield CounterMetricFamily("kvengine_prefix_store_failures", description, value=failures)


class TokenClock:
    """Times and counts the tokens of a prompt's texts as they come."""

    def __init__(self, first_token: Histogram, following: Histogram, count: Counter):
        self._first, self._following, self._count = first_token, following, count
        self._begun, self._last = time.perf_counter(), dict[int, float]()

    def see(self, chunk: StreamChunk) -> None:
        if not chunk.tokens:
            return
        now, tokens = time.perf_counter(), len(chunk.tokens)
        self._count.inc(tokens)
        if chunk.row in self._last:
            for _ in chunk.tokens:
                self._following.observe((now - self._last[chunk.row]) / tokens)
        elif not self._last:
            self._first.observe(now - self._begun)
        self._last[chunk.row] = now
