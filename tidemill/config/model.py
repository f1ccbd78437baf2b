"""Model, feature groups, losses, metrics, and the messages that several models share (MLP, towers)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny

from tidemill.config.base import Config, Positive, Share, Unsigned, later, not_yet, without_effect


class MLP(Config):
    """Fully connected layers."""

    hidden_units: tuple[Positive, ...] = ()
    """Widths of the layers."""
    dropout_ratio: tuple[Share, ...] = ()
    """None, one for all layers, or one for each layer."""
    activation: str = "nn.ReLU"
    """Activation: a class of torch.nn (`nn.ReLU`) or one of ours (`Dice`)."""
    use_bn: bool = False
    """Batch normalization before the activation."""
    bias: bool = True
    """Bias of the linear layers (off with batch normalization)."""
    use_ln: bool = False
    """Layer normalization before the activation."""


class Tower(Config):
    """An MLP on one feature group."""

    input: str
    """Name of the feature group."""
    mlp: MLP | None = None
    """The layers; none means the group's vector itself."""


class DINTower(Config):
    """Attention of a query over a sequence (deep interest network, arXiv:1706.06978)."""

    input: str
    """Name of a SEQUENCE group."""
    attn_mlp: MLP
    """Scores one step from [query, key, query - key, query * key]."""


class DINEncoder(Config):
    """Attention of the query features over a nested sequence group."""

    name: str = ""
    """Name of the encoder."""
    input: str
    """Name of the nested sequence group."""
    attn_mlp: MLP
    """Scores one step."""
    max_seq_length: Unsigned = 0
    """Keep the first so many steps (0: all)."""


class SimpleAttention(Config):
    """Softmax of query * key."""

    name: str = ""
    """Name of the encoder."""
    input: str
    """Name of the nested sequence group."""
    max_seq_length: Unsigned = 0
    """Keep the first so many steps (0: all)."""


class PoolingEncoder(Config):
    """Mean or sum over the steps."""

    name: str = ""
    """Name of the encoder."""
    input: str
    """Name of the nested sequence group."""
    pooling_type: Literal["mean", "sum"] = "mean"
    """mean or sum."""
    max_seq_length: Unsigned = 0
    """Keep the first so many steps (0: all)."""


class SelfAttentionEncoder(Config):
    """Multi-head self-attention, then the mean over the steps."""

    name: str = ""
    """Name of the encoder."""
    input: str
    """Name of the nested sequence group."""
    multihead_attn_dim: Positive = 512
    """Width."""
    num_heads: Positive = 8
    """Heads."""
    dropout: Share = 0.0
    """Dropout of the attention."""
    max_seq_length: Unsigned = 0
    """Keep the first so many steps (0: all)."""


class MultiWindowDINEncoder(Config):
    """DIN scores, averaged within consecutive windows."""

    name: str = ""
    """Name of the encoder."""
    input: str
    """Name of the nested sequence group."""
    attn_mlp: MLP
    """Scores one step."""
    windows_len: tuple[Positive, ...] = ()
    """Lengths of the windows, most recent first."""


class SeqEncoderConfig(Config):
    """One encoder of a nested sequence group."""

    oneofs: ClassVar = {
        "seq_module": (
            "din_encoder",
            "simple_attention",
            "pooling_encoder",
            "multi_window_din_encoder",
            "self_attention_encoder",
        )
    }

    din_encoder: DINEncoder | None = None
    """Attention of a query."""
    simple_attention: SimpleAttention | None = None
    """Softmax of query * key."""
    pooling_encoder: PoolingEncoder | None = None
    """Mean or sum."""
    multi_window_din_encoder: MultiWindowDINEncoder | None = None
    """DIN over windows."""
    self_attention_encoder: SelfAttentionEncoder | None = None
    """Self-attention."""


class SeqGroupConfig(Config):
    """A sequence nested in a DEEP group."""

    group_name: str = ""
    """Name that encoders refer to; needed when there is more than one."""
    feature_names: tuple[str, ...] = ()
    """Query features and sequence features."""
    embedding_name_suffix: str = ""
    """Appended to the names of the tables, so that this group has tables of its own."""


class FeatureGroupConfig(Config):
    """Features that a model takes as one input."""

    group_name: str
    """Name that the model refers to."""
    feature_names: tuple[str, ...] = ()
    """Features, in the order in which they are concatenated."""
    group_type: Literal["DEEP", "WIDE", "SEQUENCE", "JAGGED_SEQUENCE"] = "DEEP"
    """DEEP: one concatenated vector. WIDE: one small vector a feature. SEQUENCE: query and padded sequence."""
    sequence_groups: tuple[SeqGroupConfig, ...] = not_yet(())
    """Sequences nested in a DEEP group."""
    sequence_encoders: tuple[SeqEncoderConfig, ...] = not_yet(())
    """Encoders that turn nested sequences into vectors, appended to the group."""
    embedding_name_suffix: str = not_yet("")
    """Appended to the names of the tables, so that this group has tables of its own."""


class BinaryCrossEntropy(Config):
    """Cross entropy on one logit."""

    label_smoothing: Share = later(0.0)
    """Amount of smoothing."""


class SoftmaxCrossEntropy(Config):
    """Cross entropy over classes."""

    label_smoothing: Share = 0.0
    """Amount of smoothing."""


class L2Loss(Config):
    """Squared error."""


class JRCLoss(Config):
    """Joint ranking and calibration (arXiv:2208.06164)."""

    session_name: str
    """Feature whose equality makes a session."""
    alpha: Share = 0.5
    """Weight of the cross entropy against the session term."""


class BinaryFocalLoss(Config):
    """Cross entropy weighted towards hard rows (arXiv:1708.02002)."""

    gamma: float = 2.0
    """Focusing exponent."""
    alpha: Share = 0.5
    """Weight of the positive class."""


class SidReconLoss(Config):
    """Reconstruction loss of semantic ids."""

    recon_type: Literal["l2", "l1", "cos"] = "l2"
    """Distance."""


class SidCommitmentLoss(Config):
    """Commitment loss of semantic ids."""

    latent_weight: tuple[float, ...] = ()
    """[encoder to code, code to encoder]; 1 and 0.5 if none are given."""
    commitment_type: Literal["l2", "l1", "cos"] = "l2"
    """Distance."""


class SidContrastiveLoss(Config):
    """Contrastive loss of semantic ids."""


class LossConfig(Config):
    """One loss; several are added up."""

    oneofs: ClassVar = {
        "loss": (
            "binary_cross_entropy",
            "softmax_cross_entropy",
            "l2_loss",
            "jrc_loss",
            "binary_focal_loss",
            "recon_loss",
            "commitment_loss",
            "contrastive_loss",
        )
    }

    binary_cross_entropy: BinaryCrossEntropy | None = None
    """Cross entropy on one logit."""
    softmax_cross_entropy: SoftmaxCrossEntropy | None = not_yet()
    """Cross entropy over classes."""
    l2_loss: L2Loss | None = not_yet()
    """Squared error."""
    jrc_loss: JRCLoss | None = not_yet()
    """Joint ranking and calibration."""
    binary_focal_loss: BinaryFocalLoss | None = not_yet()
    """Focal loss."""
    recon_loss: SidReconLoss | None = not_yet()
    """Reconstruction of semantic ids."""
    commitment_loss: SidCommitmentLoss | None = not_yet()
    """Commitment of semantic ids."""
    contrastive_loss: SidContrastiveLoss | None = not_yet()
    """Contrastive loss of semantic ids."""


class AUC(Config):
    """Area under the ROC curve, binned."""

    thresholds: Positive = 200
    """Number of thresholds."""


class MulticlassAUC(Config):
    """Area under the ROC curve, one class against the rest."""

    thresholds: Positive = 200
    """Number of thresholds."""
    average: Literal["macro", "weighted"] = "macro"
    """How classes are averaged."""


class RecallAtK(Config):
    """Share of rows whose positive is among the first K."""

    top_k: Positive = 5
    """K."""


class MeanAbsoluteError(Config):
    """Mean absolute error."""


class MeanSquaredError(Config):
    """Mean squared error."""


class Accuracy(Config):
    """Share of rows classified rightly."""

    threshold: Share = 0.5
    """Cut of the probability."""
    top_k: Positive = 1
    """K, with several classes."""


class GroupedAUC(Config):
    """Unweighted mean of the exact AUC over groups that hold both classes."""

    grouping_key: str
    """An id feature with exactly one id a row."""


class XAUC(Config):
    """Share of sampled pairs in the right order."""

    sample_ratio: Share = 0.001
    """Share of the pairs that is sampled."""
    max_pairs: Unsigned = 0
    """Bound on the pairs (0: none)."""
    in_batch: bool = False
    """Pairs within a batch only."""


class GroupedXAUC(Config):
    """XAUC within groups."""

    grouping_key: str
    """An id feature with exactly one id a row."""
    max_pairs_per_group: Positive = 100
    """Bound on the pairs of a group."""


class NormalizedEntropy(Config):
    """Cross entropy over that of the mean label."""

    eta: float = Field(default=1e-12, gt=0)
    """Clamp of the mean label."""


_METRICS = (
    "auc",
    "multiclass_auc",
    "recall_at_k",
    "mean_absolute_error",
    "mean_squared_error",
    "accuracy",
    "grouped_auc",
    "xauc",
    "grouped_xauc",
    "normalized_entropy",
)


class MetricConfig(Config):
    """One metric of the evaluation."""

    oneofs: ClassVar = {"metric": _METRICS}

    auc: AUC | None = None
    """Area under the ROC curve."""
    multiclass_auc: MulticlassAUC | None = not_yet()
    """AUC over classes."""
    recall_at_k: RecallAtK | None = not_yet()
    """Recall of matching models."""
    mean_absolute_error: MeanAbsoluteError | None = not_yet()
    """Mean absolute error."""
    mean_squared_error: MeanSquaredError | None = not_yet()
    """Mean squared error."""
    accuracy: Accuracy | None = not_yet()
    """Accuracy."""
    grouped_auc: GroupedAUC | None = None
    """AUC within groups."""
    xauc: XAUC | None = not_yet()
    """Share of pairs in the right order."""
    grouped_xauc: GroupedXAUC | None = not_yet()
    """XAUC within groups."""
    normalized_entropy: NormalizedEntropy | None = None
    """Normalized entropy."""


class TrainMetricConfig(Config):
    """One running metric of the training, with exponential decay."""

    oneofs: ClassVar = {"metric": ("auc", "recall_at_k", "mean_absolute_error", "mean_squared_error", "accuracy", "xauc")}

    auc: AUC | None = None
    """Area under the ROC curve."""
    recall_at_k: RecallAtK | None = None
    """Recall of matching models."""
    mean_absolute_error: MeanAbsoluteError | None = None
    """Mean absolute error."""
    mean_squared_error: MeanSquaredError | None = None
    """Mean squared error."""
    accuracy: Accuracy | None = None
    """Accuracy."""
    xauc: XAUC | None = None
    """Share of pairs in the right order."""
    decay_rate: Share = 0.9
    """Decay of the running state."""
    decay_step: Positive = 100
    """Steps from one decay to the next."""


class VariationalDropout(Config):
    """Learned dropout per feature."""

    regularization_lambda: float = Field(default=0.01, ge=0)
    """Weight of the penalty."""
    embedding_wise_variational_dropout: bool = without_effect("dropout is learned per feature", False)
    """Learn one rate for each element."""


class ModelConfig(Config):
    """The model: its inputs, its kind with the fields of that kind, its losses and metrics.

    The kind is the key of the model's own section (`multi_tower_din: {...}`).
    """

    kind_family: ClassVar[str] = "model"

    feature_groups: tuple[FeatureGroupConfig, ...] = ()
    """Inputs of the model."""
    kind: str
    config: SerializeAsAny[Config]
    num_class: Positive = 1
    """1: one logit (click or not, or a regression); more: softmax."""
    losses: tuple[LossConfig, ...] = ()
    """Losses, added up."""
    metrics: tuple[MetricConfig, ...] = ()
    """Metrics of the evaluation."""
    train_metrics: tuple[TrainMetricConfig, ...] = later(())
    """Running metrics of the training."""
    variational_dropout: VariationalDropout | None = later()
    """Learned dropout per feature."""
    kernel: Literal["TRITON", "PYTORCH", "CUTLASS"] = later("PYTORCH")
    """Attention kernel of the HSTU family."""
    use_pareto_loss_weight: bool = later(False)
    """Weigh the losses of several tasks by Pareto optimization."""
