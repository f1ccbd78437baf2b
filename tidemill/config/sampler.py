"""Samplers of negatives (tzrec's sampler.proto); known by name, their function comes later."""

from __future__ import annotations

from typing import Literal

from tidemill.config.base import Config, Positive, Share, Unsigned


class Sampler(Config):
    """What all samplers share."""

    attr_fields: tuple[str, ...] = ()
    """Attributes of an item, in the order of the table."""
    item_id_field: str
    """Column with the item's id."""
    attr_delimiter: str = ":"
    """Separator of the attributes."""
    num_eval_sample: Unsigned = 0
    """Negatives in evaluation (0: as in training)."""
    field_delimiter: str = ""
    """Separator of the columns of local files."""


class NegativeSampler(Sampler):
    """Weighted negatives that aren't in the batch."""

    input_path: str
    """Table of the items."""
    num_sample: Positive
    """Negatives a batch."""
    item_id_delim: str = ";"
    """Separator when the id column holds several ids."""


class NegativeSamplerV2(Sampler):
    """Negatives without the user's positives."""

    user_input_path: str
    """Table of the users."""
    item_input_path: str
    """Table of the items."""
    pos_edge_input_path: str
    """Positive edges."""
    num_sample: Positive
    """Negatives a batch."""
    user_id_field: str
    """Column with the user's id."""


class HardNegativeSampler(Sampler):
    """Negatives with hard ones."""

    user_input_path: str
    """Table of the users."""
    item_input_path: str
    """Table of the items."""
    hard_neg_edge_input_path: str
    """Hard negative edges."""
    num_sample: Positive
    """Negatives a batch."""
    num_hard_sample: Unsigned
    """Most hard negatives a user."""
    user_id_field: str
    """Column with the user's id."""


class HardNegativeSamplerV2(HardNegativeSampler):
    """Hard negatives, without the user's positives."""

    pos_edge_input_path: str
    """Positive edges."""


class TDMSampler(Sampler):
    """Negatives of a tree."""

    item_input_path: str
    """Table of the items."""
    edge_input_path: str
    """Edges from child to ancestor."""
    predict_edge_input_path: str
    """Edges from parent to child."""
    layer_num_sample: tuple[Unsigned, ...] = ()
    """Negatives of each layer."""
    remain_ratio: Share = 1.0
    """Share of the middle layers that's kept."""
    probability_type: Literal["UNIFORM", "ARITHMETIC", "RECIPROCAL"] = "UNIFORM"
    """How layers are kept."""
