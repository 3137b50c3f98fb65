"""Learning rates over the steps: a schedule is a function from the step, 0 for the first, to the rate."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(lr: float, *, warmup_steps: int = 0) -> Schedule:
    """Return a schedule that rises over the warm-up, in equal parts, and stays."""
    return lambda step: lr * _warmup(step, warmup_steps)


def linear(lr: float, *, num_steps: int, warmup_steps: int = 0, final_lr: float = 0.0) -> Schedule:
    """Return a schedule that falls in a straight line from the warm-up's end to final_lr at num_steps."""
    return lambda step: _fall(step, lr, final_lr, num_steps, warmup_steps, lambda share: 1 - share)


def cosine(lr: float, *, num_steps: int, warmup_steps: int = 0, final_lr: float = 0.0) -> Schedule:
    """Return a schedule that falls along half a cosine (Loshchilov and Hutter 2017), and stays at final_lr."""
    return lambda step: _fall(
        step, lr, final_lr, num_steps, warmup_steps, lambda share: 0.5 * (1 + math.cos(math.pi * share))
    )


def _fall(
    step: int, lr: float, final_lr: float, num_steps: int, warmup_steps: int, height: Callable[[float], float]
) -> float:
    if step < warmup_steps:
        return lr * _warmup(step, warmup_steps)
    share = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return final_lr + (lr - final_lr) * height(share)


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
