"""From rows in to scores out, on all ranks: read, score, write, and make everything visible at once."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from tidemill.contracts.output import OutputManifest
from tidemill.data.split import Delivery
from tidemill.data.writers.output import Output
from tidemill.errors import PeerLostError, SchemaError, TidemillError
from tidemill.jobs.ranks import Ranks, exchange, failure, lead, raise_failure, together
from tidemill.jobs.scorers import Scorer

B = TypeVar("B")

_WAIT_S = 0.5
"""How long a rank waits for rows before it lets the others know that it has none yet."""


@dataclass(frozen=True, slots=True)
class Rows(Generic[B]):
    """Rows as read, and what the model takes of them."""

    table: pa.Table
    batch: B


Take = Callable[[float], Delivery[Rows[B]] | None]
"""Gives rows: `data.loader.Loader.take`."""

Columns = Callable[[pa.Table, Mapping[str, np.ndarray]], pa.Table]
"""Puts rows and their scores together."""


def score_all(
    ranks: Ranks,
    take: Take[B],
    scorer: Scorer[B],
    columns: Columns,
    output: Output,
    progress: Callable[[int], None],
) -> OutputManifest:
    """Score all rows of all ranks and commit them; `progress` is told how many all ranks have written. Collective.

    Raises an error of any rank on all of them, and then nothing has become visible. `output.abort` is left to the caller.
    """
    schema = _write_all(ranks, take, scorer, columns, output, progress)
    begun = lead(ranks, lambda: output.begin(schema))
    receipts = together(ranks, lambda: output.deliver(begun, ranks.rank))
    committed = lead(ranks, lambda: output.commit(begun, receipts).model_dump())
    together(ranks, output.settle)
    return OutputManifest.model_validate(committed)


def _write_all(
    ranks: Ranks,
    take: Take[B],
    scorer: Scorer[B],
    columns: Columns,
    output: Output,
    progress: Callable[[int], None],
) -> pa.Schema | None:
    """Rounds until no rank has rows left; the columns of the rows written, None if there were none."""
    feed = _Feed(take)
    schema: pa.Schema | None = None
    checked = False
    while True:
        rows = feed.next()
        votes = exchange(ranks, feed.vote(rows is not None))
        raise_failure(votes, ranks.rank, feed.error)
        progress(sum(vote["written"] for vote in votes))
        if all(vote["ended"] for vote in votes):
            break
        if not any(vote["ready"] for vote in votes):
            continue
        table = feed.attempt(_score, scorer, rows, columns)
        if table is not None:
            schema = table.schema.remove_metadata()
        if not checked:
            _check(ranks, output, schema, feed.error)
            checked = True
        if table is not None:
            feed.attempt(output.write, table)
            feed.written += table.num_rows
    schema = _agreed(exchange(ranks, _to_text(schema)))
    if not checked:
        _check(ranks, output, schema, None)
    return schema


def _score(scorer: Scorer[B], rows: Rows[B] | None, columns: Columns) -> pa.Table | None:
    """What is to be written of the rows; without rows this rank still does its part. Collective."""
    scores = scorer.score(None if rows is None else rows.batch)
    return None if rows is None else columns(rows.table, scores)


class _Feed(Generic[B]):
    """This rank's rows, and what the others need to know of them."""

    def __init__(self, take: Take[B]) -> None:
        self._take = take
        self._ended = False
        self.written = 0
        self.error: TidemillError | None = None

    def next(self) -> Rows[B] | None:
        """The next rows; None if there are none now, or no more, or this rank has failed."""
        if self._ended or self.error is not None:
            return None
        try:
            delivery = self._take(_WAIT_S)
        except EOFError:
            self._ended = True
            return None
        except TidemillError as error:
            self.error = error
            return None
        return None if delivery is None else delivery.payload

    def vote(self, ready: bool) -> dict[str, Any]:
        return {"ready": ready, "ended": self._ended, "written": self.written, **failure(self.error)}

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What the work gives; an error of it is told to the others in the next round, unless they have gone."""
        try:
            return work(*arguments)
        except PeerLostError:
            raise
        except TidemillError as error:
            self.error = error
            return None


def _check(ranks: Ranks, output: Output, schema: pa.Schema | None, own: TidemillError | None) -> None:
    """Let rank 0 look whether rows like these can be written, before hours are spent on them."""
    answers = exchange(ranks, {"schema": _to_text(schema), **failure(own)})
    raise_failure(answers, ranks.rank, own)
    agreed = _agreed([answer["schema"] for answer in answers])
    lead(ranks, lambda: output.check(agreed))


def _agreed(texts: Sequence[str | None]) -> pa.Schema | None:
    """The one schema of all ranks that have rows. Raises SchemaError naming the first column that differs."""
    agreed: pa.Schema | None = None
    for rank, text in enumerate(texts):
        if text is None:
            continue
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
        agreed = agreed or schema
        for field in schema:
            if field not in agreed:
                raise SchemaError(f"output: column {field.name!r} is {field.type} on rank {rank}, but not on the ranks before it")
    return agreed


def _to_text(schema: pa.Schema | None) -> str | None:
    return None if schema is None else base64.b64encode(schema.serialize()).decode()
