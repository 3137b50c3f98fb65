"""A Jinja environment for templates that nobody has read: bounded in time, memory and reach.

Jinja's own sandbox keeps a template away from Python's internals, but lets it run for ever and fill the memory. Nothing
can interrupt a thread inside one long C call, so the bounds rest on three things that hold together:

- no single operation is long: every value is weighed before an operation whose cost grows with it (`Budget.weigh`), and
  what an operation would make is worked out before it is made;
- there are no other operations: filters and methods are lists of what is allowed, so that nothing slips past;
- between operations the clock is looked at: in every pass of a loop, every call, filter and operator (`Budget.tick`).
  The clock is the thread's CPU time, so that a busy machine fails no honest template.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import chain
from typing import Any, Final, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace

from treadle_server.tokenizer.limits import (
    ELEMENT_WEIGHT,
    Budget,
    LimitError,
    check_bits,
    check_indent,
    check_percent_format,
    check_power,
)
from treadle_server.tokenizer.metered_code import MeteredCode

# What a template may call on Python's own types. The rest is left out because its result can be far larger than its
# arguments (`center`, `zfill`, `expandtabs`, `int.to_bytes`) or because no chat template has a use for it.
# fmt: off
_METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
        "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
        "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    }),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset(),
}
# Filters whose cost does not depend on what is inside the elements of a list.
_SHALLOW_FILTERS: Final = (
    "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse",
    "select", "selectattr",
)
_DEEP_FILTERS: Final = (
    "abs", "capitalize", "dictsort", "e", "escape", "float", "format", "groupby", "indent", "int", "join", "lower",
    "max", "min", "replace", "round", "safe", "sort", "string", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "wordcount",
)
# Filters that take the elements of a text, its characters, one by one.
_ELEMENT_FILTERS: Final = (
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique",
)
_DEEP_TESTS: Final = frozenset({
    "!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lower", "lt", "ne", "upper",
})
# fmt: on
# A width or precision of four digits and more, or a field inside a field's description.
_WIDE_BRACES: Final = re.compile(r":[^{}]*(\d{4}|\{)")


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering, with the names that chat templates expect."""

    code_generator_class = MeteredCode
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, budget: Budget) -> None:
        # Unoptimised: constants are not computed when compiling, where no budget watches.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _GenerationBlocks],
            finalize=_weigh_output,
            cache_size=0,
        )
        self.budget = budget
        self.tick = budget.tick
        self.filters = self._make_filters()
        tests = cast("Mapping[str, Callable[..., Any]]", TESTS)
        self.tests = {name: self._guard(test) if name in _DEEP_TESTS else test for name, test in tests.items()}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's: at most 100,000
            "dict": dict,
            "namespace": Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def weighed(self, value: object) -> object:
        """Return a value that is small enough to be compared or hashed."""
        if not isinstance(value, str):
            self.budget.weigh(value)
        self.budget.tick()
        return value

    def join_values(self, values: tuple[object, ...]) -> str:
        """Return the values written one after another, as the operator `~` does."""
        self.budget.tick()
        self.budget.weigh(values)
        return str(self.budget.admit("".join(map(str, values))))

    def concat(self, pieces: Iterable[str]) -> str:
        """Return the text of a macro or a block."""
        pieces = list(pieces)
        weight = sum(map(len, pieces))
        self.budget.expect(weight)
        self.budget.made(weight)
        return "".join(pieces)

    def cut(self, value: Any, place: slice) -> Any:
        """Return `value[start:stop:step]`."""
        self.budget.tick()
        return self.budget.admit(value[place])

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an element; a tuple as its key is weighed first, as hashing it reads all of it."""
        if isinstance(argument, tuple):
            self.budget.weigh(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow of the built-in types' methods only those that a chat template has a use for."""
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe form of a string's `format`, None for any other value."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None or _WIDE_BRACES.search(value.__self__) is None:
            return wrapped
        return functools.partial(_refuse, "a field of format() is too wide")

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro."""
        self.budget.tick()
        if isinstance(function, (Macro, LoopContext, BlockReference)) or function is Namespace:
            return super().call(context, function, *args, **kwargs)
        args = tuple(map(self.budget.collect, args))
        self.budget.weigh((args, kwargs))
        self._expect_of_method(function, args)
        return self.budget.admit(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator."""
        self.budget.tick()
        self.budget.weigh((left, right))
        if operator == "*":
            self._expect_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_percent_format(left)
        return self.budget.admit(super().call_binop(context, operator, left, right))

    def _expect_of_method(self, function: Any, args: tuple[Any, ...]) -> None:
        """Raise if a string method is about to make a value that is too large."""
        text = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if not isinstance(text, str):
            return
        self.budget.weigh(text)
        if name == "join" and args:
            self._expect_joined(text, args[0])
        elif name == "replace" and len(args) > 1:
            self._expect_replaced(text, *args[:2])

    def _expect_joined(self, separator: str, items: Any) -> None:
        num_items = len(items) if hasattr(items, "__len__") else 0
        self.budget.expect(self.budget.weigh(items) + len(separator) * num_items)

    def _expect_replaced(self, text: str, old: Any, new: Any) -> None:
        num_matches = text.count(str(old)) if old else len(text) + 1
        self.budget.expect(len(text) + num_matches * len(str(new)))

    def _expect_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() + right.bit_length())
            return
        times, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int) and hasattr(value, "__len__"):
            self.budget.expect(len(value) * times * (1 if isinstance(value, str) else ELEMENT_WEIGHT))

    def _make_filters(self) -> dict[str, Callable[..., Any]]:
        checks = self._filter_checks()
        filters: Mapping[str, Callable[..., Any]] = FILTERS
        allowed = {name: self._guard(filters[name], checks.get(name), deep=False) for name in _SHALLOW_FILTERS}
        allowed |= {name: self._guard(filters[name], checks.get(name)) for name in _DEEP_FILTERS}
        return allowed | {"tojson": self._guard(self._tojson), "sum": self._guard(self._sum)}

    def _filter_checks(self) -> dict[str, Callable[..., None]]:
        """Return what to look at before the filters that can make much out of little."""

        def join(_: Any, value: Any, d: str = "", attribute: Any = None) -> None:
            self._expect_joined(str(d), value)

        def replace(_: Any, s: str, old: str, new: str, count: Any = None) -> None:
            self._expect_replaced(str(s), old, new)

        def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
            check_indent(width)
            self._expect_replaced(str(s), "\n", " " * (1 + (width if isinstance(width, int) else len(width))))

        def round_(value: float, precision: int = 0, method: str = "common") -> None:
            check_power(10, precision)

        def format_(value: str, *args: Any, **kwargs: Any) -> None:
            check_percent_format(str(value))

        def elements(*args: Any, **kwargs: Any) -> None:
            for arg in args:
                self.budget.expect(ELEMENT_WEIGHT * len(arg) if isinstance(arg, str) else 0)

        each = dict.fromkeys(_ELEMENT_FILTERS, elements)
        return {**each, "join": join, "replace": replace, "indent": indent, "round": round_, "format": format_}

    def _guard(
        self, function: Callable[..., Any], check: Callable[..., None] | None = None, *, deep: bool = True
    ) -> Callable[..., Any]:
        """Return a filter or test that weighs its arguments, those of a deep one with all that is in them."""
        budget = self.budget

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget.tick()
            args = tuple(map(budget.collect, args))
            if deep:
                budget.weigh((args, kwargs))
            if check is not None:
                check(*args, **kwargs)
            return budget.admit(function(*args, **kwargs))

        return guarded

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON as transformers writes it: Unicode and HTML's signs as they are."""
        check_indent(indent or 0)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces, length = [], 0
        for piece in encoder.iterencode(value):
            length += len(piece)
            self.budget.expect(length)
            pieces.append(piece)
        return "".join(pieces)

    def _sum(self, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        """Return the sum of numbers; of anything else, `+` in turn would take time squared."""
        numbers = values if attribute is None else [self.getitem(value, attribute) for value in values]
        if not all(isinstance(number, (int, float)) for number in chain((start,), numbers)):
            raise TemplateError("sum: expected numbers")
        return functools.reduce(operator.add, numbers, start)


@pass_context
def _weigh_output(context: Context, value: object) -> object:
    """Let a value out only when it is small enough to be written. As it needs the context, no compiler calls it."""
    environment = context.environment
    if isinstance(environment, BoundedEnvironment):
        environment.weighed(value)
    return value


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    check_percent_format(pattern)
    return datetime.now().astimezone().strftime(pattern)


def _refuse(message: str, *_: object, **__: object) -> NoReturn:
    raise LimitError(message)
