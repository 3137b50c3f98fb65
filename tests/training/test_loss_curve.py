"""The table and the picture of a run's losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from treadle_server.errors import CheckpointError
from treadle_server.training.loss_curve import draw_losses, nice_ticks
from treadle_server.training.loss_log import LossLog, LossRow, read_losses
from treadle_server.training.run_events import Evaluated, StepDone

BLUE, ORANGE = (31, 95, 168), (217, 115, 13)


def step_done(step: int) -> StepDone:
    """Return a step whose loss is its number over three."""
    return StepDone(
        step=step, num_steps=9, epochs=0.1, num_tokens=9, loss=step / 3, lr=0.1, grad_norm=1.0, tokens_per_s=5.0
    )


def colour_rows(path: Path, colour: tuple[int, int, int]) -> list[int]:
    """Return the pixel rows in which a colour is found, over the columns from left to right."""
    image = Image.open(path).convert("RGB")
    distances = np.abs(np.asarray(image, np.int64) - colour).max(axis=2)  # [height, width]
    distances[:, :80], distances[:100, 700:] = 255, 255  # labels, legend
    return [y for _, y in sorted((x, y) for y, x in np.argwhere(distances < 30).tolist())]


def test_the_picture_has_both_curves(tmp_path: Path) -> None:
    """Falling losses go down from left to right, held-out ones have their own colour."""
    rows = [LossRow(step, 9 - step / 10, 9 - step / 10 if step % 20 == 0 else None) for step in range(1, 81)]
    draw_losses(rows, tmp_path / "loss.png")
    blue = colour_rows(tmp_path / "loss.png", BLUE)
    assert blue[0] < blue[len(blue) // 2] < blue[-1]
    assert colour_rows(tmp_path / "loss.png", ORANGE)


@pytest.mark.parametrize("rows", [[LossRow(1, 2.0, None)], [LossRow(1, 0.0, 0.0), LossRow(2, 0.0, None)]])
def test_flat_and_single_losses_are_drawn(tmp_path: Path, rows: list[LossRow]) -> None:
    """One step, or losses that never change, have a picture too."""
    draw_losses(rows, tmp_path / "loss.png")
    assert colour_rows(tmp_path / "loss.png", BLUE)


def test_no_losses_are_no_picture(tmp_path: Path) -> None:
    """A run without a step draws nothing."""
    draw_losses([], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(CheckpointError, match=r"loss\.png: cannot be written"):
        draw_losses([LossRow(1, 2.0, None)], tmp_path / "missing" / "loss.png")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 6.0, [0, 1, 2, 3, 4, 5, 6]),
        (2.1, 2.19, [2.1, 2.12, 2.14, 2.16, 2.18]),
        (1, 1000, [200, 400, 600, 800, 1000]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    """Ticks are multiples of 1, 2 or 5 times a power of ten."""
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_the_table_is_exact(tmp_path: Path) -> None:
    """What is read back is what was added, to the last bit."""
    with LossLog(tmp_path / "loss.csv") as log:
        log.add(step_done(1), None)
        log.add(step_done(2), Evaluated(step=2, loss=0.1 + 0.2, is_best=True))
    assert read_losses(tmp_path / "loss.csv") == [LossRow(1, 1 / 3, None), LossRow(2, 2 / 3, 0.1 + 0.2)]


def test_a_resumed_table_forgets_later_steps(tmp_path: Path) -> None:
    """Rows after the step that is gone on from are cut off, half a row at the end too."""
    path = tmp_path / "loss.csv"
    with LossLog(path) as log:
        for step in (1, 2, 3):
            log.add(step_done(step), None)
    path.write_text(path.read_text() + "4,0.1,3")
    with LossLog(path, 2) as log:
        log.add(step_done(3), None)
    assert [row.step for row in read_losses(path)] == [1, 2, 3]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """A row that the disk does not take is an error with the file's name, at once."""
    with LossLog(tmp_path / "loss.csv") as log:
        log._file.close()
        log._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - the log closes it
        with pytest.raises(CheckpointError, match=r"loss\.csv: cannot be written: No space left"):
            log.add(step_done(1), None)


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    """A loss.csv that is none is refused when a run goes on."""
    (tmp_path / "loss.csv").write_text("a,tokens_per_s\n1,2\n")
    with pytest.raises(CheckpointError, match=r"loss\.csv: cannot be written or read"):
        LossLog(tmp_path / "loss.csv", 2)
