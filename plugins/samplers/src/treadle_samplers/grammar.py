"""A grammar for the output: the optional extra `treadle-samplers[grammar]`, an entry point of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api import (
    Field,
    Logits,
    MissingExtraError,
    ModelInfo,
    PrivateAttr,
    SamplingContext,
    Select,
    Stage,
    hookimpl,
)

try:
    import llguidance
    from llguidance.gbnf_to_lark import gbnf_to_lark
except ImportError as error:
    raise MissingExtraError("it needs llguidance: pip install 'treadle-samplers[grammar]'") from error

# White space between the parts of a JSON text: none, a space, or a line break with its indent. The parser's own rule
# has no bound, and a model that likes blanks fills its context with them.
_JSON_SPACE = r"( |\n {0,24})?"
# A megabyte of alternatives takes the parser ten seconds; this much, a tenth of that.
_LONGEST_TEXT = 1 << 17
_LONGEST_MESSAGE = 300
# What means something in a regular expression.
_REGEX_MARKS = frozenset("\\.+*?()|[]{}^$#&-~/")


class Grammar(Stage):
    """Keep the output within a grammar: a JSON schema, a regular expression, a choice, or a grammar in Lark or GBNF.

    Formula: a token is kept if the output with the token's bytes behind it can still become a text of the grammar; an
    end-of-text id is kept if the output is such a text already (Willard, Louf: Efficient Guided Generation for Large
    Language Models, 2023). The work is done by llguidance, an Earley parser over the trie of the vocabulary.

    Edges: exactly one of the parameters is given. The prompt does not count. Special tokens are never part of the text.
    Where only one text can follow, the tokens that the tokenizer gives it are kept alone.
    Between the parts of JSON may be a space, or a line break and up to 24 spaces, unless `x-guidance` in the schema
    says otherwise (`"whitespace_flexible": false`, or a `whitespace_pattern`). Stop texts and
    `max_tokens` may cut the text short; where it ends by itself, it is one of the grammar. A model without any token
    that goes on, and a text that is complete where no end of text is left, fail the request.
    """

    name = "grammar"
    kind = "mask"
    api_version = 1

    json_schema: dict[str, Any] | str | None = Field(default=None, description="JSON schema, an object or its text")
    regex: str | None = Field(
        default=None, max_length=_LONGEST_TEXT, description="regular expression of the whole text, without look-around"
    )
    choice: list[str] | None = Field(
        default=None, min_length=1, max_length=10_000, description="texts, one of which is the output"
    )
    lark: str | None = Field(default=None, max_length=_LONGEST_TEXT, description="grammar in llguidance's Lark")
    gbnf: str | None = Field(default=None, max_length=_LONGEST_TEXT, description="grammar in GBNF, as of llama.cpp")

    _text: _GrammarText = PrivateAttr()

    def check(self, model_info: ModelInfo) -> None:
        """Compile the grammar for the model's vocabulary; ValueError tells what its parser says, and where."""
        given = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"exactly one of {names} must be given; received {', '.join(given) or 'none'}")
        ((name, value),) = given.items()
        if not model_info.text_is_bytes:
            raise ValueError(f"{name}: the model's tokenizer puts spaces between tokens, where no grammar can see them")
        tokenizer = model_info.once("treadle_samplers.grammar", lambda: _tokenizer(model_info))
        matcher = llguidance.LLMatcher(tokenizer, _compiled(name, value), log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name}: {_first_lines(matcher.get_error())}")
        self._text = _GrammarText(matcher, np.array(sorted(model_info.eos_ids), dtype=np.int64))
        if not self._text.allowed(model_info.vocab_size).any():
            raise ValueError(f"{name}: no token of the model begins a text of the grammar")

    def start(self, context: SamplingContext) -> _GrammarText:
        """The empty text."""
        return self._text.copy()

    def accept(self, state: _GrammarText, token_id: int) -> None:
        """Put a token behind the text."""
        state.append(token_id)

    def clone(self, state: _GrammarText) -> _GrammarText:
        """The same text, to go on otherwise."""
        return state.copy()

    def apply(self, logits: Logits, context: SamplingContext, state: Any = None) -> Logits:
        """The logits of the tokens that the grammar allows, the rest masked."""
        allowed = state.allowed(len(logits))
        out = context.empty()
        out.fill(-np.inf)
        np.copyto(out, logits, where=allowed)
        if out.max() == -np.inf:
            raise RuntimeError(state.dead_end(allowed))
        return out


class _GrammarText:
    """A text under way: what the parser knows of it."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: NDArray[np.int64], *, has_ended: bool = False) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._has_ended = has_ended

    def copy(self) -> _GrammarText:
        return _GrammarText(self._matcher.deep_copy(), self._eos_ids, has_ended=self._has_ended)

    def append(self, token_id: int) -> None:
        """Add a token. Behind an end of text, which a request may ignore, nothing changes any more."""
        if self._has_ended:
            return
        if token_id in self._eos_ids and self._matcher.is_accepting():
            self._has_ended = True
        elif not self._matcher.consume_token(token_id):
            why = _first_lines(self._matcher.get_error() or "")
            raise RuntimeError(why or f"token {token_id} does not go on as the grammar wants")

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocab]."""
        if self._has_ended:
            bits = np.zeros(vocab_size, dtype=np.bool_)
        else:
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little", count=vocab_size).view(np.bool_)
        # The parser's own end of text is an id past the vocabulary, so that a model may have several, or none.
        bits[self._eos_ids] = not self._matcher.is_error() and self._matcher.is_accepting()
        return bits

    def dead_end(self, allowed: NDArray[np.bool_]) -> str:
        """Why nothing can follow, for the client."""
        if allowed.any():
            return "every token that the grammar allows was masked before"
        if self._matcher.is_error():
            reason = _first_lines(self._matcher.get_error()) or self._matcher.stop_reason()
            return f"the grammar allows no token of the model here ({reason})"
        if self._matcher.is_accepting():
            return "the text is complete, and the model has no end-of-text token"
        return "the grammar allows no token of the model here"


def _tokenizer(model_info: ModelInfo) -> llguidance.LLTokenizer:
    """The vocabulary as a trie of bytes, behind it the parser's own end of text."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(model_info)),
        n_vocab=model_info.vocab_size + 1,
        eos_token=model_info.vocab_size,
    )


class _Vocabulary:
    """A tokenizer as llguidance wants it: where only one text can follow, it asks for the tokens to write it in."""

    bos_token_id = None

    def __init__(self, model_info: ModelInfo) -> None:
        self.eos_token_id = model_info.vocab_size
        special = {token_id for token_id in model_info.special_ids if token_id < model_info.vocab_size}
        self.tokens = [*map(model_info.token_bytes, range(model_info.vocab_size)), b""]
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self._encode = model_info.encode
        self._ids = {text: token_id for token_id, text in enumerate(self.tokens) if text and token_id not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The model's own tokens of a text, unless they are not those bytes, such as a space added in front."""
        try:
            ids = list(self._encode(text.decode()))
        except Exception:  # noqa: BLE001 - half a character, or whatever a tokenizer says of a text it cannot read
            ids = []
        spelled = [self.tokens[token_id] for token_id in ids]
        if b"".join(spelled) == text and all(map(self._ids.__contains__, spelled)):
            return ids
        return self._fewest(text)

    def _fewest(self, text: bytes) -> list[int]:
        """The fewest tokens that spell a text; none if there is no way."""
        # last[end]: (number of tokens, start of the last one) of the best way to spell text[:end].
        last: dict[int, tuple[int, int]] = {0: (0, 0)}
        for end in range(1, len(text) + 1):
            starts = range(max(0, end - self._longest), end)
            ways = [(last[start][0] + 1, start) for start in starts if start in last and text[start:end] in self._ids]
            if ways:
                last[end] = min(ways)
        ids: list[int] = []
        end = len(text)
        while end and end in last:
            start = last[end][1]
            ids.append(self._ids[text[start:end]])
            end = start
        return ids[::-1]


def _compiled(name: str, value: Any) -> str:
    """The grammar as the parser takes it; ValueError with its position where it cannot even be read."""
    compilers: dict[str, Callable[[Any], str]] = {
        "json_schema": _json_grammar,
        "regex": llguidance.LLMatcher.grammar_from_regex,
        "choice": _choice_grammar,
        "lark": llguidance.LLMatcher.grammar_from_lark,
        "gbnf": lambda text: llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text)),
    }
    try:
        return compilers[name](value)
    except RecursionError:
        raise ValueError(f"{name}: is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(f"{name}: {error}") from error


def _json_grammar(schema: dict[str, Any] | str) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"must have at most {_LONGEST_TEXT} characters, got {len(text)}")
    parsed = json.loads(text)  # says where the text is no JSON
    guidance = parsed.get("x-guidance") if isinstance(parsed, dict) else None
    says_space = isinstance(guidance, dict) and any(key.startswith("whitespace") for key in guidance)
    keeps_defaults = says_space or not isinstance(parsed, dict)  # a schema that is true or false takes no settings
    return llguidance.LLMatcher.grammar_from_json_schema(
        text, defaults=None if keeps_defaults else {"whitespace_pattern": _JSON_SPACE}
    )


def _choice_grammar(texts: Iterable[str]) -> str:
    # One regular expression: as rules of a grammar, thousands of texts are more than the parser takes in a row.
    return llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, texts)))


def _escaped(text: str) -> str:
    """A text as a regular expression that matches nothing else: every mark of the syntax behind a backslash."""
    return "".join(f"\\{char}" if char in _REGEX_MARKS else char for char in text)


def _first_lines(message: str) -> str:
    """A message of the parser without its account of its own state."""
    return message.partition("<state>")[0].strip()[:_LONGEST_MESSAGE]


@hookimpl
def treadle_register_stages(register: Callable[[type[Stage | Select]], None]) -> None:
    """Register the stage."""
    register(Grammar)
