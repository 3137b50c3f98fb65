"""SentencePiece vocabularies of GGUF files (`tokenizer.ggml.model` "llama") as a tokenizer.json.

SentencePiece's BPE joins the neighbours whose union has the highest score (Kudo and Richardson 2018). A tokenizer.json
lists pairs in the order in which they are to be joined, so the pairs that make up each piece are listed by the piece's
score, as transformers does when it converts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from gguf.constants import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from treadle_server.checkpoints.gguf_vocabulary import Vocabulary
from treadle_server.errors import CheckpointError, UnsupportedModelError

_SPACE = "▁"  # what SentencePiece writes for a space
_NUM_BYTES = 256
# Normalisation that a file asks for and that is not carried over.
_REFUSED_KEYS = ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces")


def build_sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer without its special frame; raises UnsupportedModelError for what it could not do exactly."""
    file = vocabulary.file
    for key in _REFUSED_KEYS:
        if file.metadata.get(key):
            raise UnsupportedModelError(f"{file.path}: {key} is not supported")
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    added = vocabulary.added_tokens() if prefix else [_normalised(token) for token in vocabulary.added_tokens()]
    ids = vocabulary.ids() if prefix else _normalised_ids(vocabulary)
    tokenizer = Tokenizer(_model(vocabulary, ids))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_tokens(added)
    return tokenizer


def _normalised(token: AddedToken) -> AddedToken:
    """Have a token of the user found where spaces are written as SentencePiece does, which is where it looks."""
    if token.special:
        return token
    return AddedToken(token.content.replace(" ", _SPACE), special=False, normalized=True)


def _normalised_ids(vocabulary: Vocabulary) -> dict[str, int]:
    users = {t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == TokenType.USER_DEFINED}
    return {t.replace(" ", _SPACE) if t in users else t: token_id for t, token_id in vocabulary.ids().items()}


def _model(vocabulary: Vocabulary, ids: Mapping[str, int]) -> models.BPE:
    file = vocabulary.file
    num_bytes = sum(kind == TokenType.BYTE for kind in vocabulary.kinds)
    if num_bytes not in (0, _NUM_BYTES):
        raise CheckpointError(f"{file.path}: {num_bytes} byte tokens, expected {_NUM_BYTES} or none")
    unknown = vocabulary.special_id("unknown")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == TokenType.UNKNOWN), None)
    return models.BPE(
        dict(ids),
        _merges(vocabulary, ids),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=num_bytes > 0,
    )


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes up a piece: by score, of one piece the longest left half first."""
    scores = _scores(vocabulary)
    pieces = {
        token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == TokenType.NORMAL
    }
    unused = {
        token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == TokenType.UNUSED
    }
    for piece in unused:
        if piece in ids and any(True for _ in _halves(piece, pieces)):
            raise UnsupportedModelError(
                f"{vocabulary.file.path}: the unused piece {piece!r} can be put together from others; not supported"
            )
    pairs = [(scores[ids[piece]], *halves) for piece in pieces for halves in _halves(piece, pieces)]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), pair[1]))
    return [(left, right) for _, left, right in pairs]


def _halves(piece: str, pieces: set[str]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(piece)):
        if piece[:cut] in pieces and piece[cut:] in pieces:
            yield piece[:cut], piece[cut:]


def _scores(vocabulary: Vocabulary) -> list[float]:
    file = vocabulary.file
    scores = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{file.path}: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    if not all(type(score) is float and math.isfinite(score) for score in scores):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores must hold finite numbers only")
    return scores
