"""Where a training run keeps messages and rows that can't be used."""

from __future__ import annotations

from pathlib import Path

from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.data.dead_letters import DeadLetterFile, DeadLetters, DeadLetterSink
from tidemill.data.sources.kafka_dead_letters import DeadLetterTopic
from tidemill.jobs.restore import Restored

DEAD_LETTERS = "dead_letters"
"""Under which name a checkpoint holds what counts against each rank's budget."""


def restore_dead_letters(letters: DeadLetters, restored: Restored, *, rank: int, world_size: int) -> None:
    """Go on with the budget of the run before; on another number of ranks, what was counted is dealt out among them."""
    states = [state[DEAD_LETTERS] for state in restored.rank_states if DEAD_LETTERS in state]
    if len(states) == world_size:
        letters.load_state([states[rank]])
        return
    entries = [entry for state in states for entry in state["recent"]]
    letters.load_state([{"recent": entries[rank::world_size]}])


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
