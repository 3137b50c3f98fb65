"""Tells stories: a cast, an opening, a plot and perhaps a closing, drawn from a grammar."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from stories.characters import KINDS, Forms, chinese_character, english_character
from stories.grammar import Grammar, Plot, load_grammar
from stories.words import FORMS, capitalised

_T = TypeVar("_T")

LANGUAGES = ("english", "chinese")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(~?)([A-Za-z_]+)(\d?)(?:\.([a-z]+))?\}")

_NAMED_SHARE = 0.6  # stories whose characters have names
_UNOPENED_SHARE = 0.2  # of the others, those that begin with the plot at once
_CLOSING_SHARE = 0.4
_MORAL_SHARE = 0.2


def tell(language: str, seed: int) -> Iterator[str]:
    """Yield stories without end, each one paragraph; the same for the same seed, on every machine."""
    grammar = load_grammar(language)
    rng = random.Random(f"{language} {seed}")  # noqa: S311 - stories are no secrets
    while True:
        yield Story(language, grammar, rng).tell()


class Story:
    """One story while it is told: its cast, and the words that its slots have been given."""

    def __init__(self, language: str, grammar: Grammar, rng: random.Random) -> None:
        self._grammar = grammar
        self._rng = rng
        self._words: dict[str, str] = {}
        self._joint = " " if language == "english" else ""
        self._plot: Plot = self._choose(grammar.plots)
        self._named = self._plot.style == "named" or (not self._plot.style and rng.random() < _NAMED_SHARE)
        self._cast = self._make_cast(language)

    def tell(self) -> str:
        """Return the story's text."""
        patterns = [*self._opening(), *map(self._choose, self._plot.beats), *self._ending()]
        return self._joint.join(self._fill(pattern) for pattern in patterns)

    def _opening(self) -> list[str]:
        if self._plot.style or (not self._named and self._rng.random() < _UNOPENED_SHARE):
            return []
        return [self._choose(self._grammar.lists["opening_named" if self._named else "opening_plain"])]

    def _ending(self) -> list[str]:
        chance = 1.0 if self._plot.style else self._rng.random()
        if chance < _CLOSING_SHARE:
            return [self._choose(self._grammar.lists["closing"])]
        return [self._choose(self._grammar.lists["moral"])] if chance < _CLOSING_SHARE + _MORAL_SHARE else []

    # ---- the cast ---------------------------------------------------------------------------------------------------

    def _make_cast(self, language: str) -> dict[str, Forms]:
        genders = self._genders()
        cast = {kind: self._character(language, kind, genders[kind]) for kind in KINDS}
        hero, pal = KINDS if self._rng.random() < 0.5 else reversed(KINDS)
        return cast | {"hero": cast[hero], "pal": cast[pal]}

    def _genders(self) -> dict[str, str]:
        """Return who is she and who is he: never both the same, so that a pronoun tells who is meant."""
        female = self._choose(KINDS) if self._named else "mouse"
        return {kind: "female" if kind == female else "male" for kind in KINDS}

    def _character(self, language: str, kind: str, gender: str) -> Forms:
        own = {"trait": self._pick("trait"), "colour": self._pick(f"{kind}_colour")}
        fixed = own | {f"{kind}_colour": own["colour"]}

        def pick(name: str) -> str:
            return fixed.get(name) or _SLOT.sub(lambda slot: own[slot[2]], self._pick(name))

        if language == "chinese":
            return chinese_character(kind, named=self._named, pick=pick)
        return english_character(kind, named=self._named, gender=gender, pick=pick)

    # ---- patterns ---------------------------------------------------------------------------------------------------

    def _choose(self, options: Sequence[_T]) -> _T:
        return options[int(self._rng.random() * len(options))]  # random() is the same in every version of Python

    def _pick(self, name: str) -> str:
        return self._vary(self._choose(self._grammar.lists[name]))

    def _vary(self, pattern: str) -> str:
        return _CHOICE.sub(lambda found: self._choose(found[1].split("|")), pattern)

    def _fill(self, pattern: str) -> str:
        return _SLOT.sub(self._slot_text, self._vary(pattern))

    def _slot_text(self, slot: re.Match[str]) -> str:
        fresh, name, number, form = slot[1], slot[2], slot[3], slot[4] or ""
        key = name.lower()
        text = self._cast[key][form] if key in self._cast else FORMS[form](self._word(key, number, fresh=bool(fresh)))
        return capitalised(text) if name[0].isupper() else text

    def _word(self, name: str, number: str, *, fresh: bool) -> str:
        """Return the word of a slot: always the same in a story, and another for another number."""
        key = f"{name} {number}"
        if fresh:
            return self._pick(name)
        while key not in self._words:
            word = self._fill(self._choose(self._grammar.lists[name]))
            if word not in [used for other, used in self._words.items() if other.startswith(f"{name} ")]:
                self._words[key] = word
        return self._words[key]
