"""The walk through the handworked document: its own inputs through treadle's operations, chapter by chapter."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_server.explain.arithmetic import DocumentSteps, work_document
from treadle_server.explain.blocks import Note, Part
from treadle_server.explain.document_attention import attention_chapters
from treadle_server.explain.document_decoding import decoding_chapters
from treadle_server.explain.printed import Printed, printed_numbers

_INTRODUCTION = (
    "A language model guesses the next word of a text, again and again. This walk works one guess out by hand, for the "
    "sentence 猫 追 老鼠 (the cat chases the mouse), with the numbers of the document "
    "'Transformer Training Computation Matrix by Matrix'. Nothing is needed but adding, multiplying and patience."
)


def document_part(steps: DocumentSteps | None = None) -> Part:
    """Return the walk through the document."""
    steps = steps or work_document()
    numbers = printed_numbers(steps)

    def slips(*sections: str) -> Sequence[Note]:
        return _slips([number for number in numbers if number.section in sections])

    chapters = [*attention_chapters(steps, slips), *decoding_chapters(steps, slips)]
    return Part("The handworked document", _INTRODUCTION, chapters)


def _slips(numbers: Sequence[Printed]) -> Sequence[Note]:
    """Return a note for the reader who compares with the document, if it prints other numbers."""
    wrong = [number for number in numbers if not number.agrees]
    if not wrong:
        return []
    first = wrong[0]
    exact = f"{first.exact:.{first.num_decimals}f}{'%' if first.text.endswith('%') else ''}"
    return [
        Note(
            f"Compared with the document: of the {len(numbers)} numbers it prints in this chapter, {len(wrong)} "
            f"{'is' if len(wrong) == 1 else 'are'} not what its formulas give. In {first.section}, {first.what}: "
            f"printed {first.text}, exact {exact}."
        )
    ]
