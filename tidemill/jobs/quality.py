"""The quality gate of a stream: what pauses its publication, and the daily model that is asked about the same events."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill import logs
from tidemill.checkpoint.best import evaluation_of
from tidemill.contracts.progress import WindowFigures
from tidemill.jobs.restore import Restored
from tidemill.jobs.run import Run
from tidemill.jobs.start import from_rank_zero
from tidemill.lineage.quality import QualityBounds, QualityWatch, Sample
from tidemill.serving.loader import LineageFolder, load_snapshot
from tidemill.serving.predictor import Predictor
from tidemill.training.frozen import FrozenSample, SampleFigures, Score
from tidemill.training.progressive import Collect, ProgressiveSettings


def open_quality(run: Run, restored: Restored) -> QualityWatch | None:
    """What pauses publication, if the config asks for it; it knows the daily model's evaluation if there is one. Collective."""
    config = run.config.train_config.publish.quality
    if config is None or not run.config.train_config.publish.enabled:
        return None
    bounds = QualityBounds(config.min_events, config.auc, config.normalized_entropy, config.calibration, config.hold_s)
    parent, storage = run.start.parent, run.start.parent_storage
    frozen = {}
    if parent is not None and storage is not None:
        step = parent.step
        frozen = from_rank_zero(run.agreement, run.rank, lambda: evaluation_of(storage, step))
    watch = QualityWatch(bounds, reference_windows=config.reference_windows, frozen=frozen, tells=run.rank == 0)
    restored.load("quality", watch)
    return watch


def open_frozen(run: Run, settings: ProgressiveSettings) -> FrozenSample | None:
    """The lineage's base snapshot, which scores some of rank 0's batches beside training; None if nobody wants to know."""
    publish = run.config.train_config.publish
    if publish.quality is None or not publish.enabled or not publish.quality.daily_model_share or run.start.snapshot is None:
        return None

    def load() -> Score:
        return Predictor(load_snapshot(LineageFolder(run.storage, ""))).score_batch

    sample = FrozenSample(settings, load if run.rank == 0 else None, share=publish.quality.daily_model_share)
    run.resources.callback(sample.close)
    return sample


def observe_windows(watch: QualityWatch, windows: Sequence[WindowFigures], frozen: FrozenSample | None, collect: Collect) -> None:
    """Judge windows that are over. Collective: the same windows on all ranks."""
    figures: Sequence[SampleFigures | None] = frozen.close_windows(windows, collect) if frozen else [None] * len(windows)
    for window, found in zip(windows, figures, strict=True):
        sample = None
        if found is not None:
            sample = Sample(found.rows, found.own, found.frozen)
            logs.event(
                "quality.sample",
                start=window.start,
                stop=window.stop,
                rows=sample.rows,
                own=dict(sample.own),
                daily=dict(sample.daily),
            )
        watch.observe(window, sample)
