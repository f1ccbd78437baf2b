"""What every output must hold to: all rows or none, whoever dies and whenever, in the order in which they were written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.output import Output
from tidemill.errors import ConfigError, SchemaError, TidemillError
from tidemill.testing.faulty_storage import SimulatedCrash


def rows(start: int, stop: int) -> pa.Table:
    """Rows for a contract: `n` start .. stop - 1, and two columns that follow from it; each third text is null."""
    numbers = list(range(start, stop))
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "text": pa.array([f'row {n}, "ü"' if n % 3 else None for n in numbers], pa.string()),
            "score": pa.array([n / 7 for n in numbers], pa.float64()),
        }
    )


class OutputContract(ABC):
    """Derive a test class `Test<Name>` from it and say how to make and read the output.

    A story is: the tables that each rank writes, in rank order.
    """

    atomic = True
    """Whether a reader sees the old rows until it sees the new ones. False: in between it sees that there is no whole output."""

    @abstractmethod
    def make(self, directory: Path, *, overwrite: bool = False) -> Output:
        """One rank's end of the one output that belongs to the folder; called again, as another process would see it."""

    @abstractmethod
    def read(self, directory: Path) -> pa.Table | None:
        """What a reader sees, in order: all rows of the whole output; None if there is none."""

    def leftovers(self, directory: Path) -> list[str]:
        """Names of what a run has left that nobody needs."""
        return []

    @contextmanager
    def dying(self, directory: Path, number: int) -> Iterator[None]:
        """Outputs made inside die (raise SimulatedCrash or TidemillError) before operation `number`, from 1, of those that reach
        the store. The default: the kind can't tell its operations."""
        raise NotImplementedError

    counts_operations = False
    """Whether `dying` is there."""

    def test_gives_back_what_was_written_in_order(self, tmp_path: Path) -> None:
        manifest = self._write(tmp_path, [[rows(0, 5), rows(5, 6), rows(6, 40)]])
        assert manifest.rows == 40
        self._assert_holds(tmp_path, rows(0, 40))
        assert self.leftovers(tmp_path) == []

    def test_two_ranks_write_one_output(self, tmp_path: Path) -> None:
        manifest = self._write(tmp_path, [[rows(0, 20), rows(20, 23)], [rows(23, 40)]])
        assert manifest.rows == 40
        self._assert_holds(tmp_path, rows(0, 40))
        assert self.leftovers(tmp_path) == []

    @pytest.mark.parametrize("stories", [[[], [rows(0, 9)]], [[rows(0, 9)], []], [[], [rows(0, 9)], []]])
    def test_a_rank_may_have_no_rows(self, tmp_path: Path, stories: list[list[pa.Table]]) -> None:
        assert self._write(tmp_path, stories).rows == 9
        self._assert_holds(tmp_path, rows(0, 9))

    def test_nothing_is_visible_before_the_commit(self, tmp_path: Path) -> None:
        before = self.read(tmp_path)
        assert before is None or before.num_rows == 0
        outputs = [self.make(tmp_path), self.make(tmp_path)]
        outputs[0].check(rows(0, 1).schema)
        for rank, output in enumerate(outputs):
            output.write(rows(rank, rank + 1))
        self._assert_same(self.read(tmp_path), before)
        begun = outputs[0].begin(rows(0, 1).schema)
        receipts = [output.deliver(begun, rank) for rank, output in enumerate(outputs)]
        self._assert_same(self.read(tmp_path), before)
        outputs[0].commit(begun, receipts)
        for output in outputs:
            output.settle()
            output.abort()
        self._assert_holds(tmp_path, rows(0, 2))

    @pytest.mark.parametrize("delivered", [False, True])
    def test_an_abort_leaves_what_was_there(self, tmp_path: Path, delivered: bool) -> None:
        self._write(tmp_path, [[rows(0, 7)]])
        outputs = [self.make(tmp_path, overwrite=self._replaces(tmp_path)) for _ in range(2)]
        outputs[0].check(rows(0, 1).schema)
        for output in outputs:
            output.write(rows(50, 60))
        if delivered:
            begun = outputs[0].begin(rows(0, 1).schema)
            for rank, output in enumerate(outputs):
                output.deliver(begun, rank)
        for output in outputs:
            output.abort()
            output.abort()
        self._assert_holds(tmp_path, rows(0, 7))
        assert self.leftovers(tmp_path) == []

    def test_an_output_that_is_there_is_replaced_only_if_asked_for(self, tmp_path: Path) -> None:
        self._write(tmp_path, [[rows(0, 30)], [rows(30, 60)]])
        if not self._replaces(tmp_path):
            with pytest.raises(ConfigError, match="overwrite"):
                self.make(tmp_path, overwrite=True).check(rows(0, 1).schema)
            return
        with pytest.raises(ConfigError, match="--overwrite"):
            self.make(tmp_path).check(rows(0, 1).schema)
        self._assert_holds(tmp_path, rows(0, 60))
        assert self._write(tmp_path, [[rows(100, 104)]], overwrite=True).rows == 4
        self._assert_holds(tmp_path, rows(100, 104))

    def test_other_columns_are_refused_by_name(self, tmp_path: Path) -> None:
        output = self.make(tmp_path)
        output.write(rows(0, 3))
        with pytest.raises(SchemaError, match="score"):
            output.write(rows(3, 4).drop_columns(["score"]))
        with pytest.raises(SchemaError, match=r"'n'.*string"):
            output.write(rows(3, 4).set_column(0, "n", pa.array(["x"])))
        output.abort()
        assert self.leftovers(tmp_path) == []

    def test_whenever_a_run_dies_readers_see_all_rows_or_none(self, tmp_path: Path) -> None:
        if not self.counts_operations:
            return
        old, new = rows(100, 106), rows(0, 9)
        replaces = self._replaces(tmp_path)
        seen_old = seen_new = False
        for number in range(1, 200):
            directory = tmp_path / str(number)
            directory.mkdir()
            if replaces:
                self._write(directory, [[old]])
            died = self._dies(directory, number, [[new.slice(0, 4)], [new.slice(4)]], overwrite=replaces)
            found = self.read(directory)
            if found is not None and found.num_rows:
                is_old, is_new = self._same(found, old), self._same(found, new)
                assert is_old or is_new, f"died at operation {number}: {found.num_rows} rows"
                seen_old, seen_new = seen_old or is_old, seen_new or is_new
            elif replaces:
                assert not self.atomic, f"died at operation {number}: the old rows have gone"
            if not died:
                assert number > 3, "a crash at an operation must reach the store"
                break
            if replaces:
                self._write(directory, [[new]], overwrite=True)
                self._assert_holds(directory, new)
                assert self.leftovers(directory) == [], f"died at operation {number}"
        else:
            raise AssertionError("200 operations, and no end")
        assert seen_new
        assert seen_old or not replaces

    def _dies(self, directory: Path, number: int, story: Sequence[Sequence[pa.Table]], *, overwrite: bool) -> bool:
        """Whether the run died of operation `number`; False: it has fewer."""
        try:
            with self.dying(directory, number):
                self._write(directory, story, overwrite=overwrite)
        except (SimulatedCrash, TidemillError):
            return True
        return False

    def _write(self, directory: Path, story: Sequence[Sequence[pa.Table]], *, overwrite: bool = False) -> OutputManifest:
        """What jobs do, with all ranks in this process."""
        outputs = [self.make(directory, overwrite=overwrite) for _ in story]
        schema = next((table.schema for tables in story for table in tables), None)
        try:
            outputs[0].check(schema)
            for output, tables in zip(outputs, story, strict=True):
                for table in tables:
                    output.write(table)
            begun = outputs[0].begin(schema)
            receipts = [output.deliver(begun, rank) for rank, output in enumerate(outputs)]
            assert [receipt["rows"] for receipt in receipts] == [sum(t.num_rows for t in tables) for tables in story]
            manifest = outputs[0].commit(begun, receipts)
            for output in outputs:
                output.settle()
        finally:
            for output in outputs:
                # Of a process that has died nothing reaches the store any more; this frees what it held.
                with suppress(SimulatedCrash):
                    output.abort()
        return manifest

    def _replaces(self, directory: Path) -> bool:
        return self.make(directory).replaces

    def _assert_holds(self, directory: Path, expected: pa.Table) -> None:
        self._assert_same(self.read(directory), expected)

    def _assert_same(self, found: pa.Table | None, expected: pa.Table | None) -> None:
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.to_pylist() == expected.to_pylist()

    def _same(self, found: pa.Table, expected: pa.Table) -> bool:
        return bool(found.to_pylist() == expected.to_pylist())
