"""Checks of configuration values; each error names the field, what is expected and what was received."""

from __future__ import annotations


def require(ok: bool, field: str, expected: str, received: object) -> None:
    """Raise ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"{field} must be {expected}, but is {received!r}")


def require_positive(**values: float) -> None:
    """Raise ValueError for the first value that is not greater than 0."""
    for field, value in values.items():
        require(value > 0, field, "greater than 0", value)
