"""What vector kernels are emitted with: a signature's generator, 16 floats of every row at a time, sums over a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from treadle_kernels.emit import FLOATS, I32, LANES, Emitter, Value
from treadle_kernels.machine import Machine


def kernel(emit: Callable[..., Value | None]) -> Callable[..., Any]:
    """Make a numba signature's code generator of a function that emits into a builder; what it returns is a scalar."""

    def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        machine = Machine.of_host()
        made = emit(Emitter(builder, fused=machine.fused, pairs=machine.pairs), args)
        return context.get_dummy_value() if made is None else made

    return codegen


class Place:
    """16 floats at one offset of every row that an operation treats; with a mask, the last of them."""

    def __init__(self, e: Emitter, offset: Value, mask: Value | None) -> None:
        self._e, self._offset, self.mask = e, offset, mask

    def load(self, row: Value) -> Value:
        """Read from a row; lanes outside the mask are 0."""
        at = self._e.at(row, self._offset)
        return self._e.load_some(FLOATS, at, self.mask)

    def store(self, value: Value, row: Value) -> None:
        """Write to a row."""
        self._e.store_some(value, self._e.at(row, self._offset), self.mask)

    def store_rounded(self, value: Value, row: Value) -> None:
        """Write to a row of bfloat16."""
        at = self._e.at(row, self._e.builder.lshr(self._offset, self._e.number(1)))
        self._e.store_some(self._e.round(value), at, self.mask)

    def masked(self, value: Value, other: Value) -> Value:
        """The value in the lanes that count, `other` elsewhere."""
        return value if self.mask is None else self._e.builder.select(self.mask, value, other)


def each_vector(e: Emitter, count: Value, apply: Callable[[Place], None]) -> None:
    """Emit what apply does for 16 floats at a time, and for the rest."""
    whole = e.builder.and_(count, e.number(-LANES))
    with cgutils.for_range_slice(e.builder, e.number(0), whole, e.number(LANES)) as (place, _):
        apply(Place(e, e.times(place, 4), None))
    rest = e.builder.sub(count, whole)
    with e.builder.if_then(e.builder.icmp_signed(">", rest, e.number(0))):
        apply(Place(e, e.times(whole, 4), e.lanes_below(rest)))


def reduce(e: Emitter, count: Value, first: Value, combine: Callable[..., Value], part: Callable[..., Value]) -> Value:
    """Combine the parts of all places in one vector, by ascending place, and then its lanes; a scalar."""
    variable = cgutils.alloca_once_value(e.builder, first)

    def apply(place: Place) -> None:
        e.builder.store(combine(e.builder.load(variable), place.masked(part(place), first)), variable)

    each_vector(e, count, apply)
    folded = e.fold([e.builder.load(variable)], combine)
    return e.builder.extract_element(folded, ir.Constant(I32, 0))
