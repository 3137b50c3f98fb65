"""Works the handworked document out with Python's own floats, lists and `math`: the reference for treadle's operations.

    python tests/golden/document/make_matrices.py

writes matrices.json beside this file. Nothing of treadle or NumPy is used, every sum is exact to the last bit (fsum),
and the inputs are copied from the document once more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

Matrix = list[list[float]]

WORDS = [[0.50, 0.20, 0.80, 0.10], [0.30, 0.70, 0.20, 0.60], [0.60, 0.10, 0.30, 0.90]]  # 猫 追 老鼠
W_Q = [[0.10, 0.20, 0.30], [0.40, 0.50, 0.60], [0.70, 0.80, 0.90], [0.15, 0.25, 0.35]]
W_K = [[0.05, 0.15, 0.25], [0.35, 0.45, 0.55], [0.65, 0.75, 0.85], [0.10, 0.20, 0.30]]
W_V = [[0.20, 0.30, 0.40], [0.50, 0.60, 0.70], [0.80, 0.90, 1.00], [0.10, 0.20, 0.30]]
HEADS = [
    (
        [[0.1, 0.2], [0.4, 0.5], [0.7, 0.8], [0.15, 0.25]],
        [[0.05, 0.15], [0.35, 0.45], [0.65, 0.75], [0.1, 0.2]],
        [[0.2, 0.3], [0.5, 0.6], [0.8, 0.9], [0.1, 0.2]],
    ),
    (
        [[0.3, 0.4], [0.5, 0.6], [0.8, 0.9], [0.2, 0.3]],
        [[0.1, 0.2], [0.4, 0.5], [0.7, 0.8], [0.15, 0.25]],
        [[0.3, 0.4], [0.6, 0.7], [0.9, 1.0], [0.2, 0.3]],
    ),
]
W_O = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.15, 0.25, 0.35, 0.45], [0.55, 0.65, 0.75, 0.85]]
ASSUMED = [[1.32, 1.65, 1.40, 1.75], [1.28, 1.60, 1.35, 1.68], [1.25, 1.57, 1.30, 1.62]]
LOGITS = [[0.1, -0.5, 2.3, 1.2, 0.8, -0.3], [0.2, 0.9, -0.2, 2.1, 0.5, 1.5], [-0.1, 2.5, 0.3, 0.7, -0.4, 1.8]]
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
TARGETS = (3, 1, 0)


def times(a: Matrix, b: Matrix) -> Matrix:
    """Return the matrix product."""
    return [
        [math.fsum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a
    ]


def softmax(row: list[float]) -> list[float]:
    """Return exp(x) / sum of exp(x), as the document writes it."""
    exponentials = [math.exp(x) for x in row]
    total = math.fsum(exponentials)
    return [x / total for x in exponentials]


def attend(x: Matrix, w_q: Matrix, w_k: Matrix, w_v: Matrix) -> dict[str, Matrix]:
    """Return every matrix of one head without a mask."""
    q, k, v = times(x, w_q), times(x, w_k), times(x, w_v)
    scores = times(q, [list(column) for column in zip(*k, strict=True)])
    scaled = [[score / math.sqrt(len(w_q[0])) for score in row] for row in scores]
    weights = [softmax(row) for row in scaled]
    return {"q": q, "k": k, "v": v, "scores": scores, "scaled": scaled, "weights": weights, "output": times(weights, v)}


def position(index: int) -> list[float]:
    """Return PE(pos): sine and cosine of pos / 10000^0, then of pos / 10000^(2/4)."""
    return [function(index / 10000 ** (2 * i / 4)) for i in range(2) for function in (math.sin, math.cos)]


def kept(probabilities: list[float], ids: list[int]) -> list[float]:
    """Return the probabilities of some ids, made to sum to 1 again, and 0 for the rest."""
    total = math.fsum(probabilities[i] for i in ids)
    return [p / total if i in ids else 0.0 for i, p in enumerate(probabilities)]


def work_out() -> dict[str, object]:
    """Return every matrix of the document, by its formulas."""
    positions = [position(i) for i in range(3)]
    x = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(WORDS, positions, strict=True)]
    heads = [attend(x, *weights) for weights in HEADS]
    concatenated = [a + b for a, b in zip(heads[0]["output"], heads[1]["output"], strict=True)]
    first = softmax(LOGITS[0])
    best = sorted(range(6), key=lambda i: -first[i])
    nucleus = next(best[:n] for n in range(1, 7) if math.fsum(first[i] for i in best[:n]) >= 0.9)
    losses = [-math.log(softmax(row)[target]) for row, target in zip(LOGITS, TARGETS, strict=True)]
    return {
        "embedding": WORDS,
        "positions": positions,
        "x": x,
        "head": attend(x, W_Q, W_K, W_V),
        "heads": heads,
        "concatenated": concatenated,
        "output": times(concatenated, W_O),
        "assumed_output": times(ASSUMED, W_O),
        "probabilities": [softmax(row) for row in LOGITS],
        "tempered": {str(t): softmax([logit / t for logit in LOGITS[0]]) for t in TEMPERATURES},
        "top_k": kept(first, best[:3]),
        "top_p": kept(first, nucleus),
        "losses": losses,
        "loss": math.fsum(losses) / 3,
    }


def text() -> str:
    """Return the golden file's text, 15 significant digits a number: what every machine's `math` agrees on."""
    rounded = json.loads(json.dumps(work_out()), parse_float=lambda number: float(f"{float(number):.15g}"))
    return json.dumps(rounded, indent=1) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "matrices.json").write_text(text(), encoding="utf-8")
