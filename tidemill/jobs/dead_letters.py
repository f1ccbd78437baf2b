"""Where a training run keeps messages and rows that can't be used."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.data.dead_letters import DeadLetterFile, DeadLetters, DeadLetterSink
from tidemill.data.sources.kafka_dead_letters import DeadLetterTopic


def open_dead_letters(config: PipelineConfig, folder: Path | None, rank: int) -> DeadLetters | None:
    """For a stream; None for a table, whose bad rows are errors. `folder`: the run's; None: there is none to keep a file in."""
    stream = config.stream
    if stream is None:
        return None
    settings = stream.dead_letter
    sink: DeadLetterSink | None = None
    if settings.topic and config.kafka is not None:
        sink = DeadLetterTopic(config.kafka, settings.topic)
    elif folder is not None:
        path = folder / layout.dead_letters(rank)
        sink = DeadLetterFile(path, max_bytes=settings.max_bytes, max_payload_bytes=settings.max_payload_bytes)
    return DeadLetters(max_poison=stream.max_poison, window=stream.poison_window, sink=sink)
