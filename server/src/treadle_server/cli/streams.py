"""The standard streams as a command finds them: closed, full, in any encoding, or a terminal that obeys."""

from __future__ import annotations

import os
import sys
from types import MappingProxyType
from typing import TextIO

_CONTROLS = MappingProxyType(
    {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}  # C0, DEL and C1
)


def prepare_streams() -> None:
    """Give each standard stream a file, and have characters that its encoding lacks shown as question marks."""
    # Opened the wrong way round, a stream that was closed fails when it is used, and no other file takes its number.
    _open_closed("stdin", 0, os.O_WRONLY)
    _open_closed("stdout", 1, os.O_RDONLY)
    _open_closed("stderr", 2, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _open_closed(name: str, number: int, flags: int) -> None:
    if getattr(sys, name) is not None:
        return
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    mode = "r" if number == 0 else "w"
    setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open to the end


def discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere: it could not be written, and must not fail again when Python exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def without_controls(text: str) -> str:
    """Return the text without the control characters that move a terminal's cursor or give it orders."""
    return text.translate(_CONTROLS)
