"""Forms of single words: articles and capitals in English, nouns without their measure word in Chinese."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_MEASURED = re.compile(r"一小?[个只条列顶把本颗辆盏张块碗片根粒罐盘]")


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalised(text: str) -> str:
    """Return a text that begins with a capital letter; unlike `str.capitalize` it leaves the others alone."""
    return text[:1].upper() + text[1:]


def without_measure(noun: str) -> str:
    """Return a Chinese noun without its number and measure word: 一个红皮球 is 红皮球."""
    return _MEASURED.sub("", noun, count=1)


FORMS: Mapping[str, Callable[[str], str]] = {
    "": lambda text: text,
    "a": with_article,
    "low": lambda text: text[:1].lower() + text[1:],
    "noun": without_measure,
}
