"""Chapters 1 to 6 of the walk through the handworked document: from words to the output of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from treadle_server.explain import document
from treadle_server.explain.arithmetic import DocumentSteps, HeadSteps, concatenate, project
from treadle_server.explain.blocks import Block, Chapter, Formula, Heatmap, Matrix, Note, Table, Text

WORDS = document.WORDS
_DIMS = tuple(f"dim {i}" for i in range(document.DIM))

# Makes the note on what the document prints in some of its sections; none where it prints nothing wrong.
SlipNote = Callable[..., Sequence[Note]]


def attention_chapters(steps: DocumentSteps, slips: SlipNote) -> list[Chapter]:
    """Return chapters 1 to 6."""
    return [
        Chapter("1  Words become numbers", [*_embedding(steps), *slips("1.3", "1.4", "1.5")]),
        Chapter("2  Query, key and value", [*_projections(steps.head), *slips("2.3", "2.4", "2.5", "2.6")]),
        Chapter("3  Scores: how well do two words match?", [*_scores(steps.head), *slips("3.1", "3.2")]),
        Chapter("4  Softmax: from scores to shares", [*_weights(steps.head), *slips("4.2", "4.3", "4.4")]),
        Chapter("5  Output: a mixture of values", [*_output(steps.head), *slips("5.2", "5.3")]),
        Chapter("6  Several heads", [*_heads(steps), *slips("6.3", "6.4", "6.5", "6.6")]),
    ]


def _embedding(steps: DocumentSteps) -> list[Block]:
    vocabulary = zip(range(len(document.VOCABULARY)), document.VOCABULARY, document.ENGLISH, strict=True)
    return [
        Text(
            "A computer cannot calculate with words, so every word gets a number, its id. This model knows six "
            "words. The sentence 猫 追 老鼠, the cat chases the mouse, is the ids 2, 3 and 1."
        ),
        Table(["id", "word", "English"], [[str(i), word, english] for i, word, english in vocabulary]),
        Text(
            "An id says nothing about a word, so each id is looked up in a table that holds four numbers a word. "
            "Training finds them, and words that are used alike end up with similar numbers. Stacked in the order of "
            "the sentence they make a matrix, one row a word."
        ),
        Formula("X = rows 2, 3 and 1 of the embedding table"),
        Matrix("X", steps.embedding, WORDS, _DIMS),
        Text(
            "So far 'the cat chases the mouse' and 'the mouse chases the cat' hold the same rows. To tell the order, "
            "every position gets a pattern of its own, made of waves: the first two numbers change fast from one "
            "position to the next, the last two slowly, like the hands of a clock."
        ),
        Formula("PE(pos, 2i)   = sin(pos / 10000^(2i/4))\nPE(pos, 2i+1) = cos(pos / 10000^(2i/4))"),
        Matrix("PE", steps.positions, [f"position {i}" for i in range(3)], _DIMS),
        Text("The two are added, number by number. The result knows which word it is and where it stands."),
        Formula("X_input = X + PE"),
        Matrix("X_input", steps.x, WORDS, _DIMS),
    ]


def _projections(head: HeadSteps) -> list[Block]:
    weights = document.SINGLE_HEAD
    blocks: list[Block] = [
        Text(
            "Next, words look at each other; that is called attention. For it each word is turned into three short "
            "lists of numbers. Its query asks: what am I looking for? Its key answers: what do I have to offer? Its "
            "value is what it hands over to those that look at it."
        ),
        Text(
            "Each of the three is a matrix product: every number of a word's row is multiplied by a weight, and the "
            "products are added up. The weights are learned in training; here they are given."
        ),
    ]
    for letter, matrix, values, worked in (
        ("Q", weights.q, head.q, "0.50·0.10 + 1.20·0.40 + 0.80·0.70 + 1.10·0.15"),
        ("K", weights.k, head.k, "0.50·0.05 + 1.20·0.35 + 0.80·0.65 + 1.10·0.10"),
        ("V", weights.v, head.v, "0.50·0.20 + 1.20·0.50 + 0.80·0.80 + 1.10·0.10"),
    ):
        small = letter.lower()
        blocks += [
            Matrix(f"W_{small}", np.array(matrix), _DIMS, [f"{small}{i}" for i in range(3)]),
            Formula(f"{letter} = X_input · W_{small}\n{letter}[0, 0] = {worked} = {values[0, 0]:.3f}"),
            Matrix(letter, values, WORDS, [f"{small}{i}" for i in range(3)]),
        ]
    return blocks


def _scores(head: HeadSteps) -> list[Block]:
    terms = " + ".join(f"{q:.3f}·{k:.3f}" for q, k in zip(head.q[0], head.k[0], strict=True))
    return [
        Text(
            "How much should one word look at another? Multiply the query of the one with the key of the other, "
            "number by number, and add up: the better they fit, the larger the score. Rows are the words that look, "
            "columns those that are looked at."
        ),
        Formula(f"S = Q · Kᵀ\nS[0, 0] = {terms} = {head.scores[0, 0]:.3f}"),
        Matrix("S", head.scores, WORDS, WORDS),
        Text(
            "The longer the lists, the larger such sums grow, and with large scores the next step would give "
            "everything to one word. Dividing by the square root of the length, here of 3, keeps them moderate."
        ),
        Formula("S / √3 = S / 1.732"),
        Matrix("S / √3", head.scaled, WORDS, WORDS),
    ]


def _weights(head: HeadSteps) -> list[Block]:
    row = head.scaled[0]
    exponentials = np.exp(row)
    total = float(exponentials.sum())
    worked = [
        [word, f"{score:.3f}", f"{exponential:.2f}", f"{exponential:.2f} / {total:.2f} = {share:.3f}"]
        for word, score, exponential, share in zip(WORDS, row, exponentials, head.weights[0], strict=True)
    ]
    return [
        Text(
            "Scores become shares of attention: all positive, and each row adds up to 1. The exponential makes every "
            "score positive and favours the large ones; dividing by the row's total makes shares. This is called "
            "softmax. For the first row, 猫:"
        ),
        Formula("A[i, j] = exp(S[i, j] / √3) / (sum over the row of exp(S / √3))"),
        Table(["looks at", "score", "exp(score)", "share"], worked),
        Text("All three rows as a heatmap, the darker the more attention. Each row tells where one word looks:"),
        Heatmap("A", head.weights, WORDS, WORDS),
    ]


def _output(head: HeadSteps) -> list[Block]:
    terms = " + ".join(f"{a:.3f}·{v:.3f}" for a, v in zip(head.weights[0], head.v[:, 0], strict=True))
    return [
        Text(
            "Every word now takes in what the others offer: their values, mixed by its shares of attention. A word "
            "with a large share counts for much in the mixture. So each row comes out knowing something about its "
            "company."
        ),
        Formula(f"Z = A · V\nZ[0, 0] = {terms} = {head.output[0, 0]:.3f}"),
        Matrix("Z", head.output, WORDS, [f"z{i}" for i in range(3)]),
        Text("These steps, from the queries to Z, are one attention head:"),
        Formula("Z = softmax(Q · Kᵀ / √3) · V"),
    ]


def _heads(steps: DocumentSteps) -> list[Block]:
    blocks: list[Block] = [
        Text(
            "One head has one way of looking. Words are related in several ways at once, though: who acts, on whom, "
            "what is alike. So a model runs several heads side by side, each with weights of its own. Here are two "
            "heads with lists of two numbers in place of one head with three; each does what chapters 2 to 5 did."
        ),
    ]
    for number, head in enumerate(steps.heads, 1):
        blocks += [
            Formula(f"Q{number} = X · W_q{number}    K{number} = X · W_k{number}    V{number} = X · W_v{number}"),
            Matrix(f"Q{number} | K{number} | V{number}", concatenate(head.q, head.k, head.v), WORDS, _columns(number)),
            Heatmap(f"A{number} = softmax(Q{number} · K{number}ᵀ / √2)", head.weights, WORDS, WORDS),
            Matrix(f"Z{number} = A{number} · V{number}", head.output, WORDS),
        ]
    assumed = project(concatenate(*np.array(document.ASSUMED_OUTPUTS)), np.array(document.W_O))
    return [
        *blocks,
        Text("The heads' outputs are set side by side, so that a word has four numbers again."),
        Formula("Z_concat = [Z1 | Z2]"),
        Matrix("Z_concat", steps.concatenated, WORDS),
        Text(
            "A last matrix product lets the heads' findings mix, and puts them into the form that the next step "
            "expects."
        ),
        Matrix("W_o", np.array(document.W_O), [f"z{i}" for i in range(4)], _DIMS),
        Formula("output = Z_concat · W_o"),
        Matrix("output", steps.output, WORDS, _DIMS),
        Text("The document shortens its work here: it assumes rounder outputs of the heads. From those, W_o makes:"),
        Matrix("output, from the assumed Z1 and Z2", assumed, WORDS, _DIMS),
    ]


def _columns(number: int) -> list[str]:
    return [f"{letter}{number}[{i}]" for letter in "QKV" for i in range(document.HEADS_DIM)]
