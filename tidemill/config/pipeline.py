"""The root of the pipeline config (tzrec's EasyRecConfig)."""

from __future__ import annotations

from pydantic import Field

from tidemill.config.base import Config
from tidemill.config.data import DataConfig, FolderConfig, KafkaConfig
from tidemill.config.feature import FeatureEntry
from tidemill.config.kafka_uri import parse_kafka_uri
from tidemill.config.model import ModelConfig
from tidemill.config.train import EvalConfig, ExportConfig, TrainConfig

COLUMN_START_MARGIN_S = 600.0


class PipelineConfig(Config):
    """One pipeline: data, features, model, training, export. In code, `model` is the section `model_config`."""

    train_input_path: str
    """Training data: paths or globs, separated by commas; the day's table. A stream: `kafka://...`, or
    data_config.kafka, or a folder (a path or URL)."""
    eval_input_path: str
    """Evaluation data; empty: no evaluation."""
    model_dir: str
    """Folder of checkpoints, records and (for a stream) releases."""
    train_config: TrainConfig
    """Training."""
    eval_config: EvalConfig = EvalConfig()
    """Evaluation."""
    export_config: ExportConfig = ExportConfig()
    """Full export."""
    data_config: DataConfig
    """Input columns, labels, batches."""
    feature_configs: tuple[FeatureEntry, ...] = ()
    """One entry a feature."""
    model: ModelConfig = Field(alias="model_config")
    """Feature groups, the model, losses, metrics."""

    @property
    def kafka(self) -> KafkaConfig | None:
        """The topic: data_config.kafka, or what a `kafka://` train_input_path says; None if the source is another."""
        if self.data_config.dataset_type != "KafkaDataset":
            return None
        if self.data_config.kafka is not None:
            return self.data_config.kafka
        return parse_kafka_uri(self.train_input_path)

    @property
    def stream(self) -> KafkaConfig | FolderConfig | None:
        """How the stream is read that training reads; None for data that ends."""
        return self.data_config.folder if self.data_config.dataset_type == "FolderDataset" else self.kafka

    @property
    def start_margin_s(self) -> float:
        """How long before the boundary a stream starts reading."""
        margin = self.train_config.lineage.start_margin_s
        if margin is not None:
            return margin
        return COLUMN_START_MARGIN_S if self.data_config.event_time.column else 0.0
