"""Makes DOCUMENT.md: the document's printed numbers beside the exact ones.

    python -m treadle_server.explain.comparison

writes it anew beside this file; a test checks that it is current.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from treadle_server.explain.arithmetic import work_document
from treadle_server.explain.printed import Printed, printed_numbers

PATH = Path(__file__).with_name("DOCUMENT.md")

_PREAMBLE = """\
# The handworked document, checked

`treadle explain` follows "Transformer Training Computation Matrix by Matrix" (2026-04-29), which works the sentence
猫 追 老鼠 through a transformer by hand. Its formulas are right; its arithmetic has slips, and a slip is carried into
what follows. So the formulas rule: treadle computes every matrix from the document's own inputs, in float64, and this
page lists each result that the document prints beside the exact one.

*Agrees* means: the exact number, rounded to the printed digits, is the printed one. Later numbers are compared with
what the formulas give from the start, so one early slip makes many numbers differ. 6.5 and 6.6 are the exception: they
are compared with what follows from the head outputs that 6.4 assumes, as the document does.

Where the slips begin:

- 1.4 divides the positions of the second pair of dimensions by 10000² where its formula gives 10000^(2/4) = 100, and
  cuts the cosine of 0.01 off where it should round it up. The rows of 追 and 老鼠 inherit this in chapters 2 to 5.
- 2.3 to 2.5 leave out the work for the rows of 追 and 老鼠, and print rows that do not follow from its own X_input
  either. 2.6 repeats a row of Q as the last row of V.
- 6.4 assumes the outputs of the heads; 6.6 multiplies them by W_o, and most of its sums are wrong.
- 7.3, 8.2, 9.2 and exercise 2 go on from numbers they have rounded, which moves a last digit here and there. Beyond
  that, 8.2 divides by sums that are not those of its own exponentials at T = 0.3, 0.7 and 1.5: its probabilities do not
  add up to 1. 8.3 draws charts from them, and one of an infinite temperature that is far from even.
- 9.2 lists 老鼠 before 爱, though it is less likely; nothing follows from it.

Made by `python -m treadle_server.explain.comparison`; a test checks that it is current.
"""


def make_page() -> str:
    """Return the text of DOCUMENT.md."""
    numbers = printed_numbers(work_document())
    num_agreeing = sum(number.agrees for number in numbers)
    summary = f"Of {len(numbers)} printed numbers {num_agreeing} agree and {len(numbers) - num_agreeing} do not."
    return "\n".join([_PREAMBLE, summary, "", *_chapters(numbers)])


def _chapters(numbers: Iterable[Printed]) -> Iterator[str]:
    for section, group in groupby(numbers, key=lambda number: number.section):
        yield f"## {section[0].upper()}{section[1:]}"
        yield ""
        yield "| number | printed | exact | agrees |"
        yield "|---|---|---|---|"
        for number in group:
            yield _row(number)
        yield ""


def _row(number: Printed) -> str:
    unit = "%" if number.text.endswith("%") else ""
    exact = f"{number.exact:.{number.num_decimals + 3}f}{unit}"
    return f"| {number.what} | {number.text} | {exact} | {'yes' if number.agrees else '**no**'} |"


if __name__ == "__main__":
    PATH.write_text(make_page(), encoding="utf-8")
