"""Every error the client raises for what a server answers or a request holds.

TreadleClientError
├── InvalidArgumentError       a field of the request is wrong: `.violations`; also a ValueError
├── NotFoundError              no such model, adapter, preset or stage
├── ConflictError              the server's state does not allow it: it exists already, or another version is served
├── QueueFullError             the server holds as many requests as it may: `.retry_after_s`
├── SlowReaderError            the stream was read too slowly, and the server gave it up
├── MessageTooLargeError       a request or response is over a message limit
├── UnavailableError           no server answers, or it is loading or draining: `.retry_after_s`
├── DeadlineExceededError      `timeout_s` passed; also a TimeoutError
├── RequestCancelledError      the server, or the closing of the client, cancelled the request
├── UnauthenticatedError       the token is missing or wrong
├── PermissionDeniedError      the token does not allow this
├── UnimplementedError         the server has no such call: it is older, or that part is off
├── ServerInternalError        the server failed; its log has the reason
└── ClientClosedError          the client was closed before the call

A keyword that no call knows is a plain TypeError, as for any Python function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Violation(NamedTuple):
    """One wrong field of a request.

    Attributes:
        field: path of the field in the request, such as `sampling.top_p` or `sampling.stages[1].parameters.k`.
        message: what was expected and what was received.
    """

    field: str
    message: str


class TreadleClientError(Exception):
    """Base of every error below; its text is fit to be shown to a user.

    Attributes:
        message: the text.
        reason: the server's machine-readable reason; empty when it gave none.
        metadata: what the server says beside the reason, by name.
        request_id: what the server's log calls the request; empty when it did not get there or the answer was lost.
    """

    def __init__(self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.request_id = ""


class InvalidArgumentError(TreadleClientError, ValueError):
    """Raised when fields of a request are wrong, by the server or before sending. Mend `violations` and send again."""

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, violations: Sequence[Violation]) -> InvalidArgumentError:
        """Make the error whose text lists all violations."""
        return cls("; ".join(f"{v.field}: {v.message}" for v in violations), violations=violations)


class NotFoundError(TreadleClientError):
    """Raised when a name in the request is not known to the server. The text lists the names that are, if it can."""


class ConflictError(TreadleClientError):
    """Raised when the server's present state forbids the call. Look at the state, then decide again."""


class _RetryableError(TreadleClientError):
    """Holds `retry_after_s`: the seconds after which the server wants to be asked again, None when it named none."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class QueueFullError(_RetryableError):
    """Raised when the server takes no more requests for now and all retries are used. Ask after `retry_after_s`."""


class UnavailableError(_RetryableError):
    """Raised when no server answers at the target, or it is not ready. `Client.wait_ready` waits for it."""


class SlowReaderError(TreadleClientError):
    """Raised when a stream was not read for so long that the server gave it up. What it had sent stays readable."""


class MessageTooLargeError(TreadleClientError):
    """Raised when a message is over the client's or the server's limit. Raise `max_message_bytes`, or send less."""


class DeadlineExceededError(TreadleClientError, TimeoutError):
    """Raised when `timeout_s` passed. What a stream received until then stays readable."""


class RequestCancelledError(TreadleClientError):
    """Raised when the request was cancelled other than by closing its stream."""


class UnauthenticatedError(TreadleClientError):
    """Raised when the server wants another token. Give `token=` to the client."""


class PermissionDeniedError(TreadleClientError):
    """Raised when the token is good but does not allow the call."""


class UnimplementedError(TreadleClientError):
    """Raised when the server does not have the call or that part of it is off."""


class ServerInternalError(TreadleClientError):
    """Raised when the server failed on this request, or answered with something that cannot be read."""


class ClientClosedError(TreadleClientError):
    """Raised for a call on a closed client. Make a new one."""
