"""A step's evaluation, as a later job looks it up."""

from __future__ import annotations

from pathlib import Path

from tidemill.checkpoint.best import evaluation_of, record_evaluation
from tidemill.contracts import layout
from tidemill.storage.backends.local import LocalStorage


def test_the_last_evaluation_of_the_step_counts_without_what_is_undefined(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert evaluation_of(storage, 10) == {}
    for line in (b'{"global_step": 10, "auc": 0.5}\n', b'{"global_step": 10, "auc": 0.7, "grouped_auc": null}\n'):
        record_evaluation(storage, line)
    record_evaluation(storage, b'{"global_step": 20, "auc": 0.9}\n')
    assert evaluation_of(storage, 10) == {"auc": 0.7}
    assert evaluation_of(storage, 11) == {}


def test_lines_that_are_no_evaluations_are_passed_over(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write(layout.BEST_EVALUATIONS, b'{"global_step": 10, "auc": 0.7}\n[1]\n{"global_st')
    assert evaluation_of(storage, 10) == {"auc": 0.7}
