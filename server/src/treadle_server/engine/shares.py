"""Divides a step among the sequences that are ready: one token for each that decodes, a budget for those that prefill.

The budget is bounded, so that a long prompt never holds a stream up for long. Half of it goes to the sequence of the
first rank, which therefore finishes whatever else comes; the rest goes to the higher priority first, and among equals
to the shortest first, so that a short prompt hardly waits for long ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from treadle_server.engine.lane import Lane
from treadle_server.engine.sequence import Sequence


class Scheduled(NamedTuple):
    """A lane of a sequence and the number of its tokens that the next step computes, drafted ones included."""

    sequence: Sequence
    lane: Lane
    num_tokens: int


def divide(ready: Seq[Sequence], *, budget: int, budget_beside_decode: int) -> list[Scheduled]:
    """Return what each of the sequences, which come in order of rank, gets of a step."""
    prefilling = [s for s in ready if not s.is_decoding]
    shares = _prefill_shares(prefilling, budget if len(prefilling) == len(ready) else budget_beside_decode)
    return [item for s in ready for item in (_prefill(s, shares[id(s)]) if id(s) in shares else _decode(s))]


def _prefill_shares(prefilling: Seq[Sequence], budget: int) -> dict[int, int]:
    """Return the prompt tokens of each sequence in this step, by id."""
    shares = {id(s): 0 for s in prefilling}
    for sequence in prefilling[:1]:
        shares[id(sequence)] = min(_num_wanted(sequence), -(-budget // 2))
        budget -= shares[id(sequence)]
    for sequence in sorted(prefilling, key=lambda s: (-s.request.priority, _num_wanted(s))):
        more = min(_num_wanted(sequence) - shares[id(sequence)], budget)
        shares[id(sequence)] += more
        budget -= more
    return shares


def _num_wanted(sequence: Sequence) -> int:
    """Return the tokens that can be computed of a prefilling sequence; see `_prefill`."""
    lanes = sequence.lanes
    return sum(lane.num_remaining - (len(lanes) > 1) for lane in lanes)


def _decode(sequence: Sequence) -> list[Scheduled]:
    return [Scheduled(sequence, lane, 1 + lane.num_drafted) for lane in sequence.lanes]


def _prefill(sequence: Sequence, share: int) -> list[Scheduled]:
    """Divide a share over the lanes of a sequence. With several, each stops one token short: they decode together."""
    lanes = sorted(sequence.lanes, key=lambda lane: lane.num_remaining)
    items = []
    for position, lane in enumerate(lanes):
        num_tokens = min(lane.num_remaining - (len(lanes) > 1), share // (len(lanes) - position))
        share -= num_tokens
        items.append(Scheduled(sequence, lane, num_tokens))
    return [item for item in items if item.num_tokens]
