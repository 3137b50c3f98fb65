"""The settings of a trainer process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from treadle_server.config import ObservedConfig
from treadle_server.errors import ConfigError
from treadle_server.service.security.server_security import is_loopback

DEFAULT_TRAINER_PORT = 7434


class LoraSettings(BaseModel):
    """The adapter to train in place of the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Annotated[int, Field(ge=1)] = Field(8, description="rank of the adapter's matrices")
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="alpha / rank multiplies the adapter's product")
    targets: tuple[str, ...] = Field((), description="names of matrices, or ends of them; all when not given")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the first values")


class PublishTarget(BaseModel):
    """The server that takes published weights, and the credentials for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(description="host:port of the server", min_length=1)
    model: str = Field("", description="name of the served model; may be empty when the server has one model only")
    adapter: str = Field("trained", description="name that a trained adapter has in the server", min_length=1)
    token: str | None = Field(None, description="token for the server, an administrator's", repr=False)
    tls: bool = Field(False, description="whether to speak TLS and trust the usual authorities")
    tls_ca: Path | None = Field(None, description="PEM file of the authorities to trust instead; implies tls")
    tls_certificate: Path | None = Field(None, description="PEM file of the trainer's certificate; implies tls")
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_server_name: str | None = Field(None, description="name in the server's certificate, if not its host")
    timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="seconds that the server gets for an update")

    @property
    def speaks_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or self.tls_ca is not None or self.tls_certificate is not None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("a certificate for the server and its key go together")
        if self.token is not None and not self.speaks_tls and not is_loopback(self.address.rpartition(":")[0]):
            raise ValueError(f"a token for {self.address} would travel in plain text: speak TLS")
        return self


class TrainerConfig(ObservedConfig):
    """Settings of `treadle trainer`."""

    port: Annotated[int, Field(ge=0, le=65535)] = Field(DEFAULT_TRAINER_PORT, description="port; 0 takes a free one")
    dtype: Literal["float32", "float64"] = Field("float32", description="number type of the arithmetic")
    backend: str = Field("auto", description="what computes: numpy, a plugin's, or auto for the fastest installed")
    optimizer: str = Field("adamw", description="optimizer")
    frozen: tuple[str, ...] = Field((), description="patterns of tensors that never change")
    no_decay: tuple[str, ...] = Field((), description="patterns of tensors that weight decay leaves alone")
    recompute: bool = Field(False, description="whether activations are computed again, to save memory")
    lora: LoraSettings | None = Field(None, description="the adapter to train in place of the weights")
    plugin_dirs: tuple[Path, ...] = Field((), description="folders of single-file plugins")
    no_plugins: tuple[str, ...] = Field((), description="plugins to leave out, by name")
    strict_plugins: bool = Field(False, description="whether a plugin that fails to load is fatal")
    checkpoint_root: Path | None = Field(None, description="folder of the checkpoints")
    resume: str | None = Field(None, description="checkpoint to go on from, by its name under the root")
    publish_root: Path | None = Field(None, description="folder of published weights, which the server may read")
    target: PublishTarget | None = Field(None, description="the server that takes published weights")
    max_message_bytes: Annotated[int, Field(ge=1 << 16)] = Field(64 << 20, description="largest message, in bytes")
    max_request_entries: Annotated[int, Field(ge=1)] = Field(
        1 << 22, description="entries of all lists and maps of a message together, in a request"
    )
    max_queued_calls: Annotated[int, Field(ge=1)] = Field(32, description="calls that may run or wait")
    max_metrics: Annotated[int, Field(ge=1)] = Field(10_000, description="steps whose figures are kept")
    grace_s: Annotated[float, Field(ge=0)] = Field(30.0, description="seconds that calls get to finish at shutdown")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.resume is not None and self.checkpoint_root is None:
            raise ValueError("resume needs a checkpoint root")
        if self.target is not None and self.publish_root is None:
            raise ValueError("a server to publish to needs a publish root")
        return self


def make_trainer_config(settings: dict[str, Any]) -> TrainerConfig:
    """Return the settings, None in them meaning not given.

    Raises:
        ConfigError: a setting is unknown or out of range, or some do not go together.
    """
    try:
        return TrainerConfig.model_validate({name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        lines = (_described(problem) for problem in error.errors())
        raise ConfigError(f"the trainer's settings are wrong: {'; '.join(lines)}") from error


def _described(problem: Any) -> str:
    """Return what is wrong; never the values of a group of settings, which may hold a token."""
    value, message = problem["input"], problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict) or "token" in problem["loc"] else f", got {value!r:.100}"
    return ": ".join(filter(None, (".".join(map(str, problem["loc"])), f"{message}{shown}")))
