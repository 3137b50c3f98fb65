"""The settings of a training run: defaults, a TOML file, and what the command line overrides."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from treadle_server.datasets.text_source import TextDocuments
from treadle_server.errors import ConfigError
from treadle_server.training.lora import LoraConfig
from treadle_server.training.schedules import constant, cosine, linear

# What a resumed run may have otherwise than before.
_FREE_TO_CHANGE = frozenset({
    "steps", "epochs", "lr", "schedule", "warmup_steps", "final_lr", "betas", "eps", "momentum", "weight_decay",
    "grad_clip_norm", "label_smoothing", "z_loss", "eval_interval", "patience", "checkpoint_interval",
    "keep_checkpoints", "tensorboard", "save_dtype", "recompute", "backend",
})  # fmt: skip

AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]  # a run may be resumed from elsewhere
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainConfig(BaseModel):
    """Settings of `treadle train`. A key that is not listed here is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Count | None = Field(None, description="optimizer steps; instead of epochs")
    epochs: Count | None = Field(None, description="times that all data is read; 1 where no steps are given either")

    field: str = Field("text", description="field of JSONL and Parquet files that holds the text")
    text_documents: TextDocuments = Field("file", description="what a document of a text file is")
    held_out: tuple[AbsolutePath, ...] = Field((), description="files or folders to evaluate on, never trained on")
    held_out_fraction: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.0, description="share of the documents to evaluate on instead"
    )
    sequence_length: Annotated[int, Field(ge=4)] | None = Field(
        None, description="tokens of a row at most; the model's context, 512 and batch_tokens are the limits if unset"
    )
    batch_tokens: Annotated[int, Field(ge=4)] = Field(1024, description="tokens of a batch at most, in all its rows")
    accumulate: Count = Field(1, description="batches of a step")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the order and of new LoRA factors")

    dtype: Literal["float32", "float64"] = Field("float32", description="number type of the arithmetic")
    backend: str = Field("auto", description="what computes: numpy, a plugin's, or auto for the fastest installed")
    save_dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = Field(
        None, description="number type of the model's files; that of the arithmetic if unset"
    )
    recompute: bool = Field(False, description="whether layers run again backward instead of being kept: less memory")
    lora_rank: Annotated[int, Field(ge=0)] = Field(0, description="rank of an adapter to train; 0: the model itself")
    lora_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="alpha / rank is what the adapter is multiplied by; twice the rank if unset"
    )
    lora_targets: tuple[str, ...] = Field(
        (), description="matrices with an adapter, such as q_proj; all of attention and feed-forward if unset"
    )
    optimizer: str = Field("adamw", description="adamw, sgd, lion, or a plugin's")
    lr: Rate = Field(1e-4, description="learning rate at the end of the warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="how the rate falls")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="steps in which the rate rises")
    final_lr: Rate = Field(0.0, description="rate at the end of a linear or cosine schedule")
    betas: tuple[Share, Share] | None = Field(None, description="decays of adamw's or lion's averages")
    eps: Rate | None = Field(None, description="added to adamw's denominator")
    momentum: Share | None = Field(None, description="of sgd")
    weight_decay: Rate = Field(0.01, description="decay of the weights, apart from the gradient")
    no_decay: tuple[str, ...] = Field((), description="patterns of tensors that weight decay leaves alone")
    frozen: tuple[str, ...] = Field((), description="patterns of tensors that stay as they are")
    grad_clip_norm: Rate = Field(1.0, description="norm to which gradients are clipped; 0: as they are")
    label_smoothing: Share = Field(0.0, description="share of a target that goes to all tokens evenly")
    z_loss: Rate = Field(0.0, description="weight of log(Z)^2 in the loss")

    eval_interval: Count = Field(100, description="steps between evaluations; the last step has one too")
    patience: Annotated[int, Field(ge=0)] = Field(
        0, description="evaluations in a row without a better loss that end the run; 0: none do"
    )
    checkpoint_interval: Count = Field(500, description="steps between checkpoints; the last step has one too")
    keep_checkpoints: Count = Field(2, description="newest checkpoints that are kept, beside the best")
    tensorboard: bool = Field(False, description="whether to write TensorBoard event files")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs cannot both be given")
        if self.held_out and self.held_out_fraction:
            raise ValueError("held_out and held_out_fraction cannot both be given")
        if self.patience and not (self.held_out or self.held_out_fraction):
            raise ValueError("patience needs held_out or held_out_fraction, by which it is measured")
        if not self.lora_rank and (self.lora_alpha is not None or self.lora_targets):
            raise ValueError("lora_alpha and lora_targets need a lora_rank")
        if self.sequence_length is not None and self.sequence_length > self.batch_tokens:
            raise ValueError(f"sequence_length must be at most batch_tokens ({self.batch_tokens}), "
                             f"but is {self.sequence_length}")  # fmt: skip
        return self

    @property
    def num_epochs(self) -> int | None:
        """Epochs after which the run ends; None when steps say when."""
        return None if self.steps is not None else self.epochs or 1

    def lora(self) -> LoraConfig | None:
        """Return what the adapter to train is, None when the model itself is trained. Raises InvalidRequestError."""
        if not self.lora_rank:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return LoraConfig(rank=self.lora_rank, alpha=alpha, target_modules=self.lora_targets, seed=self.seed)

    def optimizer_options(self) -> dict[str, object]:
        """Return the optimizer's options that are given."""
        options = {"betas": self.betas, "eps": self.eps, "momentum": self.momentum}
        return {name: value for name, value in options.items() if value is not None}

    def learning_rate(self, step: int, num_steps: int) -> float:
        """Return the rate of a step, 0 for the first, of `num_steps`."""
        if self.schedule == "constant":
            return constant(self.lr, warmup_steps=self.warmup_steps)(step)
        falling = linear if self.schedule == "linear" else cosine
        return falling(self.lr, num_steps=num_steps, warmup_steps=self.warmup_steps, final_lr=self.final_lr)(step)


def load_train_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read a TOML file and apply overrides. Raises ConfigError naming every wrong setting, its value and range."""
    return train_config({**read_settings(path), **(overrides or {})})


def read_settings(path: Path | None) -> dict[str, Any]:
    """Return the settings in a TOML file, none without a file. Raises ConfigError."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error


def train_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Check settings. Raises ConfigError naming every wrong one, its value and range."""
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"the settings are wrong: {problems(error)}") from error


def changed_config(config: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a run's settings with some changed. Raises ConfigError for one that its state would not fit."""
    settings = config.model_dump(exclude_unset=True)
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in changes:
            settings.pop(other, None)
    new = train_config({**settings, **changes})
    before, after = config.model_dump(exclude=set(_FREE_TO_CHANGE)), new.model_dump(exclude=set(_FREE_TO_CHANGE))
    changed = [f"{name} was {before[name]!r}, but is {after[name]!r}" for name in before if before[name] != after[name]]
    if changed:
        raise ConfigError(f"a run cannot be resumed with other settings: {'; '.join(changed)}")
    return new


def problems(error: ValidationError) -> str:
    """Return in one line all that is wrong."""
    return "; ".join(map(_line, error.errors()))


def _line(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a setting, or with several together."""
    if not error["loc"]:
        return str(error.get("ctx", {}).get("error", error["msg"]))
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}, got {error['input']!r:.100}"
