"""What a server counts, in Prometheus form, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidemill.clock import Clock
from tidemill.serving.generation import Generation

_LATENCY_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_UNKNOWN = float("nan")


class Metrics:
    """Counters, histograms and gauges of one server. Threading: any thread may count."""

    def __init__(self, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self.requests = Counter("tidemill_requests", "Infer requests by HTTP status.", ["code"], registry=self.registry)
        self.latency = Histogram("tidemill_request_seconds", "From request to answer.", buckets=_LATENCY_S, registry=self.registry)
        self.rows = Counter("tidemill_rows_scored", "Rows scored.", registry=self.registry)
        self.batch_rows = Histogram("tidemill_batch_rows", "Rows scored at once.", buckets=_ROWS, registry=self.registry)
        self.queue_depth = Gauge("tidemill_queue_depth", "Requests that wait for the scoring thread.", registry=self.registry)
        self.swaps = Counter("tidemill_swaps", "Generations swapped in.", registry=self.registry)
        self.swap_seconds = Histogram("tidemill_swap_seconds", "From poll to swap.", buckets=_LATENCY_S, registry=self.registry)
        self.rows_applied = Counter("tidemill_rows_applied", "Changed rows of releases applied.", registry=self.registry)
        self.load_errors = Counter(
            "tidemill_load_errors", "Polls that couldn't load what is deployed, by error.", ["reason"], registry=self.registry
        )
        self.status_errors = Counter("tidemill_status_errors", "Status files that couldn't be written.", registry=self.registry)

    def watch(self, generation: Callable[[], Generation | None]) -> None:
        """Register the gauges that describe the generation that scores; NaN where nothing is known. Call once."""
        gauges: dict[str, tuple[str, Callable[[Generation], float | None]]] = {
            "tidemill_generation_deployment": ("Number of the deployment served.", lambda served: served.deployment),
            "tidemill_generation_term": ("Term of the release served.", lambda served: served.term),
            "tidemill_generation_sequence": ("Sequence of the release served; 0: the snapshot.", lambda served: served.sequence),
            "tidemill_generation_step": ("Training step served.", lambda served: served.step),
            "tidemill_watermark_timestamp_seconds": ("Event time that is served.", lambda served: served.watermark),
            "tidemill_generation_age_seconds": ("Since the release served was committed.", self._age),
            "tidemill_freshness_seconds": ("Since the newest event in the release served arrived.", self._freshness),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(partial(_read, generation, read))
        Gauge("tidemill_ready", "1 once a generation is warm.", registry=self.registry).set_function(
            lambda: float(generation() is not None)
        )

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _age(self, generation: Generation) -> float:
        made_at = generation.stages.committed_at if generation.stages else generation.model.manifest.created_at
        return self._clock.time() - made_at

    def _freshness(self, generation: Generation) -> float | None:
        if generation.stages is None or generation.stages.newest_event_at is None:
            return None
        return self._clock.time() - generation.stages.newest_event_at


def _read(generation: Callable[[], Generation | None], read: Callable[[Generation], float | None]) -> float:
    served = generation()
    value = None if served is None else read(served)
    return _UNKNOWN if value is None else value
