"""Optimizers and learning-rate schedules (tzrec's optimizer.proto)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from tidemill.config.base import Config, Positive, Share, Unsigned, later, not_yet


class ConstantLR(Config):
    """The base rate throughout."""


class ExponentialDecayLR(Config):
    """Linear from `warmup_learning_rate` to the base rate, then base * factor^floor((t - warmup) / decay_size)."""

    decay_size: Positive
    """Steps (or passes) per decay."""
    decay_factor: float = Field(default=0.95, gt=0)
    """Factor of each decay."""
    staircase: bool = True
    """Round the exponent down."""
    warmup_learning_rate: float = Field(default=0.0, ge=0)
    """Rate at the start of the warm-up."""
    warmup_size: Unsigned = 0
    """Steps (or passes) of warm-up."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Lower bound after the warm-up."""
    by_epoch: bool = False
    """Count passes instead of steps."""


class ManualStepLR(Config):
    """`learning_rates[i]` once the counter is strictly past `schedule_sizes[i]`; the base rate before the first."""

    schedule_sizes: tuple[Unsigned, ...] = ()
    """Ascending switch points."""
    learning_rates: tuple[float, ...] = ()
    """Rates, one for each switch point."""
    warmup: bool = False
    """Interpolate from the base rate to the first of `learning_rates` before the first switch point."""
    by_epoch: bool = False
    """Count passes instead of steps."""


class CosineAnnealingLR(Config):
    """Half a cosine from the base rate to the minimum over `T_max`, after the warm-up."""

    T_max: Positive
    """Half period, in steps (or passes)."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Rate at the end of the half period."""
    warmup_learning_rate: float = Field(default=0.0, ge=0)
    """Rate at the start of the warm-up."""
    warmup_size: Unsigned = 0
    """Steps (or passes) of warm-up."""
    by_epoch: bool = False
    """Count passes instead of steps."""


class CosineAnnealingWarmRestartsLR(Config):
    """Cosine annealing that restarts; period k lasts T_0 * T_mult^k."""

    T_0: Positive
    """First period, in steps (or passes)."""
    T_mult: Positive = 1
    """Growth of the periods."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """Rate at the end of each period."""
    warmup_learning_rate: float = Field(default=0.0, ge=0)
    """Rate at the start of the warm-up."""
    warmup_size: Unsigned = 0
    """Steps (or passes) of warm-up."""
    by_epoch: bool = False
    """Count passes instead of steps."""


class FusedOptimizer(Config):
    """What the optimizers of embedding tables share; they run inside the backward pass of the lookup."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate; 0 stays 0 under every schedule (frozen tables)."""
    gradient_clipping: bool = False
    """Clip each element of the gradient."""
    max_gradient: float = Field(default=1.0, gt=0)
    """Bound of the clipping."""


class FusedSGDOptimizer(FusedOptimizer):
    """Stochastic gradient descent."""


class FusedAdagradOptimizer(FusedOptimizer):
    """Adagrad with one accumulator per element."""

    initial_accumulator_value: float = Field(default=0.0, ge=0)
    """Accumulators start here."""


class FusedRowWiseAdagradOptimizer(FusedOptimizer):
    """Adagrad with one accumulator per row."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    weight_decay_mode: Literal["NONE", "L2", "DECOUPLE"] = "NONE"
    """How the decay enters: not at all, through the gradient, or past it."""


class FusedAdamOptimizer(FusedOptimizer):
    """Adam and its row-wise and LAMB relatives."""

    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.999
    """Decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class FusedLarsSGDOptimizer(FusedOptimizer):
    """LARS."""

    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class FusedAdadeltaOptimizer(FusedOptimizer):
    """Adadelta."""

    rho: Share = 0.95
    """Decay of the running averages."""
    eps: float = 1e-6
    """Term that keeps the denominator from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class FusedRMSpropOptimizer(FusedOptimizer):
    """RMSprop."""

    alpha: Share = 0.99
    """Decay of the running average."""
    eps: float = 1e-8
    """Term that keeps the denominator from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class SGDOptimizer(Config):
    """Stochastic gradient descent."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    dampening: float = 0.0
    """Dampening of the momentum."""
    nesterov: bool = False
    """Nesterov momentum."""
    fused: bool = later(False)
    """Use the fused kernel."""


class AdagradOptimizer(Config):
    """Adagrad."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    """Accumulators start here."""
    eps: float = 1e-10
    """Term that keeps the denominator from 0."""
    fused: bool = later(False)
    """Use the fused kernel."""


class AdamOptimizer(Config):
    """Adam."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.999
    """Decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    eps: float = 1e-8
    """Term that keeps the denominator from 0."""
    amsgrad: bool = False
    """Use the AMSGrad variant."""
    fused: bool = later(False)
    """Use the fused kernel."""


class AdadeltaOptimizer(Config):
    """Adadelta."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate."""
    rho: Share = 0.95
    """Decay of the running averages."""
    eps: float = 1e-6
    """Term that keeps the denominator from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class RMSpropOptimizer(Config):
    """RMSprop."""

    lr: float = Field(default=0.002, ge=0)
    """Base learning rate."""
    alpha: Share = 0.99
    """Decay of the running average."""
    eps: float = 1e-8
    """Term that keeps the denominator from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""


class EMAConfig(Config):
    """An averaged copy of the dense parameters."""

    decay: Share = 0.999
    """Decay of the average."""


_SCHEDULES = (
    "constant_learning_rate",
    "exponential_decay_learning_rate",
    "manual_step_learning_rate",
    "cosine_annealing_learning_rate",
    "cosine_annealing_warm_restarts_learning_rate",
)
_DENSE = (
    "sgd_optimizer",
    "adagrad_optimizer",
    "adam_optimizer",
    "adamw_optimizer",
    "adadelta_optimizer",
    "rmsprop_optimizer",
)
_SPARSE = (
    "sgd_optimizer",
    "adagrad_optimizer",
    "adam_optimizer",
    "lars_sgd_optimizer",
    "lamb_optimizer",
    "partial_rowwise_lamb_optimizer",
    "partial_rowwise_adam_optimizer",
    "rowwise_adagrad_optimizer",
    "adadelta_optimizer",
    "rmsprop_optimizer",
)


class Scheduled(Config):
    """An optimizer with its learning-rate schedule; no schedule given means a constant rate."""

    oneofs: ClassVar = {"learning_rate": _SCHEDULES}

    constant_learning_rate: ConstantLR | None = None
    """The base rate throughout."""
    exponential_decay_learning_rate: ExponentialDecayLR | None = None
    """Exponential decay after a warm-up."""
    manual_step_learning_rate: ManualStepLR | None = None
    """Rates that switch at given points."""
    cosine_annealing_learning_rate: CosineAnnealingLR | None = None
    """Half a cosine."""
    cosine_annealing_warm_restarts_learning_rate: CosineAnnealingWarmRestartsLR | None = None
    """Half cosines that restart."""

    @property
    def schedule(self) -> tuple[str, Any]:
        """(name of the schedule, its config)."""
        return self.one_of("learning_rate") or ("constant_learning_rate", ConstantLR())

    @property
    def optimizer(self) -> tuple[str, Any]:
        """(name of the optimizer, its config). `check` refuses a config without one."""
        found = self.one_of("optimizer")
        assert found is not None
        return found


class SparseOptimizer(Scheduled):
    """The optimizer of the embedding tables, fused into the backward pass of the lookup."""

    oneofs: ClassVar = {"optimizer": _SPARSE, "learning_rate": _SCHEDULES}

    sgd_optimizer: FusedSGDOptimizer | None = None
    """Stochastic gradient descent."""
    adagrad_optimizer: FusedAdagradOptimizer | None = None
    """Adagrad, one accumulator per element."""
    adam_optimizer: FusedAdamOptimizer | None = not_yet()
    """Adam."""
    lars_sgd_optimizer: FusedLarsSGDOptimizer | None = not_yet()
    """LARS."""
    lamb_optimizer: FusedAdamOptimizer | None = not_yet()
    """LAMB."""
    partial_rowwise_lamb_optimizer: FusedAdamOptimizer | None = not_yet()
    """LAMB with a second moment per row."""
    partial_rowwise_adam_optimizer: FusedAdamOptimizer | None = not_yet()
    """Adam with a second moment per row."""
    rowwise_adagrad_optimizer: FusedRowWiseAdagradOptimizer | None = None
    """Adagrad, one accumulator per row."""
    adadelta_optimizer: FusedAdadeltaOptimizer | None = not_yet()
    """Adadelta."""
    rmsprop_optimizer: FusedRMSpropOptimizer | None = not_yet()
    """RMSprop."""


class DenseUnit(Scheduled):
    """One optimizer of dense parameters."""

    oneofs: ClassVar = {"optimizer": _DENSE, "learning_rate": _SCHEDULES}

    sgd_optimizer: SGDOptimizer | None = None
    """Stochastic gradient descent."""
    adagrad_optimizer: AdagradOptimizer | None = None
    """Adagrad."""
    adam_optimizer: AdamOptimizer | None = None
    """Adam."""
    adamw_optimizer: AdamOptimizer | None = not_yet()
    """Adam with decoupled weight decay."""
    adadelta_optimizer: AdadeltaOptimizer | None = not_yet()
    """Adadelta."""
    rmsprop_optimizer: RMSpropOptimizer | None = not_yet()
    """RMSprop."""


class PartOptimizer(DenseUnit):
    """Another optimizer for some dense parameters."""

    regex_pattern: str
    """Full match on the parameter's name; the first entry that matches is used."""


class DenseOptimizer(DenseUnit):
    """The optimizer of everything that is not an embedding table."""

    part_optimizers: tuple[PartOptimizer, ...] = not_yet(())
    """Other optimizers for parameters whose names match."""
    ema: EMAConfig | None = None
    """Averaged copy of the dense parameters, which is evaluated, exported and served in their place."""
