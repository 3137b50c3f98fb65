"""Tokens as a person can read them in a table."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from types import MappingProxyType

from treadle_server.tokenizer import Tokenizer

_VISIBLE: Mapping[str, str] = MappingProxyType({" ": "␣", "\n": "⏎", "\t": "⇥"})


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text with its blanks made visible; bytes that are only part of a character in hexadecimal."""
    token = tokenizer.token_bytes(token_id)
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return f"<{token.hex(' ').upper()}>"
    return "".join(map(_visible, text)) or f"<{token_id}>"


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    # Control, format and private characters have no shape of their own; some would move the cursor.
    return f"<{ord(character):X}>" if unicodedata.category(character).startswith("C") else character
