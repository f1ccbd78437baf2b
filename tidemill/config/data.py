"""Where rows come from (tzrec's data.proto), and what it lacks: Kafka, event time, event ids, the hash."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from tidemill.config.base import Config, Positive, Seconds, Share, Threads, Unsigned, later, not_yet, without_effect
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.config.messages import DeadLetterConfig, SchemaRegistryConfig
from tidemill.config.sampler import (
    HardNegativeSampler,
    HardNegativeSamplerV2,
    NegativeSampler,
    NegativeSamplerV2,
    TDMSampler,
)

DatasetType = Literal["OdpsDataset", "ParquetDataset", "CsvDataset", "OdpsDatasetV1", "KafkaDataset", "FolderDataset"]
SOURCE_KINDS: dict[str, str] = {
    "ParquetDataset": "parquet",
    "CsvDataset": "csv",
    "KafkaDataset": "kafka",
    "FolderDataset": "folder",
    "OdpsDataset": "maxcompute",
}
"""dataset_type -> kind of source; others come later."""

FieldType = Literal[
    "INT32",
    "INT64",
    "STRING",
    "FLOAT",
    "DOUBLE",
    "ARRAY_INT32",
    "ARRAY_INT64",
    "ARRAY_STRING",
    "ARRAY_FLOAT",
    "ARRAY_DOUBLE",
    "ARRAY_ARRAY_INT32",
    "ARRAY_ARRAY_INT64",
    "ARRAY_ARRAY_STRING",
    "ARRAY_ARRAY_FLOAT",
    "ARRAY_ARRAY_DOUBLE",
    "MAP_STRING_INT32",
    "MAP_STRING_INT64",
    "MAP_STRING_STRING",
    "MAP_STRING_FLOAT",
    "MAP_STRING_DOUBLE",
    "MAP_INT64_INT32",
    "MAP_INT64_INT64",
    "MAP_INT64_STRING",
    "MAP_INT64_FLOAT",
    "MAP_INT64_DOUBLE",
    "MAP_INT32_INT32",
    "MAP_INT32_INT64",
    "MAP_INT32_STRING",
    "MAP_INT32_FLOAT",
    "MAP_INT32_DOUBLE",
]
FgMode = Literal["FG_NONE", "FG_NORMAL", "FG_DAG", "FG_BUCKETIZE"]


class InputField(Config):
    """One column of the input."""

    input_name: str
    """Name of the column."""
    input_type: FieldType | None = None
    """Type of the column; inferred if not given."""


class KafkaConfig(Config):
    """Kafka topics as the source of rows. Partitions are assigned by position, never by a consumer group."""

    brokers: str
    """`host:port`, several separated by commas."""
    topic: tuple[str, ...] = Field(min_length=1)
    """Name of the topic; several, all of the same columns, as a list or separated by commas."""
    group_id: str = ""
    """The group that the cluster sees; one a lineage. If given, the offsets of committed checkpoints are committed under it, for
    dashboards only: positions are in checkpoints."""
    start_timestamp_ms: Unsigned | None = None
    """Start at the first message at or after this broker time, when no checkpoint says where; at the end if there is none."""
    end_timestamp_ms: Unsigned | None = None
    """Stop before the first message at or after this broker time, which must have passed; the run ends when all partitions have
    reached it."""
    end_offsets: dict[str, Unsigned] = Field(default_factory=dict)
    """Stop before these offsets: `topic:partition` -> offset, for every partition."""
    message_format: Literal["json", "arrow", "avro", "protobuf"] = "json"
    """`json`: an object, or an array of objects, a message; `arrow`: an Arrow IPC stream a message, or record batches without a
    schema (then `schema_file` has it); `avro` and `protobuf`: one row a message."""
    schema_file: str = ""
    """The messages' schema, if no registry has it: `.avsc` for Avro, a compiled descriptor set for Protobuf, an Arrow file or
    stream for record batches without a schema."""
    message_type: str = ""
    """Full name of the Protobuf message in `schema_file` that is a row; not needed if there is only one."""
    schema_registry: SchemaRegistryConfig | None = None
    """The registry that has the messages' schemas (JSON, Avro and Protobuf)."""
    max_wait_s: Seconds = 0.05
    """Longest wait for a full batch; a shorter one is trained then."""
    idle_timeout_s: Seconds = 10.0
    """A partition that has been read to its end and had no messages for so long is idle, and doesn't hold back the watermark."""
    discovery_interval_s: Seconds = 30.0
    """How often a running job looks for new partitions; each rank reads its own from their beginning."""
    max_poison: Unsigned = 100
    """How many messages and rows that can't be used are skipped, among any `poison_window` in a row, before the run fails."""
    poison_window: Positive = 1_000_000
    """Over how many rows the skipped ones are counted, on each rank."""
    on_schema_error: Literal["fail", "skip"] = "fail"
    """What to do when a message's schema lacks a needed column, or has it with a type that doesn't fit: fail, or count the message
    among the poisoned ones."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """Where messages and rows go that can't be used."""
    on_data_loss: Literal["fail", "earliest"] = "fail"
    """What to do when messages expired before they were read, or their topic was deleted and made anew: fail, or go on with the
    earliest that is left (of a new topic, in the next run)."""
    connect_timeout_s: Seconds = 30.0
    """How long to try to reach the cluster at the start."""
    outage_timeout_s: Seconds = 300.0
    """How long a running job waits for a cluster that can't be reached."""
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further librdkafka settings by their dotted names (`security.protocol`, `sasl.password`, ...)."""

    @field_validator("topic")
    @classmethod
    def _one_by_one(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(name.strip() for text in topics for name in text.split(","))
        if not all(names):
            raise ValueError("a topic without a name")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"topic {twice!r} is named twice")
        return names


class FolderConfig(Config):
    """How a folder is read as a stream: each file that appears in it, once, in the order of their names."""

    pattern: str = "*.parquet"
    """Names of the files, in the folder and those below it; Arrow files end in .arrow, .ipc or .feather."""
    num_splits: Positive = 4
    """How many parts the files are divided into, by their names. More ranks than this get no rows."""
    poll_s: Seconds = 1.0
    """How often to look for new files."""
    max_wait_s: Seconds = 1.0
    """Longest wait for a full batch; a shorter one is trained then."""
    idle_timeout_s: Seconds = 10.0
    """A part without rows for so long is idle, and doesn't hold back the watermark."""
    incomplete_timeout_s: Seconds = 60.0
    """How long a file may be there that can't be read yet."""
    max_poison: Unsigned = 100
    """How many rows that can't become examples are skipped, among any `poison_window` in a row, before the run fails."""
    poison_window: Positive = 1_000_000
    """Over how many rows the skipped ones are counted, on each rank."""
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    """Where rows go that can't be used: a file; there is no topic."""
    outage_timeout_s: Seconds = 300.0
    """How long a running job waits for a store that can't be reached."""


class EventTimeConfig(Config):
    """When a row happened."""

    column: str = ""
    """Column with the event time, in Unix seconds; empty: the message's timestamp (Kafka), or none (files)."""
    max_future_s: Seconds = 300.0
    """Times further ahead of the clock than this are counted and ignored."""


class HashConfig(Config):
    """How strings become bucket numbers. Never to change within a model's life."""

    function: Literal["std", "farm"] = "std"
    """`std`: tzrec's default (64-bit `std::hash` of libstdc++); `farm`: FarmHash Fingerprint64."""


class DataConfig(Config):
    """Input columns, labels, batches, and how columns become features."""

    oneofs: ClassVar = {
        "sampler": (
            "negative_sampler",
            "negative_sampler_v2",
            "hard_negative_sampler",
            "hard_negative_sampler_v2",
            "tdm_sampler",
        )
    }

    batch_size: Positive = 1024
    """Rows in a batch of one rank."""
    dataset_type: DatasetType
    """ParquetDataset, CsvDataset, KafkaDataset, FolderDataset or OdpsDataset (OdpsDatasetV1 comes later)."""
    fg_encoded: bool | None = None
    """Old switch; if given it overrides fg_mode (true: FG_NONE; false: FG_DAG if fg_threads > 0, else FG_NORMAL)."""
    fg_encoded_multival_sep: str = "\x03"
    """Separator of several values in a string column that's encoded already (FG_NONE)."""
    label_fields: tuple[str, ...] = ()
    """Columns with labels; the first is the label of a single-task model."""
    num_workers: Unsigned = without_effect("reading runs in threads; see reader_threads and transform_threads", 8)
    """Processes that read."""
    pin_memory: bool = later(True)
    """Use pinned memory for copies to the device."""
    input_fields: tuple[InputField, ...] = ()
    """Columns to read, with types; all that are needed if none are given."""
    delimiter: str = ","
    """Separator of columns (CSV): one ASCII character."""
    with_header: bool = False
    """The first line of each CSV file names its columns; if not, input_fields name all of them."""
    eval_batch_size: Positive | None = None
    """Rows in a batch of the evaluation; batch_size if not given."""
    drop_remainder: bool = False
    """Leave out the rows at the end of a rank's share that don't fill a batch, in each pass of training."""
    fg_threads: Unsigned = without_effect("features are computed by one plan a batch", 1)
    """Threads of the feature computation."""
    is_orderby_partition: bool = False
    """Read the partitions of a table one after the other, in the order in which they are written (MaxCompute)."""
    odps_data_quota_name: str = "pay-as-you-go"
    """The quota that reading and writing tables is charged to (MaxCompute)."""
    sample_mask_prob: Share = later(0.0)
    """Probability of leaving out a feature that's marked use_mask."""
    negative_sample_mask_prob: Share = later(0.0)
    """The same for sampled negatives."""
    force_base_data_group: bool = later(False)
    """Put features of sampled negatives with the others."""
    sample_weight_fields: tuple[str, ...] = ()
    """Columns that can serve as weights of rows, in the loss and in metrics; a single-task model uses the first. Numbers, not
    negative."""
    fg_mode: FgMode = "FG_NONE"
    """FG_NONE: columns are features already. FG_DAG: features are computed from the columns (FG_NORMAL means the same)."""
    shuffle: bool = False
    """Shuffle files, and rows within blocks, in training; in another order each pass. The seed is train_config.runtime.seed. A
    stream is read in its own order."""
    shuffle_buffer_size: Positive = 32
    """Batches of a block whose rows are shuffled."""
    odps_data_compression: Literal["LZ4_FRAME", "ZSTD", "UNCOMPRESSED"] = "LZ4_FRAME"
    """Compression on the wire (MaxCompute)."""
    sample_cost_field: str = ""
    """Column with the cost of a row, a number."""
    batch_cost_size: Unsigned | None = None
    """Most cost in a training batch, of batch_size rows at most; a row that alone costs more is a batch of its own. 0: no
    limit."""
    input_fields_str: str = ""
    """input_fields in short: `name:TYPE;name:TYPE`."""
    in_order: bool = True
    """Train batches in the order of the rows. If not, whichever is ready first comes first: each row still once, but no run
    repeats another. A stream's are always in order."""
    reader_threads: Threads = 1
    """Threads of a rank that read files or tables, each a stretch of the rank's rows of its own. A stream is read by one."""
    transform_threads: Threads = 1
    """Threads of a rank that compute features."""
    kafka: KafkaConfig | None = None
    """The topic, if dataset_type is KafkaDataset and the input path isn't a `kafka://` address."""
    folder: FolderConfig = FolderConfig()
    """How the folder that train_input_path names is read, if dataset_type is FolderDataset."""
    maxcompute: MaxComputeConfig = MaxComputeConfig()
    """How tables are read, if dataset_type is OdpsDataset; or a path is an `odps://` address."""
    event_time: EventTimeConfig = EventTimeConfig()
    """Where event times come from."""
    id_column: str = ""
    """Column with the event's id; if given, a run logs each row's score as it was before the row was trained on."""
    log_columns: tuple[str, ...] = ()
    """Further columns that the score log holds beside each row's score, untouched."""
    hash: HashConfig = HashConfig()
    """How strings become bucket numbers."""

    negative_sampler: NegativeSampler | None = not_yet()
    """Weighted negatives that aren't in the batch."""
    negative_sampler_v2: NegativeSamplerV2 | None = not_yet()
    """Negatives without the user's positives."""
    hard_negative_sampler: HardNegativeSampler | None = not_yet()
    """Negatives with hard ones."""
    hard_negative_sampler_v2: HardNegativeSamplerV2 | None = not_yet()
    """Both."""
    tdm_sampler: TDMSampler | None = not_yet()
    """Negatives of a tree."""

    @property
    def source_kind(self) -> str:
        """Kind of the source: `parquet`, `kafka`."""
        return SOURCE_KINDS[self.dataset_type]

    @property
    def mode(self) -> Literal["FG_NONE", "FG_DAG", "FG_BUCKETIZE"]:
        """fg_mode with the old switch applied."""
        if self.fg_encoded is not None:
            return "FG_NONE" if self.fg_encoded else "FG_DAG"
        return "FG_DAG" if self.fg_mode == "FG_NORMAL" else self.fg_mode

    @property
    def columns(self) -> dict[str, FieldType | None]:
        """Declared columns and their types, from input_fields or input_fields_str; empty if none are declared."""
        if self.input_fields:
            return {field.input_name: field.input_type for field in self.input_fields}
        return parse_columns(self.input_fields_str)


def parse_columns(text: str) -> dict[str, Any]:
    """`name:TYPE;name:TYPE` -> {name: type}. BIGINT means INT64, INT means INT32. Raises ValueError naming the part."""
    aliases = {"BIGINT": "INT64", "INT": "INT32"}
    known: tuple[str, ...] = FieldType.__args__  # type: ignore[attr-defined]
    columns: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, kind = (piece.strip() for piece in part.partition(":"))
        kind = aliases.get(kind.upper(), kind.upper())
        if not name or kind not in known or name in columns:
            raise ValueError(f"{part!r} isn't name:TYPE with a known type, once a name")
        columns[name] = kind
    return columns
