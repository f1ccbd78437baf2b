"""Training, evaluation, export (tzrec's train, eval and export.proto), and what it lacks: rounds, publication, hand-over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from tidemill.clock import event_time
from tidemill.config.base import Config, Positive, Seconds, Threads, Unsigned, later, without_effect
from tidemill.config.feature import ParameterConstraints
from tidemill.config.optimizer import DenseOptimizer, SparseOptimizer


class GradScaler(Config):
    """Scaling of the loss (FP16)."""

    init_scale: float = 65536.0
    """Scale at the start."""
    growth_factor: float = 2.0
    """Growth after good steps."""
    backoff_factor: float = 0.5
    """Shrinking after an overflow."""
    growth_interval: Positive = 2000
    """Good steps before growth."""


class GradClipping(Config):
    """Clipping of dense gradients."""

    clipping_type: Literal["none", "norm", "value"] = "none"
    """none, norm or value."""
    max_gradient: float = Field(default=1.0, gt=0)
    """Bound."""
    norm_type: float = Field(default=2.0, gt=0)
    """p of the norm."""
    enable_global_grad_clip: bool = without_effect("dense gradients are equal on all ranks", False)
    """Take the norm over all ranks."""


class FeatureStoreConfig(Config):
    """The cloud's feature store."""

    region: str
    """Region."""
    project_name: str
    """Project."""
    feature_view_name: str
    """View; made if it is missing."""
    version: str
    """Version of this run."""
    endpoint: str = ""
    """Address, if it isn't the region's."""
    upload_batch_size: Positive = 1000
    """Records of a flush."""
    max_retries: Unsigned = 3
    """Attempts of a dump."""
    retry_backoff_secs: Unsigned = 5
    """Pause between attempts."""
    shutdown_timeout_secs: Unsigned = 600
    """Time to drain at the end."""
    max_pending_steps: Positive = 32
    """Dumps that may wait."""
    poll_interval_secs: Positive = 1
    """Period of polling the queue."""
    feature_view_ttl_secs: Unsigned = 1296000
    """Lifetime of the records."""
    feature_view_shard_count: Positive = 20
    """Shards, if the view is made."""
    feature_view_replication_count: Positive = 1
    """Replicas, if the view is made."""
    retain_local_dump: bool = False
    """Keep files too."""
    upload_format: Literal["ARROW", "JSON"] = "ARROW"
    """ARROW or JSON."""


class DeltaEmbeddingDumpConfig(Config):
    """tzrec's dump of changed rows."""

    dump_interval_steps: Unsigned = 1000
    """Steps from one dump to the next."""
    output_dir: str = ""
    """Folder."""
    file_prefix: str = "delta_embedding"
    """Prefix of the files."""
    feature_store_config: FeatureStoreConfig | None = None
    """Upload too."""
    dump_interval_minutes: Unsigned | None = None
    """Minutes from one dump to the next."""
    quant_type: Literal["DELTA_EMBEDDING_QUANT_NONE", "DELTA_EMBEDDING_QUANT_INT8"] = "DELTA_EMBEDDING_QUANT_NONE"
    """Quantization."""


class QualityConfig(Config):
    """When a stream's own progressive metrics pause its publication: by how much a window may be worse than the good windows before
    it, and than the daily model's evaluation."""

    min_events: Positive = 10000
    """A window (progressive_window_s) with fewer rows says nothing."""
    auc: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """By so much its AUC may be lower."""
    normalized_entropy: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """By so much its normalized entropy may be higher."""
    calibration: float = Field(default=0.3, ge=0, allow_inf_nan=False)
    """By so much its calibration (sum of scores over sum of labels) may differ."""
    hold_s: Seconds = 7200.0
    """Event time for which windows must all be good before publication goes on. A model may learn a poison, and look good while it
    lasts: hold for longer than what is to be sat out."""
    reference_windows: Positive = 24
    """How many of the newest good windows make the reference."""
    daily_model_share: float = Field(default=0.05, ge=0, le=0.5, allow_inf_nan=False)
    """For how much of rank 0's time a thread may score its batches with the base snapshot, which windows are compared with
    on the same events. 0: not at all."""


class PublishConfig(Config):
    """Publication of releases while training: changed rows and dense weights. Off unless an interval is given."""

    interval_s: Seconds | None = None
    """Seconds from one release to the next."""
    interval_steps: Positive | None = None
    """Steps from one release to the next."""
    part_timeout_s: Seconds = 60.0
    """How long the publisher waits for all ranks' parts of a release before it gives that release up."""
    quality: QualityConfig | None = None
    """Pause publication when a window is bad, until they have been good for a while. Not given: publish whatever comes."""

    @property
    def enabled(self) -> bool:
        """Whether this run publishes."""
        return self.interval_s is not None or self.interval_steps is not None


class HealthConfig(Config):
    """How much worse a successor may be, on the events that both lineages have scored before training on them."""

    min_events: Positive = 10000
    """Over so many events at least; the newest windows (progressive_window_s) that both have are taken."""
    auc: float = Field(default=0.005, ge=0, allow_inf_nan=False)
    """By so much its AUC may be lower."""
    normalized_entropy: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """By so much its normalized entropy may be higher."""
    calibration: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """By so much its calibration (sum of scores over sum of labels) may lie further from 1."""


class HandoverConfig(Config):
    """When this stream job retires in favour of the one built on the next day. Off unless a successor is named."""

    successor_dir: str = ""
    """The successor's model_dir. Environment: ONLINE_LEARNING_SUCCESSOR_DIR."""
    policy: Literal["caught_up", "served", "healthy"] = "served"
    """`caught_up`: retire once the successor trails by no more than the tolerance (what the environment variable alone
    means). `served`: go on training until the servers confirm that they serve the successor. `healthy`: as `served`, but only a
    successor that is not worse on the same events (`health`) is marked for serving."""
    health: HealthConfig = HealthConfig()
    """With `healthy`: what counts as worse."""
    tolerance_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    """Event time by which the successor may trail. Environment: ONLINE_LEARNING_HANDOVER_TOLERANCE_SECS."""
    confirm_timeout_s: Seconds = 600.0
    """With `served` and `healthy`: how long to wait for the confirmation before raising the alarm; training goes on."""
    report_interval_s: Seconds | None = None
    """Seconds from one progress report (and check) to the next; every log_step_count_steps, and at least each second, if not
    given."""


class LineageConfig(Config):
    """Where a day's table ends and its stream begins."""

    boundary: float | None = Field(default=None, allow_inf_nan=False)
    """Event time (Unix seconds): rows before it belong to the table, the others to the stream. None: the parent's record."""
    start_margin_s: Seconds | None = None
    """The stream starts reading so long before the boundary. None: 0 for broker timestamps, 600 for a column."""

    @field_validator("boundary")
    @classmethod
    def _is_seconds(cls, boundary: float | None) -> float | None:
        return boundary if boundary is None else event_time(boundary)


class RuntimeConfig(Config):
    """Threads, timeouts, seeds, sharding."""

    threads: Threads | None = None
    """Threads of PyTorch; all cores but one if not given."""
    timeout_s: float = Field(default=60.0, gt=0, le=1e6, allow_inf_nan=False)
    """How long a collective may take before the other ranks count as lost."""
    seed: Unsigned = 0
    """Seed of everything random: initial weights, dropout, sampling, shuffling."""
    sharding: Literal["row_wise", "table_wise"] = "row_wise"
    """How embedding tables are spread over the ranks."""


class TrainConfig(Config):
    """The training loop. Give num_steps or num_epochs, not both."""

    sparse_optimizer: SparseOptimizer
    """Optimizer of the embedding tables."""
    dense_optimizer: DenseOptimizer
    """Optimizer of everything else."""
    num_steps: Positive | None = None
    """Steps to train; data is passed over as often as needed."""
    num_epochs: Positive | None = None
    """Passes over the data; 1 for a stream."""
    save_checkpoints_steps: Unsigned = 1000
    """Steps from one checkpoint to the next (0: none)."""
    fine_tune_checkpoint: str = ""
    """Checkpoint to start from, or a folder with checkpoints, whose newest is taken. Parameters are matched by name and shape;
    those that aren't there begin anew, and are named in the log. Its positions aren't taken."""
    fine_tune_ckpt_param_map: str = ""
    """File with `new name TAB old name` lines, for tables and dense parameters that are called otherwise in
    fine_tune_checkpoint."""
    log_step_count_steps: Positive = 100
    """Steps from one log line to the next, and from one hand-over check to the next."""
    is_profiling: bool = later(False)
    """Write a profile."""
    use_tensorboard: bool = later(True)
    """Write TensorBoard events."""
    save_checkpoints_epochs: Positive | None = None
    """Passes from one checkpoint to the next; wins over save_checkpoints_steps."""
    save_checkpoints_secs: Seconds | None = None
    """Seconds from one checkpoint to the next, besides the other triggers."""
    incremental_checkpoints: bool | None = None
    """Write only the rows that have changed since the checkpoint before, as a chain on top of full shards. None: for streams."""
    fold_checkpoints_after: Positive = 10
    """Incremental checkpoints after which their chain is folded, in the background, into new full shards."""
    tensorboard_summaries: tuple[
        Literal["loss", "learning_rate", "parameter", "global_gradient_norm", "gradient_norm", "gradient"], ...
    ] = later(())
    """What goes to TensorBoard."""
    cudnn_allow_tf32: bool = later(True)
    """TF32 in cuDNN."""
    cuda_matmul_allow_tf32: bool = later(False)
    """TF32 in matrix products."""
    global_embedding_constraints: ParameterConstraints | None = later()
    """Limits on how tables are sharded."""
    mixed_precision: Literal["", "BF16", "FP16"] = ""
    """Type of the training pass under autocast; losses, updates and scores stay FP32."""
    grad_scaler: GradScaler | None = None
    """Scaling of the loss, so that FP16 gradients don't vanish; an update whose gradients overflow is left out."""
    gradient_accumulation_steps: Positive | None = None
    """Steps whose dense gradients are averaged into one update. Embedding tables are updated in each step, with their share of
    the average; schedules and checkpoints count steps."""
    grad_clipping: GradClipping | None = None
    """Clipping of dense gradients."""
    keep_checkpoint_max: Unsigned = 0
    """Newest checkpoints to keep (0: all), besides the best one (see exporter_type) and those that another job is reading."""
    save_checkpoints_timestamp_interval: Unsigned = 0
    """Event time, in seconds, from one checkpoint to the next (0: none)."""
    save_checkpoints_timestamps: tuple[Unsigned, ...] = ()
    """Event times at which to save once."""
    save_checkpoints_timestamp_quorum: float = Field(default=0.5, gt=0, le=1)
    """Share of the ranks that must have reached an event time for it to count."""
    delta_embedding_dump_config: DeltaEmbeddingDumpConfig | None = without_effect("use train_config.publish")
    """tzrec's dump of changed rows."""
    steps_per_round: int = Field(default=1, gt=0, le=65536)
    """Steps between two agreements of the ranks; so many that a round lasts 50 ms or more."""
    progressive_window_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Event time, in seconds, of one window of progressive validation. Windows begin at its multiples."""
    progressive_slices: tuple[str, ...] = ()
    """Id features by whose values progressive metrics are told apart too."""
    progressive_slice_values: Positive = 20
    """How many values of each of these features are told apart in a window; the others are one slice."""
    publish: PublishConfig = PublishConfig()
    """Publication of releases while training."""
    handover: HandoverConfig = HandoverConfig()
    """When to retire in favour of a successor."""
    lineage: LineageConfig = LineageConfig()
    """Where the stream begins."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Threads, timeouts, seeds, sharding."""


class EvalConfig(Config):
    """Evaluation."""

    num_steps: Positive | None = None
    """Most steps."""
    log_step_count_steps: Positive = 10
    """Steps from one log line to the next."""
    use_dense_ema: bool | None = None
    """Use the averaged dense weights. None: if they are kept."""


class ExportConfig(Config):
    """Full export."""

    exporter_type: Literal["latest", "best"] = "latest"
    """Which checkpoint to export. With `best`, training evaluates each checkpoint, and keeps the best one besides the newest
    keep_checkpoint_max."""
    best_exporter_metric: str = "auc"
    """Metric that decides what is best: one of model_config.metrics."""
    metric_larger_is_better: bool = True
    """Direction of that metric."""
    mixed_precision: Literal["", "BF16", "FP16"] = later("")
    """Autocast of the exported dense part."""
    cudnn_allow_tf32: bool = later(True)
    """TF32 in cuDNN."""
    cuda_matmul_allow_tf32: bool = later(False)
    """TF32 in matrix products."""
    use_dense_ema: bool | None = None
    """Use the averaged dense weights, in exports and releases. None: if they are kept."""
