"""Evaluation: all ranks score until the last of them has no rows left, then merge their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tidemill.cadence import NO_BATCH, RankReport, StopReason
from tidemill.data.split import Delivery
from tidemill.distributed.agreement import Agreement
from tidemill.features.batch import Batch
from tidemill.models.metrics import Metric, scored_rows

_WAIT_S = 0.5


def evaluate(
    take: Callable[[float], Delivery[Batch] | None],
    scores: Callable[[Batch], dict[str, np.ndarray]],
    *,
    agreement: Agreement,
    padding: Batch,
    metrics: Sequence[Metric],
    label: str,
    keys: Sequence[str] = (),
    max_steps: int | None = None,
) -> dict[str, float]:
    """Metrics over all ranks' batches, the same on every rank. Collective.

    `take` is a loader's: the next batch, None if none came in time, EOFError at the end. A rank that has none left goes on with
    `padding`, so that lookups, which are collective, always have all ranks.
    """
    exhausted = False
    steps = 0
    while max_steps is None or steps < max_steps:
        delivery = None
        if not exhausted:
            try:
                delivery = take(_WAIT_S)
            except EOFError:
                exhausted = True
        reports = agreement.issue(_report(delivery, exhausted)).wait()
        if all(report.stop is StopReason.EXHAUSTED for report in reports):
            break
        if all(report.weights[0] == NO_BATCH for report in reports):
            continue
        batch = delivery.payload if delivery is not None else padding
        outputs = scores(batch)
        if batch.num_rows:
            rows = scored_rows(batch, outputs["probs"], label, keys)
            for metric in metrics:
                metric.update(rows)
        steps += 1
    return _merged(agreement, metrics)


def _report(delivery: Delivery[Batch] | None, exhausted: bool) -> RankReport:
    weight = NO_BATCH if delivery is None else float(delivery.payload.weights.sum())
    stop = StopReason.EXHAUSTED if exhausted and delivery is None else StopReason.NONE
    return RankReport(event_time=None, abstains=True, stop=stop, writer_ready=True, weights=(weight,))


def _merged(agreement: Agreement, metrics: Sequence[Metric]) -> dict[str, float]:
    values = {}
    for metric in metrics:
        states = agreement.collect(metric.state())
        metric.load_state(states[0])
        for state in states[1:]:
            metric.merge(state)
        values[metric.name] = metric.compute()
    return values
