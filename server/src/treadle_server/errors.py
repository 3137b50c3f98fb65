"""Every error treadle raises for a reason that a user, a file or a plugin can cause.

TreadleError
├── InvalidRequestError       a field of a request is wrong; carries one violation for each wrong field
├── ConfigError               a setting of the server is wrong
├── ModelNotFoundError        no such model in the server, the store or on disk
├── AdapterNotFoundError      no such adapter of the model
├── ModelExistsError          another model is served under the name
├── VersionConflictError      another version of the weights is served than the one expected
├── CheckpointError           a model folder cannot be read: names the file and the tensor
│   ├── UnsupportedModelError the folder is sound but asks for something treadle does not do
│   └── CheckpointWriteError  a checkpoint cannot be written, as on a full disk; what was there before is untouched
├── ImportSourceError         `treadle pull` cannot fetch or convert its source
├── PluginError               a plugin could not be loaded or registered
├── StageError                a sampler stage raised or broke its contract during a request
│   └── ConstraintError       what the request forbids and demands cannot be met together
├── QueueFullError            the server holds as many requests as it is allowed to; retry later
├── SlowReaderError           the reader of a stream lagged behind it for too long
├── NonFiniteLogitsError      the model produced NaN or +inf; that request fails, the server serves on
├── EngineError               the engine itself failed (out of memory, a fault); the server serves on
├── TrainingError             a training step was refused and changed nothing: no gradients, a NaN, another optimizer
├── SequenceNumberError       a training call is not the next one, nor one that was done before
├── PublishError              a server did not take published weights
│   ├── PublishTargetError    that server cannot be reached
│   └── PublishDeniedError    that server takes no weights from this trainer
├── DataError                 training data cannot be read: names the file and the line, row or byte
├── ChatTemplateError         the model's chat template is missing, raised, or ran past its limits
├── UnauthenticatedError     the caller has no token, or not one that the server knows
├── AccessDeniedError         the caller may not do this: it needs another role, or another folder
└── UnavailableError         the server drains and takes no new requests

The `service` package is the only place that turns these into gRPC statuses.
"""

from __future__ import annotations

import difflib
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
    """Raised when no model has the given name. The message lists the names that exist, or says there is no folder."""

    def __init__(self, name: str, known: Iterable[str] = (), *, is_folder: bool = False) -> None:
        self.name = name
        super().__init__(f"there is no such folder: {name!r:.500}" if is_folder else self._described(name, known))

    @staticmethod
    def _described(name: str, known: Iterable[str]) -> str:
        known = sorted(known)
        listing = f"known models: {', '.join(known)}" if known else "no models are known"
        close = difflib.get_close_matches(name.lower()[:200], known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"there is no model {name!r}; {hint}{listing}"


class AdapterNotFoundError(TreadleError):
    """Raised when a model has no adapter of the given name. The message lists the names that exist."""

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        known = sorted(known)
        listing = f"loaded adapters: {', '.join(known)}" if known else "no adapters are loaded"
        super().__init__(f"there is no adapter {name!r:.200}; {listing}")


class ModelExistsError(TreadleError):
    """Raised when a model would take the name of one that is served. Unload that one, or choose another name."""


class VersionConflictError(TreadleError):
    """Raised when weights are to replace a version that is not the one served. Look at what is, and try again."""

    def __init__(self, model: str, *, expected: int, served: int) -> None:
        super().__init__(f"model {model!r} serves weight version {served}, not {expected} as expected")


class CheckpointError(TreadleError):
    """Raised when a model folder or checkpoint file is broken; the message names file and tensor."""


class UnsupportedModelError(CheckpointError):
    """Raised when a folder needs arithmetic or a format that treadle does not have; says what to do instead."""


class CheckpointWriteError(CheckpointError):
    """Raised when a checkpoint cannot be written. Make room on the disk, or name another; nothing was lost."""


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


class SlowReaderError(TreadleError):
    """Raised for a stream whose reader took nothing for too long while the server held as much for it as it may."""


class NonFiniteLogitsError(TreadleError):
    """Raised when a forward pass yields NaN or +inf: the weights or the prompt overflow the model's numbers."""


class EngineError(TreadleError):
    """Raised when a step of the engine fails for a reason that is not the request's."""


class TrainingError(TreadleError):
    """Raised when a training step cannot be done: no gradients wait, a loss is not finite. The state is as before."""


class DataError(TreadleError):
    """Raised when training data cannot be read or is too little; names the file and the line, row or byte."""


class SequenceNumberError(TreadleError):
    """Raised when a numbered training call is out of turn; names the number that is next. Nothing was changed."""


class PublishError(TreadleError):
    """Raised when published weights were not taken: no server is set, or it serves another model or version."""


class PublishTargetError(PublishError):
    """Raised when the server to publish to does not answer. Start it, and publish again."""


class PublishDeniedError(PublishError):
    """Raised when the server refuses the trainer's credentials or the folder of its weights."""


class ChatTemplateError(TreadleError):
    """Raised when messages cannot be rendered: no template, a template that raises, or one past its limits."""


class UnauthenticatedError(TreadleError):
    """Raised for a call without a token, or with one that the server does not know. The message never shows it."""


class AccessDeniedError(TreadleError):
    """Raised for what the caller may not do: a method that needs another role, a folder outside the allowed roots."""


class UnavailableError(TreadleError):
    """Raised for a request that arrives while the server loads or drains. Retry later or elsewhere."""


class NotSupportedError(TreadleError):
    """Raised for an RPC or option that this server does not have."""
