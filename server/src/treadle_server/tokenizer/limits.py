"""How far a template may go, and what is left of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from jinja2.exceptions import TemplateError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

ELEMENT_WEIGHT: Final = 16  # an element of a list takes about as much memory as sixteen characters
_COLLECTIONS: Final[tuple[type[Any], ...]] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# A width or precision of four digits and more, or one taken from an argument.
_WIDE_PERCENT: Final = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\d{4}|\*)")
_MAX_INTEGER_BITS: Final = 4096
_MAX_INDENT: Final = 64


class LimitError(TemplateError):
    """Raised when a template runs past a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far a template may go. Characters count 1 each, elements of lists and mappings 16.

    Attributes:
        cpu_s: CPU time of one rendering, in seconds.
        max_output: characters of the rendered text.
        max_value: weight of any one value.
        max_made: weight of all values made on the way, together.
    """

    cpu_s: float = 1.0
    max_output: int = 4 << 20
    max_value: int = 2 << 20
    max_made: int = 64 << 20


class Budget:
    """What is left of the limits in one rendering, on the thread that made it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._made = 0
        self._deadline_s = time.thread_time() + limits.cpu_s

    def tick(self) -> None:
        """Raise once the time is over."""
        if time.thread_time() > self._deadline_s:
            raise LimitError(f"it took more than {self._limits.cpu_s:g} s")

    def expect(self, weight: int) -> None:
        """Raise if a value of this weight is too large to be made."""
        if weight > self._limits.max_value:
            raise LimitError(f"a value is larger than {self._limits.max_value} characters")

    def made(self, weight: int) -> None:
        """Count a new value."""
        self._made += weight
        if self._made > self._limits.max_made:
            raise LimitError(f"it made more than {self._limits.max_made} characters of text on the way")

    def output(self, length: int) -> None:
        """Raise if the rendered text is longer than allowed."""
        if length > self._limits.max_output:
            raise LimitError(f"the text is longer than {self._limits.max_output} characters")

    def weigh(self, value: Any) -> int:
        """Return the weight of a value written out in full, where what occurs twice counts twice; raise past the limit.

        Written out in full, forty lists that each hold the one before twice are longer than any memory.
        """
        weight, todo = 0, [value]
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, int):
                weight += item.bit_length() >> 3
            elif isinstance(item, Mapping):
                weight += ELEMENT_WEIGHT * 2 * len(item)
                todo += chain(item.keys(), item.values())
            elif isinstance(item, _COLLECTIONS):
                weight += ELEMENT_WEIGHT * len(item)
                todo += item
            elif isinstance(item, Namespace):
                raise LimitError("a namespace can only be used by its attributes")
            self.expect(weight)
        return weight

    def collect(self, value: Any) -> Any:
        """Return an iterator's elements as a list, counted; any other value as it is."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        items: list[Any] = []
        for item in value:
            self.tick()
            self.expect(ELEMENT_WEIGHT * len(items))
            items.append(item)
        return items

    def admit(self, value: Any) -> Any:
        """Count a value that an operation has just made, and return it."""
        value = self.collect(value)
        weight = 1
        if isinstance(value, str):
            weight = len(value)
        elif isinstance(value, _COLLECTIONS):
            weight = ELEMENT_WEIGHT * len(value)
        self.expect(weight)
        self.made(weight)
        return value


def check_percent_format(pattern: str) -> None:
    """Raise if a format string asks for a wide field, such as `%1000000d`."""
    if _WIDE_PERCENT.search(pattern):
        raise LimitError("a field of a format string is too wide")


def check_bits(num_bits: int) -> None:
    """Raise if an integer is very long."""
    if num_bits > _MAX_INTEGER_BITS:
        raise LimitError(f"an integer is longer than {_MAX_INTEGER_BITS} bits")


def check_power(base: Any, exponent: Any) -> None:
    """Raise if an integer power would be very long."""
    if isinstance(base, int) and isinstance(exponent, int):
        check_bits(base.bit_length() * abs(exponent))


def check_indent(width: int | str) -> None:
    """Raise if an indent is wide."""
    if (width if isinstance(width, int) else len(width)) > _MAX_INDENT:
        raise LimitError(f"an indent is wider than {_MAX_INDENT}")
