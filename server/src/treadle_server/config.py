"""The server's settings: defaults, a TOML file, and what the command line overrides."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treadle_server.errors import ConfigError

DEFAULT_PORT = 7433


class SecurityConfig(BaseModel):
    """Settings of every server: where it listens, and who may do what there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    tls_certificate: Path | None = Field(None, description="PEM file of the certificate and its chain; turns TLS on")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key, closed to other users")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of who signs clients' certificates; clients without one are refused (mutual TLS)"
    )
    token_file: Path | None = Field(None, description="file of bearer tokens, closed to other users")
    insecure: bool = Field(False, description="whether to listen beyond this machine in plain text")
    max_requests_per_client: Annotated[int, Field(ge=1)] | None = Field(
        None, description="requests of one client under way; no limit if unset"
    )
    max_request_entries: Annotated[int, Field(ge=1)] = Field(
        1 << 20, description="entries of all lists and maps of a message together, in a request"
    )


class ObservedConfig(SecurityConfig):
    """Settings of every server about what it shows of itself."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port for Prometheus metrics, on the same host; none if unset, 0 takes a free one"
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP collector of traces, such as http://localhost:4317; none if unset", min_length=1
    )


class ServerConfig(ObservedConfig):
    """Settings of `treadle serve`. A key that is not listed here is refused."""

    port: Annotated[int, Field(ge=0, le=65535)] = Field(DEFAULT_PORT, description="port; 0 takes a free one")
    backend: str = Field("auto", description="compute backend")
    dtype: Literal["float32", "float64"] = Field("float32", description="number type of the arithmetic")
    numerics: Literal["fast", "reproducible"] = Field(
        "fast", description="reproducible: a result never depends on what else is in the batch"
    )
    quantize: Literal["int8", "int4"] | None = Field(
        None, description="what large matrices are rounded to when a model is loaded; nothing if unset"
    )
    activations: Literal["float32", "bf16"] = Field(
        "float32",
        description="what activations are rounded to before they meet a matrix in bfloat16; `float32` not at all",
    )
    max_message_bytes: Annotated[int, Field(ge=1 << 16)] = Field(16 << 20, description="largest message, in bytes")
    grace_s: Annotated[float, Field(ge=0)] = Field(30.0, description="seconds that requests get to finish at shutdown")
    max_queued_requests: Annotated[int, Field(ge=1)] = Field(256, description="requests that may wait, a model")
    max_queued_tokens: Annotated[int, Field(ge=1)] = Field(1 << 20, description="prompt tokens that may wait, a model")
    max_running: Annotated[int, Field(ge=1)] = Field(64, description="sequences that share a step")
    max_prefill_tokens: Annotated[int, Field(ge=1)] = Field(256, description="prompt tokens of a step")
    max_prefill_tokens_beside_decode: Annotated[int, Field(ge=1)] = Field(
        64, description="prompt tokens of a step while others stream"
    )
    max_kv_bytes: Annotated[int, Field(ge=1 << 16)] = Field(
        4 << 30, description="memory for keys and values in bytes, a model"
    )
    max_prefix_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        512 << 20, description="memory for keys and values of earlier texts in bytes, a model; 0 keeps none"
    )
    max_stage_s: Annotated[float, Field(gt=0)] = Field(
        0.05, description="seconds that a sampler stage may take for a row; slower calls are counted and logged"
    )
    max_buffered_tokens: Annotated[int, Field(ge=1)] = Field(
        1024, description="tokens, likely ones listed included, that may wait for the reader of a stream"
    )
    max_stall_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="seconds that a reader may take nothing while so many wait; its stream is then ended"
    )
    max_choices: Annotated[int, Field(ge=1)] = Field(128, description="largest n of a request")
    max_top_logprobs: Annotated[int, Field(ge=0)] = Field(128, description="most likely tokens listed at a position")
    max_stop_sequences: Annotated[int, Field(ge=0)] = Field(64, description="stop strings or stop tokens of a request")
    max_trace_tokens: Annotated[int, Field(ge=1)] = Field(512, description="tokens of a traced prompt")
    max_trace_bytes: Annotated[int, Field(ge=1)] = Field(
        256 << 20, description="memory for the intermediates of a trace in bytes; two traces run at once"
    )
    model_roots: tuple[Path, ...] = Field(
        (), description="folders under which RPCs may name models, weights and adapters; none are taken if unset"
    )
    adapters: dict[str, dict[str, Path]] = Field(
        default_factory=dict, description="folders of each served model's adapters, by model and adapter name"
    )
    drafts: dict[str, str] = Field(
        default_factory=dict, description="draft model of each served model that has one, by the served model's name"
    )
    plugin_dirs: tuple[Path, ...] = Field((), description="folders of single-file plugins")
    no_plugins: tuple[str, ...] = Field((), description="plugins to leave out, by name")
    strict_plugins: bool = Field(False, description="whether a plugin that fails to load is fatal")


def load_config(path: Path | None, overrides: dict[str, Any]) -> ServerConfig:
    """Read a TOML file and apply overrides; None in an override means not given.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or out of range.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        except RecursionError as error:
            raise ConfigError(f"cannot read the configuration {path}: it is nested too deeply") from error
    settings |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return ServerConfig.model_validate(settings)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors())
        raise ConfigError(f"the configuration is wrong: {'; '.join(lines)}") from error
