"""Every number that the handworked document prints as a result, beside the exact one.

A number that is restated elsewhere is listed there again; operands inside a sum are not. The exact value follows the
formulas from the document's own inputs all the way, not from numbers that were rounded or mistaken before. Only 6.5 and
6.6 go on from the head outputs that 6.4 assumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from treadle_plugin_api.backend import Array

from treadle_server.explain import document
from treadle_server.explain.arithmetic import DocumentSteps, HeadSteps, concatenate, project

_ROUNDING = 1e-12  # a printed 0.963 agrees with 0.9625: either neighbour of a half is right


@dataclass(frozen=True, slots=True)
class Printed:
    """One printed number.

    Attributes:
        section: where the document prints it, such as "2.3".
        what: what it is, such as "Q[1, 0]".
        text: as it is printed, such as "1.088" or "6.1%".
        exact: what the formula gives, in the unit of the text.
    """

    section: str
    what: str
    text: str
    exact: float

    @property
    def num_decimals(self) -> int:
        """Digits after the point, as printed."""
        return len(self.text.rstrip("%").partition(".")[2])

    @property
    def agrees(self) -> bool:
        """Whether the exact number, rounded to the printed digits, is the printed one."""
        printed = float(self.text.rstrip("%"))
        return abs(printed - self.exact) <= 0.5 * 10.0**-self.num_decimals + _ROUNDING


def printed_numbers(steps: DocumentSteps) -> list[Printed]:
    """Return every printed number in the document's order."""
    chapters = (_embedding, _projections, _scores, _softmax, _output, _two_heads, _logits, _temperature, _top_k, _top_p)
    return [number for chapter in chapters for number in chapter(steps)] + list(_exercises())


def _cells(section: str, what: str, text: str, exact: ArrayLike, names: Sequence[str] = ()) -> Iterator[Printed]:
    """Pair the numbers of a text with an array of any shape; `names` replace the indices of a row."""
    values = np.asarray(exact, np.float64)
    for index, printed, value in zip(np.ndindex(values.shape), text.split(), values.flat, strict=True):
        place = f"[{', '.join(map(str, index))}]" if index else ""
        name = f"{what} of {names[index[0]]}" if names else what + place
        yield Printed(section, name, printed, float(value) * (100 if printed.endswith("%") else 1))


def _dot(section: str, what: str, text: str, left: Array, right: Array) -> Iterator[Printed]:
    """The terms of a sum of products, and the sum, which is the last number of the text."""
    *terms, total = text.split()
    yield from _cells(section, f"{what}, term ", " ".join(terms), left * right)
    yield from _cells(section, what, total, float(left @ right))


_POSITIONS = ("position 1", "position 2")
_PE = "0.0000 1.0000 0.0000 1.0000  0.8415 0.5403 0.0001 0.9999  0.9093 -0.4161 0.0002 0.9999"
_X_INPUT = "0.50 1.20 0.80 1.10  1.14 1.24 0.20 1.60  1.51 -0.32 0.30 1.90"


def _embedding(steps: DocumentSteps) -> Iterator[Printed]:
    words = "0.50 0.20 0.80 0.10  0.30 0.70 0.20 0.60  0.60 0.10 0.30 0.90"
    yield from _cells("1.3", "word vector", words, steps.embedding)
    yield from _cells("1.3", "X", words, steps.embedding)
    yield from _cells("1.4", "angle of pair 1", "0.0001 0.0002", [1 / 100, 2 / 100], _POSITIONS)
    yield from _cells("1.4", "PE, worked", _PE, steps.positions)
    yield from _cells("1.4", "PE, as vectors", _PE, steps.positions)
    yield from _cells("1.4", "PE", _PE, steps.positions)
    added = "0.00 1.00 0.00 1.00  0.84 0.54 0.00 1.00  0.91 -0.42 0.00 1.00"
    yield from _cells("1.5", "PE, rounded", added, steps.positions)
    yield from _cells("1.5", "X_input, worked", _X_INPUT, steps.x)
    yield from _cells("1.5", "X_input", _X_INPUT, steps.x)


_Q = "1.255 1.615 1.975  1.088 1.404 1.732  0.967 1.269 1.582"
_K = "1.075 1.435 1.795  0.926 1.243 1.569  0.826 1.118 1.419"
_V = "1.450 1.810 2.170  1.245 1.555 1.875  1.095 1.380 1.675"
_PROJECTIONS = (
    ("2.3", "Q", ("0.05 0.48 0.56 0.165 1.255", "0.10 0.60 0.64 0.275 1.615", "0.15 0.72 0.72 0.385 1.975")),
    ("2.4", "K", ("0.025 0.42 0.52 0.11 1.075", "0.075 0.54 0.60 0.22 1.435", "0.125 0.66 0.68 0.33 1.795")),
    ("2.5", "V", ("0.10 0.60 0.64 0.11 1.45", "0.15 0.72 0.72 0.22 1.81", "0.20 0.84 0.80 0.33 2.17")),
)


def _projections(steps: DocumentSteps) -> Iterator[Printed]:
    head = steps.head
    matrices = {"Q": (_Q, head.q), "K": (_K, head.k), "V": (_V, head.v)}
    weights = {"Q": document.SINGLE_HEAD.q, "K": document.SINGLE_HEAD.k, "V": document.SINGLE_HEAD.v}
    for section, name, sums in _PROJECTIONS:
        for column, text in enumerate(sums):
            yield from _dot(section, f"{name}[0, {column}]", text, steps.x[0], np.array(weights[name])[:, column])
        if name == "Q":
            yield from _cells(section, "Q, as vectors", _Q, head.q)
        yield from _cells(section, name, *matrices[name])
    yield from _cells("2.6", "Q", _Q, head.q)
    yield from _cells("2.6", "K", _K, head.k)
    yield from _cells("2.6", "V", "1.450 1.810 2.170  1.245 1.555 1.875  0.967 1.269 1.582", head.v)


_SCORES = "7.212 6.268 5.645  6.135 5.347 4.813  5.468 4.789 4.313"
_SCALED = "4.165 3.619 3.260  3.543 3.088 2.779  3.157 2.765 2.491"


def _scores(steps: DocumentSteps) -> Iterator[Printed]:
    head = steps.head
    sums = ("1.349 2.318 3.545 7.212", "1.162 2.007 3.099 6.268", "1.037 1.806 2.802 5.645")
    for column, text in enumerate(sums):
        yield from _dot("3.1", f"QK^T[0, {column}]", text, head.q[0], head.k[column])
    yield from _cells("3.1", "QK^T", _SCORES, head.scores)
    yield from _cells("3.2", "square root of 3", "1.732", math.sqrt(3))
    yield from _cells("3.2", "QK^T", _SCORES, head.scores)
    yield from _cells("3.2", "QK^T / sqrt(3)", _SCALED, head.scaled)
    yield from _cells("3.2", "square root of 64", "8", math.sqrt(64))
    yield from _cells("3.2", "square root of 3, again", "1.73", math.sqrt(3))


def _softmax(steps: DocumentSteps) -> Iterator[Printed]:
    head = steps.head
    exponentials = np.exp(head.scaled[0])
    percent = "50.4% 29.3% 20.3%  42.8% 33.7% 23.5%  38.6% 34.2% 27.2%"
    yield from _cells("4.2", "scaled[0]", "4.165 3.619 3.260", head.scaled[0])
    yield from _cells("4.2", "exp(scaled[0])", "64.37 37.43 26.00", exponentials)
    yield from _cells("4.2", "their sum", "127.80", exponentials.sum())
    yield from _cells("4.2", "A[0]", "0.504 0.293 0.203", head.weights[0])
    yield from _cells("4.2", "sum of A[0]", "1.000", head.weights[0].sum())
    yield from _cells("4.3", "A", "0.504 0.293 0.203  0.428 0.337 0.235  0.386 0.342 0.272", head.weights)
    yield from _cells("4.3", "A, in words", percent, head.weights)
    yield from _cells("4.4", "A, in percent", percent, head.weights)
    yield from _cells("4.4", "A, heatmap", "0.50 0.29 0.20  0.43 0.34 0.24  0.39 0.34 0.27", head.weights)


def _output(steps: DocumentSteps) -> Iterator[Printed]:
    head = steps.head
    yield from _cells("5.2", "V", _V, head.v)
    sums = ("0.731 0.365 0.222 1.318", "0.912 0.456 0.280 1.648", "1.094 0.549 0.340 1.983")
    for column, text in enumerate(sums):
        yield from _dot("5.2", f"Z[0, {column}]", text, head.weights[0], head.v[:, column])
    yield from _cells("5.2", "Z[0], as a vector", "1.318 1.648 1.983", head.output[0])
    yield from _cells("5.3", "Z[1], as a vector", "1.279 1.597 1.913", head.output[1])
    yield from _cells("5.3", "Z[2], as a vector", "1.252 1.565 1.883", head.output[2])
    yield from _cells("5.3", "Z", "1.318 1.648 1.983  1.279 1.597 1.913  1.252 1.565 1.883", head.output)


def _two_heads(steps: DocumentSteps) -> Iterator[Printed]:
    first, second = steps.heads
    assumed = concatenate(*np.array(document.ASSUMED_OUTPUTS))
    w_o = np.array(document.W_O)
    concatenated = "1.32 1.65 1.40 1.75  1.28 1.60 1.35 1.68  1.25 1.57 1.30 1.62"
    yield from _cells("6.3", "parameters of two heads of 2", "16", _num_parameters(steps.heads))
    yield from _cells("6.3", "parameters of one head of 4", "16", document.DIM * 4)
    yield from _cells("6.4", "X_input", _X_INPUT, steps.x)
    yield from _cells("6.4", "Z1 (assumed)", "1.32 1.65  1.28 1.60  1.25 1.57", first.output)
    yield from _cells("6.4", "Z2 (assumed)", "1.40 1.75  1.35 1.68  1.30 1.62", second.output)
    yield from _cells("6.5", "Z_concat, as vectors", concatenated, assumed)
    yield from _cells("6.5", "Z_concat", concatenated, assumed)
    yield from _dot("6.6", "output[0, 0]", "0.132 0.825 0.210 0.963 2.130", assumed[0], w_o[:, 0])
    output = "2.130 2.665 3.195 3.728  2.066 2.587 3.103 3.622  2.018 2.530 3.037 3.548"
    yield from _cells("6.6", "output", output, project(assumed, w_o))


def _num_parameters(heads: Sequence[HeadSteps]) -> int:
    """Numbers in one projection of every head: dim rows, a column for each dimension of a head."""
    return sum(document.DIM * head.q.shape[1] for head in heads)


def _logits(steps: DocumentSteps) -> Iterator[Printed]:
    exponentials = np.exp(steps.logits[0])
    words = document.VOCABULARY
    yield from _cells("7.3", "exp(logit)", "1.105 0.607 9.974 3.320 2.226 0.741", exponentials, words)
    yield from _cells("7.3", "their sum", "17.973", exponentials.sum())
    yield from _cells("7.3", "P", "6.1% 3.4% 55.5% 18.5% 12.4% 4.1%", steps.probabilities[0], words)
    yield from _cells("7.3", "sum of P", "100%", steps.probabilities[0].sum())


_TEMPERATURES = (
    (
        0.3,
        "0.33 -1.67 7.67 4.00 2.67 -1.00",
        "1.39 0.19 2143 54.6 14.4 0.368",
        "0.06% 0.01% 94.3% 2.4% 0.6% 0.02%",
    ),
    (0.7, "0.14 -0.71 3.29 1.71 1.14 -0.43", "1.15 0.49 26.8 5.53 3.13 0.65", "2.8% 1.2% 65.2% 13.5% 7.6% 1.6%"),
    (1.5, "0.07 -0.33 1.53 0.80 0.53 -0.20", "1.07 0.72 4.62 2.23 1.70 0.82", "8.0% 5.4% 34.5% 16.6% 12.7% 6.1%"),
)


def _temperature(steps: DocumentSteps) -> Iterator[Printed]:
    words, cat = document.VOCABULARY, document.VOCABULARY.index("猫")
    for temperature, scaled, exponentials, probabilities in _TEMPERATURES:
        logits = steps.logits[0] / temperature
        yield from _cells("8.2", f"T = {temperature}: logit / T", scaled, logits, words)
        yield from _cells("8.2", f"T = {temperature}: exp", exponentials, np.exp(logits), words)
        yield from _cells("8.2", f"T = {temperature}: P", probabilities, steps.tempered[temperature], words)
    yield from _cells("8.2", "T = 1.0: P", "6.1% 3.4% 55.5% 18.5% 12.4% 4.1%", steps.tempered[1.0], words)
    for temperature, text in ((0.3, "94.3%"), (0.7, "65%"), (1.0, "55%"), (1.5, "34%")):
        yield from _cells("8.2", f"T = {temperature}: P of 猫, in words", text, steps.tempered[temperature][cat])
    yield from _chart("T to 0 (as T = 0.3)", "94% 2% 4%", steps.tempered[0.3], "猫 追")
    yield from _chart("T = 1.0", "55% 19% 12% 14%", steps.tempered[1.0], "猫 追 我")
    yield from _chart("T to infinity (the limit)", "35% 25% 20% 20%", np.full(6, 1 / 6), "猫 追 我")


def _chart(what: str, text: str, probabilities: Array, words: str) -> Iterator[Printed]:
    """A bar chart of 8.3: some words, then all the others together."""
    shown = [float(probabilities[document.VOCABULARY.index(word)]) for word in words.split()]
    names = [*words.split(), "all others"]
    yield from _cells("8.3", f"{what}: P", text, [*shown, 1 - sum(shown)], names)


_SORTED = "猫 追 我 <PAD> 爱 老鼠"


def _ordered(probabilities: Array, words: str) -> Array:
    return probabilities[[document.VOCABULARY.index(word) for word in words.split()]]


def _top_k(steps: DocumentSteps) -> Iterator[Printed]:
    # The document's list is not quite sorted here: 老鼠 stands before 爱.
    order = "猫 追 我 <PAD> 老鼠 爱"
    words, full = order.split(), _ordered(steps.probabilities[0], order)
    kept = _ordered(steps.top_k, order)
    for what in ("P, sorted", "P, cut after three"):
        yield from _cells("9.2", what, "0.555 0.185 0.124 0.061 0.034 0.041", full, words)
    yield from _cells("9.2", "P of the first three together", "0.864", full[: document.TOP_K].sum())
    yield from _cells("9.2", "P after top-k", "0.642 0.214 0.144 0.000 0.000 0.000", kept, words)
    yield from _cells("9.2", "P after top-k, in percent", "64.2% 21.4% 14.4%", kept[:3], words)


def _top_p(steps: DocumentSteps) -> Iterator[Printed]:
    words, full = _SORTED.split(), _ordered(steps.probabilities[0], _SORTED)
    kept = _ordered(steps.top_p, _SORTED)
    num_kept = int(np.count_nonzero(kept))
    printed, running = "0.555 0.185 0.124 0.061 0.041 0.034", "0.555 0.740 0.864 0.925 0.966 1.000"
    yield from _cells("10.2", "P, sorted", printed, full, words)
    yield from _cells("10.2", "running total", running, full.cumsum(), words)
    yield from _cells("10.2", "running total, worked", "0.555 0.740 0.864 0.925", full[:4].cumsum(), words)
    yield from _cells("10.2", "words kept", "4", num_kept)
    yield from _cells("10.2", "P of the kept words together", "0.925", full[:num_kept].sum())
    yield from _cells("10.2", "P after top-p", "0.600 0.200 0.134 0.066 0.000 0.000", kept, words)
    yield from _cells("10.3", "P, beside top-k", printed, full, words)
    yield from _cells("10.3", "P, beside top-p", printed, full, words)
    yield from _cells("10.3", "running total", running, full.cumsum(), words)
    yield from _cells("10.3", "words that top-p keeps", "4", num_kept)
    yield from _cells("10.3", "words that top-k keeps", "3", np.count_nonzero(steps.top_k))


def _exercises() -> Iterator[Printed]:
    """The answers to the five exercises; the fourth has no number."""
    x, w_q = np.array([1.0, 0.0, 1.0, 0.0]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    yield from _cells("exercise 1", "Q", "2 0", x @ w_q)
    exponentials = np.exp([3.0, 1.0])
    yield from _cells("exercise 2", "exp", "20.09 2.72", exponentials)
    yield from _cells("exercise 2", "their sum", "22.81", exponentials.sum())
    yield from _cells("exercise 2", "weights", "0.881 0.119", exponentials / exponentials.sum())
    shape = concatenate(np.zeros((2, 3)), np.zeros((2, 3))).shape
    yield from _cells("exercise 3", "shape", "2 6", shape)
    yield from _cells("exercise 5", "running total", "0.50 0.75 0.90", np.cumsum([0.50, 0.25, 0.15]))
