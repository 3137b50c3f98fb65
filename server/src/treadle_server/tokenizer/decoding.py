"""The decoders of `tokenizers`, rewritten as streaming steps.

The library decodes a whole list of tokens at once. Each class here does the work of one of its decoders piece by piece:
`push` takes the next tokens and returns what they settle, `flush` returns the rest. A chain of steps fed with any split
of a list gives the text that the library gives for the whole list. The one deviation is on purpose, see `ByteFallback`.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import decoders

Spec = Mapping[str, Any]

# What transformers' `clean_up_tokenization_spaces` replaces, in its order.
_CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
# The WordPiece decoder's own list: the same, with one more before the last three.
_WORD_PIECE_CLEAN_UPS = (*_CLEAN_UPS[:7], (" do not", " don't"), *_CLEAN_UPS[7:])


class Step(Protocol):
    """One decoder of a chain, fed piece by piece."""

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Take the next tokens; return the tokens that no later one can change."""

    def flush(self) -> list[str]:
        """Return what was held back; the stream is over."""


class PerToken:
    """A decoder that looks at one token at a time, and treats the very first in its own way."""

    def __init__(self, rest: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        self._rest = rest
        self._next = first or rest

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Map the tokens."""
        if not tokens:
            return []
        head = self._next(tokens[0])
        self._next = self._rest
        return [head, *map(self._rest, tokens[1:])]

    def flush(self) -> list[str]:
        """Nothing is ever held."""
        return []


class ByteLevel:
    """Bytes written as printable characters, as in GPT-2; ill-formed UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Return the characters that are complete."""
        return [self._utf8.decode(b"".join(map(byte_level_bytes, tokens)))]

    def flush(self) -> list[str]:
        """Return replacement characters for a tail that was cut short."""
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """Tokens `<0xNN>` are single bytes of characters outside the vocabulary.

    The library turns every byte of a run of byte tokens into U+FFFD when one of them is wrong, complete characters
    included, so that text already streamed could be unsaid by a later token. Here complete characters stand, and each
    byte that belongs to none becomes one U+FFFD. On well-formed runs both agree.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Return the tokens with runs of bytes turned into characters."""
        out: list[str] = []
        for token in tokens:
            byte = fallback_byte(token)
            if byte is None:
                out += (*self.flush(), token)
            else:
                out.append(_mark_strays(self._utf8.decode(byte)))
        return out

    def flush(self) -> list[str]:
        """Return a replacement character for each byte of a tail that was cut short."""
        return [_mark_strays(self._utf8.decode(b"", final=True))]


class Suffix:
    """An end-of-word mark becomes a space, except in the last token, where it vanishes (GPT-1 style BPE)."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held = ""

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Return the tokens, the last one up to its mark only."""
        out = []
        for token in tokens:
            out.append(self._held.replace(self._suffix, " "))
            head, mark, tail = token.partition(self._suffix)
            out.append(head)
            self._held = mark + tail
        return out

    def flush(self) -> list[str]:
        """Return the rest of the last token without the mark."""
        return [self._held.replace(self._suffix, "")]


class ReplaceText:
    """`str.replace` over the whole text; holds a tail that may be the start of `old`."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Return the text so far, less a possible start of a match."""
        *done, rest = (self._held + "".join(tokens)).split(self._old)
        keep = len(rest) - partial_match(rest, self._old)
        self._held = rest[keep:]
        return [self._new.join((*done, rest[:keep]))]

    def flush(self) -> list[str]:
        """Return the held tail: it was no match."""
        held, self._held = self._held, ""
        return [held]


class StripText:
    """Strips up to `start` copies of a character off the front of the whole text and `stop` off its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Return the text so far, less what may have to go off its end."""
        text = self._strip_front(self._held + "".join(tokens))
        trailing = min(len(text) - len(text.rstrip(self._content)), self._stop)
        keep = len(text) - trailing
        self._held = text[keep:]
        return [text[:keep]]

    def flush(self) -> list[str]:
        """Return nothing: the held tail is what had to go."""
        return []

    def _strip_front(self, text: str) -> str:
        while self._start and text.startswith(self._content):
            text = text[1:]
            self._start -= 1
        if text:
            self._start = 0
        return text


class WholeText:
    """Any other decoder: keeps every token and lets the library decode them at the end."""

    def __init__(self, chain: Sequence[Spec]) -> None:
        self._decoder = library_decoder({"type": "Sequence", "decoders": list(chain)})
        self._tokens: list[str] = []

    def push(self, tokens: Sequence[str]) -> list[str]:
        """Keep the tokens."""
        self._tokens += tokens
        return []

    def flush(self) -> list[str]:
        """Return the whole text."""
        return [self._decoder.decode(self._tokens)]


class Chain:
    """All steps of a tokenizer, one feeding the next."""

    def __init__(self, spec: Spec | None, *, clean_up: bool) -> None:
        self._steps = [*_make_steps(flatten(spec)), *_make_clean_ups(clean_up)]

    def push(self, tokens: Sequence[str]) -> str:
        """Return the text that the next tokens settle."""
        return self._run(self._steps, tokens)

    def flush(self) -> str:
        """Return the text still held in any step."""
        later = range(1, len(self._steps) + 1)
        return "".join(
            self._run(self._steps[after:], step.flush()) for step, after in zip(self._steps, later, strict=True)
        )

    @staticmethod
    def _run(steps: Iterable[Step], tokens: Sequence[str]) -> str:
        for step in steps:
            tokens = step.push(tokens)
        return "".join(tokens)


def flatten(spec: Spec | None) -> list[Spec]:
    """Return a decoder's specification as a flat chain; no decoder at all joins the tokens with spaces."""
    if spec is None:
        return [{"type": "JoinWithSpaces"}]
    if spec["type"] == "Sequence":
        return [inner for item in spec["decoders"] for inner in flatten(item)]
    return [spec]


def library_decoder(spec: Spec) -> decoders.Decoder:
    """Return the library's own decoder of a specification."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder


def partial_match(text: str, pattern: str) -> int:
    """Return the length of the longest end of `text` that is a proper start of `pattern`."""
    longest = min(len(text), len(pattern) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(pattern[:n])), 0)


@functools.lru_cache(maxsize=1 << 13)  # the tokens that texts are mostly made of
def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with a character outside the alphabet stands for itself."""
    try:
        return bytes(map(_byte_of_character().__getitem__, token))
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token `<0xNN>` stands for, None for any other token."""
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def joins_bytes(chain: Sequence[Spec]) -> bool:
    """Return whether a decoder joins what `token_text` makes of its tokens and changes no more than the beginning."""
    kinds = [spec["type"] for spec in chain]
    end = next((place + 1 for place, kind in enumerate(kinds) if kind in ("ByteLevel", "Fuse")), len(kinds))
    by_token, by_text = kinds[:end], chain[end:]
    return {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace"}.issuperset(by_token) and all(
        spec["type"] == "Strip" and not spec["stop"] for spec in by_text
    )


def token_text(token: str, chain: Sequence[Spec]) -> bytes:
    """Return the bytes that a token adds inside a text, without the spaces that the decoder puts between tokens."""
    for spec in chain:
        kind = spec["type"]
        if kind == "ByteLevel":
            return byte_level_bytes(token)
        if kind == "ByteFallback" and (byte := fallback_byte(token)) is not None:
            return byte
        if kind == "Fuse":
            break
        token = _inside(spec, token)
    return token.encode()


def _inside(spec: Spec, token: str) -> str:
    """Return what a per-token decoder makes of a token that is neither the first nor the last."""
    match spec:
        case {"type": "Metaspace", "replacement": mark} | {"type": "BPEDecoder", "suffix": mark}:
            return token.replace(mark, " ")
        case {"type": "WordPiece", "prefix": prefix}:
            return token.removeprefix(prefix)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if old:
            return token.replace(old, new)
        case {"type": "Replace"}:
            return library_decoder(spec).decode([token])
    return token


def _make_steps(chain: Sequence[Spec]) -> Iterable[Step]:
    fused = False  # after Fuse or ByteLevel the tokens are pieces of one text
    for index, spec in enumerate(chain):
        if spec["type"] == "Fuse":
            fused = True
            continue
        step = (_make_text_step if fused else _make_token_step)(spec)
        if step is None:
            yield WholeText(([{"type": "Fuse"}] if fused else []) + list(chain[index:]))
            return
        yield step
        fused = fused or spec["type"] == "ByteLevel"


def _make_token_step(spec: Spec) -> Step | None:
    match spec["type"]:
        case "JoinWithSpaces":
            return PerToken(" ".__add__, first=str)
        case "ByteLevel":
            return ByteLevel()
        case "ByteFallback":
            return ByteFallback()
        case "Metaspace":
            return _metaspace(spec["replacement"], spec["prepend_scheme"])
        case "WordPiece":
            return _word_piece(spec["prefix"], clean_up=spec["cleanup"])
        case "Strip":
            return PerToken(functools.partial(_strip, spec))
        case "Replace":
            decoder = library_decoder(spec)
            return PerToken(lambda token: decoder.decode([token]))
        case "BPEDecoder" if spec["suffix"]:
            return Suffix(spec["suffix"])
    return None


def _make_text_step(spec: Spec) -> Step | None:
    match spec:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if old:
            return ReplaceText(old, new)
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return StripText(content, start, stop)
    return None


def _make_clean_ups(clean_up: bool) -> list[Step]:
    return [ReplaceText(old, new) for old, new in _CLEAN_UPS] if clean_up else []


def _metaspace(mark: str, prepend_scheme: str) -> PerToken:
    first = None if prepend_scheme == "never" else (lambda token: token.replace(mark, ""))
    return PerToken(lambda token: token.replace(mark, " "), first)


def _word_piece(prefix: str, *, clean_up: bool) -> PerToken:
    def first(token: str) -> str:
        replacements = _WORD_PIECE_CLEAN_UPS if clean_up else ()
        return functools.reduce(lambda text, pair: text.replace(*pair), replacements, token)

    def rest(token: str) -> str:
        return first(token[len(prefix) :] if token.startswith(prefix) else f" {token}")

    return PerToken(rest, first)


def _strip(spec: Spec, token: str) -> str:
    step = StripText(spec["content"], spec["start"], spec["stop"])
    return "".join(step.push([token]))


def _mark_strays(text: str) -> str:
    """Turn the escaped bytes of `surrogateescape` into replacement characters."""
    if text.isascii():
        return text
    return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
