"""What is written down about a training run: the loss curve as CSV and SVG, and the manifest."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from stories.model import write_json


class LossRow(NamedTuple):
    """A point of the loss curve: nats a token, of the steps since the point before and of held-out stories."""

    step: int
    learning_rate: float
    loss: float
    held_out_english: float
    held_out_chinese: float


def write_rows(path: Path, rows: Iterable[LossRow]) -> None:
    """Write the curve, one point a step: of a step that was taken twice, from a checkpoint, the later one."""
    by_step = {row.step: row for row in rows}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(LossRow._fields)
        for step, row in sorted(by_step.items()):
            writer.writerow([step, *(f"{value:.6g}" for value in row[1:])])


def read_rows(path: Path) -> list[LossRow]:
    """Return the points that a file holds; none when there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [LossRow(int(step), *map(float, values)) for step, *values in list(csv.reader(file))[1:]]


def write_curve(path: Path, rows: Sequence[LossRow]) -> None:
    """Draw the curves of training and of both held-out languages as SVG, 640 x 360."""
    last, top = rows[-1].step, max(row.loss for row in rows)
    curves = {"training": ("#555555", 2), "held out, English": ("#1f77b4", 3), "held out, Chinese": ("#d62728", 4)}
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="640" height="360" fill="white"/><path d="M50 20V320H620" fill="none" stroke="black"/>')
    for place, (name, (colour, column)) in enumerate(curves.items()):
        points = " ".join(f"{50 + 570 * row.step / last:.1f},{320 - 300 * row[column] / top:.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="480" y="{40 + 18 * place}" fill="{colour}">{name}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="44" y="{324 - 300 * share:.0f}" text-anchor="end">{top * share:.1f}</text>')
        parts.append(f'<text x="{50 + 570 * share:.0f}" y="336" text-anchor="middle">{last * share:.0f}</text>')
    parts.append('<text x="335" y="354" text-anchor="middle">step</text><text x="56" y="16">loss, nats a token</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8", newline="\n")


def write_manifest(folder: Path, training: Mapping[str, object], perplexity: Mapping[str, float]) -> None:
    """Write manifest.json for the files in the folder; `perplexity` is that of a held-out token, by language."""
    files = sorted(path for path in folder.iterdir() if path.name not in ("manifest.json", "README.md"))
    with safe_open(folder / "model.safetensors", framework="numpy") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in sorted(opened.keys())}
    made = "drawn and trained by weights/train_stories.py"
    content = {
        "name": folder.name,
        "source": "trained by weights/train_stories.py on the stories of weights/stories",
        "licence": "Apache-2.0",
        "tensor_dtype": "BF16",
        "num_parameters": sum(map(math.prod, shapes.values())),
        "num_bytes": sum(path.stat().st_size for path in files),
        "training": dict(training),
        "held_out_perplexity": {name: round(value, 4) for name, value in perplexity.items()},
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "tensors": {name: {"shape": shape, "made": made} for name, shape in shapes.items()},
    }
    write_json(folder / "manifest.json", content)
