"""From a config to how training reads and batches its rows."""

from __future__ import annotations

import math

from tidemill.config.pipeline import PipelineConfig
from tidemill.data.loader import ReadPlan
from tidemill.data.rebatch import BatchRule
from tidemill.data.shuffle import Shuffle


def batch_rule(config: PipelineConfig) -> BatchRule:
    """What fills a batch."""
    data = config.data_config
    cost_column, max_cost = (data.sample_cost_field, float(data.batch_cost_size)) if data.batch_cost_size else ("", math.inf)
    return BatchRule(data.batch_size, cost_column, max_cost, data.drop_remainder)


def shuffle_of(config: PipelineConfig, pass_number: int) -> Shuffle | None:
    """The order of one pass over bounded data; None: as the rows lie."""
    data = config.data_config
    if not data.shuffle:
        return None
    return Shuffle(config.train_config.runtime.seed, pass_number, data.batch_size * data.shuffle_buffer_size)


def read_plan(config: PipelineConfig, pass_number: int) -> ReadPlan:
    """How one pass is read."""
    data = config.data_config
    return ReadPlan(data.reader_threads, shuffle_of(config, pass_number), data.in_order)
