"""The conformance suite for authors of losses and optimizers; `treadle_plugin_api.testing` has both names too.

def test_conforms():
    check_loss(FOCAL, gamma=1.0)
    check_optimizer(SIGNS)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_plugin_api.backend import Array
from treadle_plugin_api.loss import Floats, Loss, RowLosses, Targets
from treadle_plugin_api.optimizer import Optimizer
from treadle_plugin_api.training_contract import loss_problem, loss_problems, optimizer_problems

# Odd, and no multiple of any register width: code that assumes either fails here.
_NUM_ROWS, _VOCAB_SIZE = 5, 11
# Central differences in float64. The second step is for a function with a kink (clipping) within reach of the first.
_STEPS = (1e-5, 1e-7)
_GRAD_TOLERANCE = 1e-5


def check_loss(loss: Loss, /, **options: Any) -> None:
    """Check a loss with the given options; raises AssertionError that says what rule is broken.

    Checked: name, function and ranges; results of the right shapes and dtypes, finite also for huge logits; dlogits is
    the numeric gradient of the summed losses; losses and dlogits grow in proportion to the weights; a row's result does
    not depend on the rows beside it; logprobs are those of the targets; targets are left alone; the same twice.
    """
    if problems := list(loss_problems([loss])):
        raise AssertionError("; ".join(problems))
    case = _LossCase(loss, options)
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((_NUM_ROWS, _VOCAB_SIZE))
    targets = _targets(logits)
    for label, given in (
        ("float64 logits", logits),
        ("float32 logits", logits.astype(np.float32)),
        ("logits up to 1e4", (5e3 * logits).astype(np.float32)),
        ("equal logits", np.zeros_like(logits)),
    ):
        case.run(label, given, _targets(given))
    _check_gradient(case, logits, targets)
    _check_weights(case, logits, targets)
    _check_rows(case, logits, targets)


class _LossCase:
    """A loss with its options."""

    def __init__(self, loss: Loss, options: dict[str, Any]) -> None:
        self.loss, self.options = loss, options

    def fail(self, what: str) -> AssertionError:
        return AssertionError(f"loss {self.loss.name!r} {what}")

    def run(self, label: str, logits: Array, targets: Targets) -> RowLosses:
        """Call the loss with logits of its own and targets that cannot be written to; check what it returns."""
        given = logits.copy()
        for array in (targets.ids, targets.weights, targets.old_logprobs, targets.advantages):
            if array is not None:
                array.flags.writeable = False
        try:
            result = self.loss.function(given, targets, **self.options)
        except Exception as error:
            raise self.fail(f"on {label}: raised {type(error).__name__}: {error}") from error
        if (problem := loss_problem(logits, result)) is not None:
            raise self.fail(f"on {label}: {problem}")
        expected = _log_softmax(logits.astype(np.float64))[np.arange(len(logits)), targets.ids]
        if not np.allclose(result.logprobs, expected, rtol=1e-4, atol=1e-4):
            raise self.fail(f"on {label}: logprobs are not the log-probabilities of the targets")
        return RowLosses(result.losses.copy(), result.dlogits.copy(), result.logprobs.copy())


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)


def _targets(logits: Array) -> Targets:
    """Targets with weights and advantages of all kinds, sampled by a policy near that of the logits."""
    ids = np.array([3, 0, 10, 1, 3])
    logprobs = _log_softmax(logits.astype(np.float64))[np.arange(_NUM_ROWS), ids]
    old = logprobs + np.array([0.0, 0.3, -0.3, 0.05, -0.05])
    return Targets(ids, np.array([1.0, 0.5, 2.0, 1.0, 0.25]), old, np.array([1.0, -2.0, 0.5, 3.0, -1.0]))


def _check_gradient(case: _LossCase, logits: Floats, targets: Targets) -> None:
    dlogits = case.run("a batch", logits, targets).dlogits
    scale = max(1.0, float(np.abs(dlogits).max()))
    for place in np.ndindex(*logits.shape):
        slopes = [_slope(case, logits, targets, place, step) for step in _STEPS]
        if all(abs(slope - dlogits[place]) > _GRAD_TOLERANCE * scale for slope in slopes):
            raise case.fail(
                f"returned dlogits{list(place)} = {dlogits[place]:g}, but the summed losses change by {slopes[0]:g}"
            )


def _slope(case: _LossCase, logits: Floats, targets: Targets, place: tuple[int, ...], step: float) -> float:
    sums = []
    for change in (step, -step):
        moved = logits.copy()
        moved[place] += change
        sums.append(case.run("a batch", moved, targets).losses.sum())
    return float((sums[0] - sums[1]) / (2 * step))


def _check_weights(case: _LossCase, logits: Floats, targets: Targets) -> None:
    once = case.run("a batch", logits, targets)
    for factor in (0.0, 3.0):
        weighted = Targets(targets.ids, targets.weights * factor, targets.old_logprobs, targets.advantages)
        result = case.run(f"weights times {factor:g}", logits, weighted)
        for name in ("losses", "dlogits"):
            if not np.allclose(getattr(result, name), factor * getattr(once, name), rtol=1e-9, atol=1e-12):
                raise case.fail(f"with weights times {factor:g} does not return {name} times {factor:g}")


def _check_rows(case: _LossCase, logits: Floats, targets: Targets) -> None:
    whole, again = (case.run("a batch", logits, targets) for _ in range(2))
    if not (np.array_equal(whole.losses, again.losses) and np.array_equal(whole.dlogits, again.dlogits)):
        raise case.fail("gives another result when it is called again")
    for row in range(_NUM_ROWS):
        alone = case.run("a row", logits[row : row + 1], targets.rows(slice(row, row + 1)))
        same = np.allclose(alone.losses, whole.losses[row], rtol=1e-9, atol=1e-12)
        if not (same and np.allclose(alone.dlogits[0], whole.dlogits[row], rtol=1e-9, atol=1e-12)):
            raise case.fail(
                f"gives row {row} another result alone than in a batch: batches come in any number of parts"
            )


def check_optimizer(optimizer: Optimizer, /, **options: Any) -> None:
    """Check an optimizer with the given options; raises AssertionError that says what rule is broken.

    Checked, in float32 and float64, on a matrix and on vectors: name, function and state names; a rate of 0
    changes nothing; steps stay finite and go downhill; all of its memory is in the state arrays, so that training which
    is resumed from them, or has other parameters between, ends in the same bits.
    """
    if problems := list(optimizer_problems([optimizer])):
        raise AssertionError("; ".join(problems))
    for dtype in (np.float32, np.float64):
        for shape in ((3, 5), (7,), (1,)):
            _check_steps(_OptimizerCase(optimizer, options, np.dtype(dtype), shape))


class _OptimizerCase:
    """An optimizer with its options on parameters of one kind."""

    def __init__(
        self, optimizer: Optimizer, options: dict[str, Any], dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self.optimizer, self.options, self.dtype, self.shape = optimizer, options, dtype, shape

    def fail(self, what: str) -> AssertionError:
        where = f"a parameter of shape {list(self.shape)}, {self.dtype}"
        return AssertionError(f"optimizer {self.optimizer.name!r} on {where}: {what}")

    def start(self, seed: int) -> tuple[Array, list[Array]]:
        """Return a parameter away from 0 and its fresh state."""
        drawn = np.random.default_rng(seed).standard_normal(self.shape)
        parameter = np.asarray(np.sign(drawn) + drawn, self.dtype)
        return parameter, [np.zeros_like(parameter) for _ in self.optimizer.state_names]

    def step(self, parameter: Array, state: list[Array], number: int, lr: float = 1e-3) -> None:
        """Step down half the sum of squares, whose gradient is the parameter."""
        try:
            self.optimizer.apply(parameter, parameter.copy(), state, number, lr=lr, weight_decay=0.0, **self.options)
        except Exception as error:
            raise self.fail(f"raised {type(error).__name__}: {error}") from error
        if not all(np.isfinite(array).all() for array in (parameter, *state)):
            raise self.fail(f"step {number} left a NaN or an infinity")


def _check_steps(case: _OptimizerCase) -> None:
    parameter, state = case.start(seed=1)
    before = parameter.copy()
    case.step(parameter, state, 1, lr=0.0)
    if not np.array_equal(parameter, before):
        raise case.fail("a learning rate of 0 changes the parameter")
    straight = _run(case, 6)
    if not np.square(straight).sum() < np.square(before).sum():
        raise case.fail("six steps along the gradient of a bowl do not lead down")
    if not np.array_equal(straight, _run(case, 6, resume_at=3)):
        raise case.fail("resumed from copies of the parameter and its state, it ends elsewhere: it remembers more")
    if not np.array_equal(straight, _run(case, 6, beside=True)):
        raise case.fail("another parameter's steps between change what it does: it remembers more than its state")


def _run(case: _OptimizerCase, num_steps: int, *, resume_at: int = 0, beside: bool = False) -> NDArray[Any]:
    """Return the parameter after so many steps, in new arrays from one step on, or with another parameter beside."""
    parameter, state = case.start(seed=1)
    other, other_state = case.start(seed=2)
    for number in range(1, num_steps + 1):
        if number == resume_at:
            parameter, state = parameter.copy(), [array.copy() for array in state]
        case.step(parameter, state, number)
        if beside:
            case.step(other, other_state, number)
    return parameter
