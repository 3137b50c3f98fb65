"""loss.png: the losses of a run over its steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle_server.errors import CheckpointError
from treadle_server.training.loss_log import LossRow

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Point = tuple[float, float]

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 24, 48, 56  # margins, in pixels
_OVERSAMPLING = 3  # drawn larger and scaled down: Pillow's lines have no soft edges
_BLACK, _GREY, _PALE, _BLUE, _SOFT_BLUE, _ORANGE = "#222222", "#888888", "#e5e5e5", "#1f5fa8", "#b9d0ea", "#d9730d"
_MOST_AVERAGED = 20  # steps, or a tenth of a short run


@dataclass(frozen=True, slots=True)
class _Axes:
    """The range of each axis, and where numbers lie in the picture."""

    first_step: float
    last_step: float
    lowest: float
    highest: float

    def place(self, step: float, loss: float) -> Point:
        """Return the pixel of a point."""
        across = (step - self.first_step) / (self.last_step - self.first_step)
        up = (loss - self.lowest) / (self.highest - self.lowest)
        x = _LEFT + across * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)
        return x * _OVERSAMPLING, y * _OVERSAMPLING


def draw_losses(rows: Sequence[LossRow], path: Path) -> None:
    """Write a picture of each step's loss, pale, its moving average, and the held-out losses. No rows: no picture.

    Raises CheckpointError where it cannot be written.
    """
    from PIL import Image, ImageDraw

    if not rows:
        return
    training = [(float(row.step), row.loss) for row in rows]
    held_out = [(float(row.step), row.held_out_loss) for row in rows if row.held_out_loss is not None]
    axes = _axes(training + held_out)
    image = Image.new("RGB", (_WIDTH * _OVERSAMPLING, _HEIGHT * _OVERSAMPLING), "white")
    draw = ImageDraw.Draw(image)
    _draw_axes(draw, axes)
    _draw_line(draw, axes, training, _SOFT_BLUE, 1)
    _draw_line(draw, axes, _smoothed(training), _BLUE, 2)
    _draw_line(draw, axes, held_out, _ORANGE, 2, dots=True)
    _draw_legend(draw, [("training, averaged", _BLUE), *([("held out", _ORANGE)] if held_out else [])])
    new = path.with_name(path.name + ".new")
    try:
        image.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS).save(new, format="PNG", optimize=True)
        new.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def nice_ticks(low: float, high: float, num_wanted: int = 6) -> list[float]:
    """Return round numbers from low to high, about as many as wanted: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / num_wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _axes(points: Sequence[Point]) -> _Axes:
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    margin = 0.05 * (max(losses) - min(losses)) or 0.5
    last = max(steps) if max(steps) > min(steps) else min(steps) + 1
    return _Axes(min(steps), last, min(losses) - margin, max(losses) + margin)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the moving average, as if nothing had been before the first point (Kingma and Ba 2015, section 3)."""
    kept = 1 - 1 / min(_MOST_AVERAGED, max(1, len(points) / 10))
    smoothed, total, weight = [], 0.0, 0.0
    for step, loss in points:
        total = kept * total + (1 - kept) * loss
        weight = kept * weight + (1 - kept)
        smoothed.append((step, total / weight))
    return smoothed


def _draw_axes(draw: ImageDraw, axes: _Axes) -> None:
    for loss in nice_ticks(axes.lowest, axes.highest):
        left, right = axes.place(axes.first_step, loss), axes.place(axes.last_step, loss)
        draw.line([left, right], fill=_PALE, width=_OVERSAMPLING)
        _text(draw, (left[0] - 8 * _OVERSAMPLING, left[1]), f"{loss:.4g}", "rm")
    for step in nice_ticks(axes.first_step, axes.last_step, 8):
        if step == int(step):
            x, y = axes.place(step, axes.lowest)
            draw.line([(x, y), (x, y + 5 * _OVERSAMPLING)], fill=_GREY, width=_OVERSAMPLING)
            _text(draw, (x, y + 8 * _OVERSAMPLING), f"{int(step)}", "mt")
    corners = [
        axes.place(*corner)
        for corner in (
            (axes.first_step, axes.highest),
            (axes.first_step, axes.lowest),
            (axes.last_step, axes.lowest),
        )
    ]
    draw.line(corners, fill=_GREY, width=_OVERSAMPLING)
    _text(draw, (_LEFT * _OVERSAMPLING, 24 * _OVERSAMPLING), "loss (nats a token)", "lm")
    _text(draw, ((_WIDTH - _RIGHT) * _OVERSAMPLING, (_HEIGHT - 12) * _OVERSAMPLING), "step", "rs")


def _draw_line(
    draw: ImageDraw, axes: _Axes, points: Sequence[Point], colour: str, width: int, *, dots: bool = False
) -> None:
    places = [axes.place(*point) for point in points]
    for start, end in itertools.pairwise(places):
        draw.line([start, end], fill=colour, width=width * _OVERSAMPLING)
    radius = 4 * _OVERSAMPLING
    for x, y in places if dots or len(places) == 1 else ():
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)


def _draw_legend(draw: ImageDraw, entries: Sequence[tuple[str, str]]) -> None:
    for number, (name, colour) in enumerate(entries):
        x, y = (_WIDTH - 190) * _OVERSAMPLING, (_TOP + 16 + 22 * number) * _OVERSAMPLING
        draw.line([(x - 30 * _OVERSAMPLING, y), (x - 8 * _OVERSAMPLING, y)], fill=colour, width=3 * _OVERSAMPLING)
        _text(draw, (x, y), name, "lm")


def _text(draw: ImageDraw, place: Point, text: str, anchor: str) -> None:
    """Draw a text; the anchor's letters say what of it lies at the place: l, m, r and t, m, s."""
    from PIL import ImageFont

    draw.text(place, text, fill=_BLACK, font=ImageFont.load_default(14 * _OVERSAMPLING), anchor=anchor)
