"""A model folder's tokenizer: text to ids and back, and what the engine asks about single tokens."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers.processors import TemplateProcessing

from treadle_server.errors import ChatTemplateError, CheckpointError, InvalidRequestError, TreadleError
from treadle_server.tokenizer import bounds, decoding
from treadle_server.tokenizer.chat_template import ChatTemplate
from treadle_server.tokenizer.detokenizer import Detokenizer

# Largest token id that a tokenizer may have: some way above any vocabulary, so that a table of all ids stays small.
_LARGEST_ID = (1 << 24) - 1


class Token(NamedTuple):
    """One token of an encoded text and the characters `text[start:end]` that it stands for."""

    token_id: int
    start: int
    end: int


class Tokenizer:
    """Wraps a `tokenizers` tokenizer. Every method may be called from several threads at once.

    Attributes:
        vocab_size: one more than the largest token id, added tokens included.
        bos_token_id: the token that starts a sequence, None when there is none.
        eos_token_ids: the tokenizer's own end of sequence (the model's generation_config.json may name more).
        special_tokens: the named ones (`bos_token`, `eos_token`, `pad_token`, ...), as chat templates see them.
        chat_template: the folder's chat template, None when it has none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, template: str | None = None
    ) -> None:
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokens = _token_table(backend, self._added)
        self.vocab_size = len(self._tokens)
        self.special_tokens = _special_tokens(config)
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = frozenset(() if eos is None else (eos,))
        self._decoder = _state(backend.decoder)
        # A byte-level decoder gives back exactly the text that was encoded: cleaning it up could only damage it.
        self._clean_up = config.get("clean_up_tokenization_spaces") is True and not self._is_byte_level
        self.chat_template = ChatTemplate(template, self.special_tokens) if template is not None else None
        _add_bos_as_configured(backend, self.special_tokens.get("bos_token"), self.bos_token_id, config)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, the configuration and chat template beside it.

        Raises:
            CheckpointError: a file is missing or broken; the message names it.
        """
        folder = Path(folder)
        backend = _load_backend(folder / "tokenizer.json")
        config = {**_load_json(folder / "special_tokens_map.json"), **_load_json(folder / "tokenizer_config.json")}
        return cls(backend, config, _load_template(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; with `add_special_tokens` those the model wants around it, such as BOS, too."""
        return list(self._encode(text, add_special_tokens).ids)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[Token]:
        """Return the tokens of a text with their places in it, in characters; added ones stand for no character."""
        encoding = self._encode(text, add_special_tokens)
        return [Token(token_id, *place) for token_id, place in zip(encoding.ids, encoding.offsets, strict=True)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Render messages with the chat template and return their ids. The template writes BOS, so none is added.

        Raises:
            ChatTemplateError: there is no template, it raised, or it ran past its limits.
            InvalidRequestError: a message is not a role and a content.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; send text or token ids instead of messages")
        rendered = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids outside the vocabulary add nothing."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def tokens(self, ids: Iterable[int], *, skip_special_tokens: bool) -> list[str]:
        """Return ids as the vocabulary spells them, without unknown ones."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        known = (self._token(token_id) for token_id in ids if token_id not in skipped)
        return [token for token in known if token is not None]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that a token adds inside a text; empty for an id without a token.

        Spaces that the decoder puts between whole words are no part of a token; a space in the token itself is.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._token(token_id)
        return b"" if token is None else decoding.token_text(token, decoding.flatten(self._decoder))

    @property
    def text_is_bytes(self) -> bool:
        """Whether the text of tokens is their bytes one after the other, spaces at the very beginning aside."""
        return decoding.joins_bytes(decoding.flatten(self._decoder)) and not self._clean_up

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is one that users do not write, such as BOS or the end of a turn."""
        return token_id in self._special_ids

    def min_tokens_of(self, text: str) -> int:
        """Return a number of tokens that `encode` will reach at least, in little time; 0 when no bound is known.

        It refuses a prompt of megabytes for a context of thousands without tokenising it (a second a megabyte).
        """
        return len(text.encode(errors="replace")) // self._max_token_num_bytes if self._max_token_num_bytes else 0

    def make_chain(self) -> decoding.Chain:
        """Return a fresh decoder for one sequence."""
        return decoding.Chain(self._decoder, clean_up=self._clean_up)

    @functools.cached_property
    def _max_token_num_bytes(self) -> int:
        """The most bytes of a text that one token can take up; 0 when that has no bound."""
        shrinkage = bounds.normalizer_shrinkage(self._backend)
        if not (shrinkage and bounds.covers_all_text(self._backend, self._tokens)):
            return 0
        return shrinkage * max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @property
    def _is_byte_level(self) -> bool:
        return any(spec["type"] == "ByteLevel" for spec in decoding.flatten(self._decoder))

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"expected valid Unicode, got the lone surrogate {text[error.start]!r} at {error.start}"
            raise InvalidRequestError.of("text", message) from None
        try:
            with _no_panics():
                # As a batch: `encode` of one text holds the interpreter's lock all the while, a second a megabyte.
                return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except TreadleError:
            raise
        except Exception as error:  # the library raises bare Exception, as for a word that a closed vocabulary lacks
            raise InvalidRequestError.of("text", f"the model's tokenizer cannot read it: {error}") from error

    def _token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def _named_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a model folder needs a tokenizer.json")
    try:
        with _no_panics():
            return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer that treadle can read: {error}") from error


def _load_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _load_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template's source: its own file beats tokenizer_config.json; of named ones, the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except ValueError as error:
            raise CheckpointError(f"{path}: not UTF-8 text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    found = type(template).__name__
    raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template: expected a string, got {found}")


def _token_table(backend: tokenizers.Tokenizer, added: Mapping[int, str]) -> tuple[str | None, ...]:
    """Return each id's token as the vocabulary spells it, None for an id without one."""
    by_id = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()} | dict(added)
    largest = max(by_id, default=-1)
    if largest > _LARGEST_ID:
        raise CheckpointError(f"tokenizer.json: token ids must be at most {_LARGEST_ID}, but one is {largest}")
    return tuple(by_id.get(token_id) for token_id in range(largest + 1))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; a configuration gives each as a string or as an object with `content`."""
    entries = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _add_bos_as_configured(
    backend: tokenizers.Tokenizer, bos: str | None, bos_id: int | None, config: Mapping[str, Any]
) -> None:
    """Make `encode` add BOS, or not, as an explicit `add_bos_token` says, whatever tokenizer.json does."""
    wanted = config.get("add_bos_token")
    ids = backend.encode("").ids
    if not isinstance(wanted, bool) or bos is None or bos_id is None or wanted == (bos_id in ids[:1]):
        return
    kept = [(token, token_id) for token_id in ids if token_id != bos_id and (token := backend.id_to_token(token_id))]
    around = ([(bos, bos_id)] if wanted else []), kept
    pieces = [*(token for token, _ in around[0]), "$A", *(token for token, _ in around[1])]
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=[*around[0], *around[1]])


def _state(component: Any) -> dict[str, Any] | None:
    """Return the JSON form of a part of a tokenizer."""
    return None if component is None else json.loads(component.__getstate__())


@contextlib.contextmanager
def _no_panics() -> Iterator[None]:
    """Turn a panic of the library, which no `except Exception` catches, into an error of ours."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise TreadleError(f"the tokenizer library failed: {error}") from error
        raise
