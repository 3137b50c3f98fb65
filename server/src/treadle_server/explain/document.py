"""The inputs of the handworked document: a sentence of three words, and every number it asks the reader to start from.

The document ("Transformer Training Computation Matrix by Matrix", 2026-04-29) works a transformer by hand. Its matrices
are kept as it writes them: a row of a weight is an input, `[in, out]`. Chapters 2 to 5 have one head of 3 without a
mask, chapter 6 two heads of 2; the logits of chapters 7 to 10 are given, not computed.
"""

from __future__ import annotations

from typing import NamedTuple

Matrix = tuple[tuple[float, ...], ...]

DIM = 4
HEADS_DIM = 2  # of each of the two heads of chapter 6

VOCABULARY = ("<PAD>", "老鼠", "猫", "追", "我", "爱")
ENGLISH = ("padding, also the end", "mouse", "cat", "chases", "I", "loves")
SENTENCE_IDS = (2, 3, 1)
WORDS = tuple(VOCABULARY[i] for i in SENTENCE_IDS)

# 1.3, one row a word of the vocabulary.
EMBEDDING: Matrix = (
    (0.00, 0.00, 0.00, 0.00),
    (0.60, 0.10, 0.30, 0.90),
    (0.50, 0.20, 0.80, 0.10),
    (0.30, 0.70, 0.20, 0.60),
    (0.70, 0.50, 0.10, 0.40),
    (0.20, 0.90, 0.70, 0.30),
)


class HeadWeights(NamedTuple):
    """The three projections of one attention head, each `[dim, head_dim]`."""

    q: Matrix
    k: Matrix
    v: Matrix


# 2.2
SINGLE_HEAD = HeadWeights(
    q=((0.10, 0.20, 0.30), (0.40, 0.50, 0.60), (0.70, 0.80, 0.90), (0.15, 0.25, 0.35)),
    k=((0.05, 0.15, 0.25), (0.35, 0.45, 0.55), (0.65, 0.75, 0.85), (0.10, 0.20, 0.30)),
    v=((0.20, 0.30, 0.40), (0.50, 0.60, 0.70), (0.80, 0.90, 1.00), (0.10, 0.20, 0.30)),
)

# 6.4
TWO_HEADS = (
    HeadWeights(
        q=((0.1, 0.2), (0.4, 0.5), (0.7, 0.8), (0.15, 0.25)),
        k=((0.05, 0.15), (0.35, 0.45), (0.65, 0.75), (0.1, 0.2)),
        v=((0.2, 0.3), (0.5, 0.6), (0.8, 0.9), (0.1, 0.2)),
    ),
    HeadWeights(
        q=((0.3, 0.4), (0.5, 0.6), (0.8, 0.9), (0.2, 0.3)),
        k=((0.1, 0.2), (0.4, 0.5), (0.7, 0.8), (0.15, 0.25)),
        v=((0.3, 0.4), (0.6, 0.7), (0.9, 1.0), (0.2, 0.3)),
    ),
)
# 6.4 assumes these outputs of the two heads to shorten the work; 6.5 and 6.6 go on from them.
ASSUMED_OUTPUTS = (
    ((1.32, 1.65), (1.28, 1.60), (1.25, 1.57)),
    ((1.40, 1.75), (1.35, 1.68), (1.30, 1.62)),
)
# 6.6
W_O: Matrix = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8), (0.15, 0.25, 0.35, 0.45), (0.55, 0.65, 0.75, 0.85))

# 7.2, one row a position.
LOGITS: Matrix = (
    (0.1, -0.5, 2.3, 1.2, 0.8, -0.3),
    (0.2, 0.9, -0.2, 2.1, 0.5, 1.5),
    (-0.1, 2.5, 0.3, 0.7, -0.4, 1.8),
)
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)  # 8.2
TOP_K = 3  # 9.2
TOP_P = 0.9  # 10.2

# 12: the word that follows each position. The document ends its sentence with <EOS>, which its vocabulary lacks;
# <PAD> stands for it, as in the bundled model.
TARGET_IDS = (3, 1, 0)


class Setting(NamedTuple):
    """One row of the table of 11.2: the preset made of it, the task in words, and the ranges it allows."""

    preset: str
    task: str
    temperature: tuple[float, float]
    top_p: float
    top_k: int


SETTINGS = (
    Setting("code", "writing code", (0.0, 0.3), 1.0, 1),
    Setting("maths", "proofs in mathematics", (0.0, 0.2), 1.0, 1),
    Setting("mail", "formal letters", (0.3, 0.5), 0.9, 50),
    Setting("qa", "answering questions", (0.5, 0.7), 0.9, 40),
    Setting("chat", "everyday conversation", (0.7, 0.9), 0.95, 50),
    Setting("creative", "creative writing", (0.9, 1.2), 0.95, 100),
    Setting("brainstorming", "brainstorming", (1.0, 1.5), 0.8, 200),
    Setting("role_play", "playing a role", (0.8, 1.0), 0.95, 80),
)
