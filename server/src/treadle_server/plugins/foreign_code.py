"""What code that is not ours may raise, and how to tell about it without being hurt again."""

from __future__ import annotations

import threading

_LONGEST_REASON = 500


def reraise_interrupt(error: BaseException) -> None:
    """Raise a Ctrl-C on, which reaches the main thread alone; whatever else foreign code raises is its failure."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


def reason_of(error: BaseException) -> str:
    """Return an exception's type and text, cut to a length that fits in a message; its own `__str__` may raise."""
    try:
        text = str(error)
    except BaseException as again:  # noqa: BLE001 - foreign code
        reraise_interrupt(again)
        text = "its text cannot be had"
    text = text[:_LONGEST_REASON].encode("utf-8", "replace").decode("utf-8")
    return f"{type(error).__name__}: {text}"
