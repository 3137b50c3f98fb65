"""Chapters 7 to 12 of the walk through the handworked document: from logits to a chosen word, and to the loss."""

from __future__ import annotations

import numpy as np
from treadle_plugin_api.backend import Array

from treadle_server.explain import document
from treadle_server.explain.arithmetic import DocumentSteps
from treadle_server.explain.blocks import (
    Block,
    Chapter,
    Distribution,
    Formula,
    Matrix,
    Table,
    Text,
    best_ids,
    distribution,
    number_text,
    percent_text,
)
from treadle_server.explain.document_attention import WORDS, SlipNote
from treadle_server.language_model.presets import PRESETS

_VOCABULARY = document.VOCABULARY


def decoding_chapters(steps: DocumentSteps, slips: SlipNote) -> list[Chapter]:
    """Return chapters 7 to 12."""
    return [
        Chapter("7  From logits to probabilities", [*_probabilities(steps), *slips("7.3")]),
        Chapter("8  Temperature: how daring?", [*_temperature(steps), *slips("8.2", "8.3")]),
        Chapter("9  Top-k: only the k best", [*_top_k(steps), *slips("9.2")]),
        Chapter("10  Top-p: as many as needed", [*_top_p(steps), *slips("10.2", "10.3")]),
        Chapter("11  Which setting for which task?", _settings()),
        Chapter("12  Loss: how wrong was the model?", _loss(steps)),
    ]


def _probabilities(steps: DocumentSteps) -> list[Block]:
    exponentials = np.exp(steps.logits[0])
    total = float(exponentials.sum())
    worked = [
        [word, number_text(logit), f"{exponential:.3f}", f"{exponential:.3f} / {total:.3f} = {percent_text(p)}"]
        for word, logit, exponential, p in zip(
            _VOCABULARY, steps.logits[0].tolist(), exponentials, steps.probabilities[0].tolist(), strict=True
        )
    ]
    return [
        Text(
            "After attention come a few more layers (the cat-mouse model below shows them), and at the end a last "
            "matrix product that gives every word of the vocabulary a score for being the next word. These scores "
            "are called logits. The document gives them, one row for each position of the sentence:"
        ),
        Matrix("logits", steps.logits, WORDS, _VOCABULARY),
        Text(
            "Softmax, known from chapter 4, turns a row of logits into probabilities. The chapters that follow go on "
            "with the first row, what the model says after 猫:"
        ),
        Formula("P(word) = exp(logit of the word) / (sum of exp over all words)"),
        Table(["word", "logit", "exp(logit)", "probability"], worked),
        _distribution("P", steps, steps.probabilities[0]),
    ]


def _temperature(steps: DocumentSteps) -> list[Block]:
    return [
        Text(
            "To choose the next word, the model draws one at random, by these probabilities. Temperature sets how "
            "daring the draw is: all logits are divided by it first. Below 1 the likely words get likelier still, "
            "above 1 the unlikely ones get a better chance. At 0 the most likely word is always taken."
        ),
        Formula("P(word) = softmax(logits / T)"),
        Table(
            ["word", *(f"T = {t}" for t in steps.tempered)],
            [
                [word, *(percent_text(float(probabilities[i])) for probabilities in steps.tempered.values())]
                for i, word in enumerate(_VOCABULARY)
            ],
        ),
        *(_distribution(f"T = {t}", steps, probabilities) for t, probabilities in steps.tempered.items()),
    ]


def _top_k(steps: DocumentSteps) -> list[Block]:
    kept = steps.top_k
    total = float(steps.probabilities[0][kept > 0].sum())
    return [
        Text(
            "Even an unlikely word is drawn now and then, and one odd word can spoil a text. Top-k rules it out: "
            "only the k most likely words stay in the draw, here 3. Their probabilities are divided by their total, "
            "so that they add up to 1 again."
        ),
        Formula(f"P'(word) = P(word) / {total:.3f} for the 3 most likely words, 0 for the others"),
        _distribution("after top-k = 3", steps, kept),
    ]


def _top_p(steps: DocumentSteps) -> list[Block]:
    before, after = steps.probabilities[0], steps.top_p
    return [
        Text(
            "Three words are too many when the model is sure, and too few when it is not. Top-p asks for a share "
            "instead: go through the words from the most likely one down, and stop as soon as together they reach p, "
            "here 0.9. The words up to there stay."
        ),
        Table(["word", "probability", "together", ""], _running_total(before, after)),
        Formula(f"P'(word) = P(word) / {float(before[after > 0].sum()):.3f} for the words that stay, 0 for the others"),
        _distribution("after top-p = 0.9", steps, after),
    ]


def _running_total(before: Array, after: Array) -> list[list[str]]:
    order = best_ids(before)
    totals = before[order].cumsum().tolist()
    return [
        [_VOCABULARY[i], f"{float(before[i]):.3f}", f"{together:.3f}", "stays" if after[i] > 0 else "ruled out"]
        for i, together in zip(order, totals, strict=True)
    ]


def _settings() -> list[Block]:
    return [
        Text(
            "Code and proofs have one right answer: take the likeliest word. A story needs surprise: let more words "
            "in. The document recommends a range for each task, and treadle has one setting within it by name, so "
            "that a request "
            'can say preset="creative", or the command line --preset creative.'
        ),
        Table(
            ["task", "temperature", "top-p", "top-k", "preset"],
            [
                [s.task, _range(s.temperature), f"{s.top_p:g}", str(s.top_k), _preset(s.preset)]
                for s in document.SETTINGS
            ],
        ),
    ]


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g} to {ends[1]:g}"


def _preset(name: str) -> str:
    return f"{name} (temperature {PRESETS[name]['temperature']:g})"


def _loss(steps: DocumentSteps) -> list[Block]:
    rows = []
    for position, (word, target) in enumerate(zip(WORDS, document.TARGET_IDS, strict=True)):
        probability = float(steps.probabilities[position, target])
        rows.append([word, _VOCABULARY[target], percent_text(probability), f"{steps.losses[position]:.3f}"])
    mean = " + ".join(f"{loss:.3f}" for loss in steps.losses)
    return [
        Text(
            "How do the weights come about? In training the model reads sentences whose next words are known. At "
            "every position its probability for the true next word is looked up. The loss is minus the logarithm of "
            "it: 0 if the model was certain and right, larger the less it expected the word."
        ),
        Formula("loss = -log P(true next word)"),
        Table(["after", "true next word", "P of it", "loss"], rows),
        Formula(f"mean loss = ({mean}) / 3 = {steps.loss:.3f}"),
        Text(
            "Training changes every weight a little in the direction that makes this number smaller, millions of "
            "times over. Temperature, top-k and top-p play no part in it. (The end of the sentence is <PAD> here, as "
            "the six words have no other sign for it.)"
        ),
    ]


def _distribution(name: str, steps: DocumentSteps, probabilities: Array) -> Distribution:
    """Bars in the order of the model's own probabilities, so that all pictures list the words alike."""
    labels = {i: _VOCABULARY[i] for i in best_ids(steps.probabilities[0])}
    return distribution(name, labels, probabilities)
