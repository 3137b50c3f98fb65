"""The vocabulary in a GGUF file: its tokens, what kind each is, and the ids that have a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf.constants import TokenType
from tokenizers import AddedToken

from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.errors import CheckpointError

_ADDED = frozenset({TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """The ids that config.json and generation_config.json name; `eos` holds every token that ends a turn."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file in the order of their ids, each with its kind, a `TokenType`."""

    file: GgufFile
    tokens: Sequence[str]
    kinds: Sequence[int]

    def ids(self) -> dict[str, int]:
        """Map every token but the fillers for rows past the tokenizer's size; added ones too, to keep their ids."""
        ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind == TokenType.UNUSED and token == f"[PAD{token_id}]":
                continue
            if token in ids:
                raise CheckpointError(f"{self.file.path}: the tokens {ids[token]} and {token_id} are both {token!r}")
            ids[token] = token_id
        return ids

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that are found in the text before it is cut; all but the user's are special."""
        return [
            AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in _ADDED
        ]

    def special_ids(self) -> SpecialIds:
        """Return the ids that begin, end and fill texts."""
        ends = [self.special_id(kind) for kind in ("eos", "eot", "eom")]
        return SpecialIds(
            bos=self.special_id("bos"),
            eos=tuple(dict.fromkeys(end for end in ends if end is not None)),
            pad=self.special_id("padding"),
        )

    def special_id(self, kind: str) -> int | None:
        """Return the id of a kind of special token, or None."""
        key = f"tokenizer.ggml.{kind}_token_id"
        value = self.file.get(key, int)
        if value is not None and not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"{self.file.path}: {key} must be under the vocabulary's {len(self.tokens)} tokens, is {value}"
            )
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings that must be there."""
        return _strings(self.file, key)


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Read tokens and kinds; raises CheckpointError when they do not fit together."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list)
    if kinds is None:
        kinds = [int(TokenType.NORMAL)] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return Vocabulary(file, tokens, kinds)


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.require(key, list)
    if not all(type(value) is str for value in values):
        raise CheckpointError(f"{file.path}: {key} must hold strings only")
    return values
