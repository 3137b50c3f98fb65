"""Every error treadle raises for a reason that a user, a file or a plugin can cause.

TreadleError
├── InvalidRequestError       a field of a request is wrong; carries one violation for each wrong field
├── ConfigError               a setting of the server is wrong
├── ModelNotFoundError        no such model in the server, the store or on disk
├── CheckpointError           a model folder cannot be read: names the file and the tensor
│   └── UnsupportedModelError the folder is sound but asks for something treadle does not do
├── ImportSourceError         `treadle pull` cannot fetch or convert its source
├── PluginError               a plugin could not be loaded or registered
├── StageError                a sampler stage raised or broke its contract during a request
│   └── ConstraintError       what the request forbids and demands cannot be met together
├── QueueFullError            the server holds as many requests as it is allowed to; retry later
├── NonFiniteLogitsError      the model produced NaN or +inf; that request fails, the server serves on
├── EngineError               the engine itself failed (out of memory, a fault); the server serves on
├── TrainingError             a training step was refused and changed nothing: no gradients, a NaN, another optimizer
├── ChatTemplateError         the model's chat template is missing, raised, or ran past its limits
└── UnavailableError         the server drains and takes no new requests

The `service` package is the only place that turns these into gRPC statuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class TreadleError(Exception):
    """Base of every error below; its text is fit to be shown to a user."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One wrong field of a request.

    Attributes:
        field: path of the field in the request, such as `sampling.top_p` or `stages[1].parameters.k`.
        message: what was expected and what was received.
    """

    field: str
    message: str


class InvalidRequestError(TreadleError):
    """Raised when a request cannot be served as asked. Mend the named fields and send it again."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.message}" for v in self.violations))

    @classmethod
    def of(cls, field: str, message: str) -> InvalidRequestError:
        """Make the error for a single field."""
        return cls([Violation(field, message)])


class ConfigError(TreadleError):
    """Raised when a configuration file or a start option is wrong; names the setting, value and range."""


class ModelNotFoundError(TreadleError):
    """Raised when no model has the given name. The message lists the names that exist."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        self.name = name
        known = sorted(known)
        listing = f"known models: {', '.join(known)}" if known else "no models are known"
        super().__init__(f"there is no model {name!r}; {listing}")


class CheckpointError(TreadleError):
    """Raised when a model folder or checkpoint file is broken; the message names file and tensor."""


class UnsupportedModelError(CheckpointError):
    """Raised when a folder needs arithmetic or a format that treadle does not have; says what to do instead."""


class ImportSourceError(TreadleError):
    """Raised when a pull source is unknown, cannot be fetched or cannot be converted."""


class PluginError(TreadleError):
    """Raised when a plugin cannot be loaded or registered; names the plugin."""


class StageError(TreadleError):
    """Raised when a sampler stage fails during a request; names the plugin and the stage."""

    def __init__(self, plugin: str, stage: str, reason: str) -> None:
        self.plugin = plugin
        self.stage = stage
        super().__init__(f"sampler stage {stage!r} of plugin {plugin!r} {reason}")


class ConstraintError(StageError):
    """Raised when a request's own constraints leave no token to choose: mend the bans, lists or grammar it names."""


class QueueFullError(TreadleError):
    """Raised when the queue is at its limit. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class NonFiniteLogitsError(TreadleError):
    """Raised when a forward pass yields NaN or +inf: the weights or the prompt overflow the model's numbers."""


class EngineError(TreadleError):
    """Raised when a step of the engine fails for a reason that is not the request's."""


class TrainingError(TreadleError):
    """Raised when a training step cannot be done: no gradients wait, a loss is not finite. The state is as before."""


class ChatTemplateError(TreadleError):
    """Raised when messages cannot be rendered: no template, a template that raises, or one past its limits."""


class UnavailableError(TreadleError):
    """Raised for a request that arrives while the server loads or drains. Retry later or elsewhere."""


class NotSupportedError(TreadleError):
    """Raised for an RPC or option that this server does not have."""
