"""The two walks: the document with the model that continues it, and a model with any text."""

from __future__ import annotations

from treadle_server.explain import document
from treadle_server.explain.blocks import Part, Walk
from treadle_server.explain.document_walk import document_part
from treadle_server.explain.model_walk import ModelWalk, View
from treadle_server.language_model import LanguageModel

TITLE = "How a language model finds its next word"


def document_walk(cat_mouse: LanguageModel) -> Walk:
    """Return the walk through the handworked document, then through the bundled model with the same sentence."""
    sentence = " ".join(document.WORDS)
    knobs = {"temperature": 0.7, "top_k": document.TOP_K, "top_p": document.TOP_P}
    view = View(prompt=sentence, knobs=knobs, next_token=1, ends=True)
    model_part = ModelWalk(cat_mouse, view).part()
    introduction = (
        f"{model_part.introduction} It has the document's own embedding, positions and two heads; the rest was "
        "trained. What is new: it never looks ahead, as a model that writes must not, and attention is followed by "
        "the remaining steps of a layer."
    )
    return Walk(TITLE, [document_part(), Part(model_part.title, introduction, model_part.chapters)])


def model_walk(model: LanguageModel, view: View) -> Walk:
    """Return the walk through one pass of a model."""
    return Walk(TITLE, [ModelWalk(model, view).part()])
