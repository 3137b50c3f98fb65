"""Losses and optimizers that plugins bring: registered, isolated, trained with, and stopped when they go wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from treadle_plugin_api import hookimpl
from treadle_plugin_api.loss import Loss, RowLosses, Targets
from treadle_plugin_api.optimizer import Optimizer
from treadle_plugin_api.testing import check_loss, check_optimizer
from treadle_server import Trainer
from treadle_server.errors import InvalidRequestError, TrainingError
from treadle_server.plugins import PluginManager
from treadle_server.plugins.checking import checked
from treadle_server.plugins.discovery import PluginSource, installed_sources, local_sources
from treadle_server.training.losses import LOSSES
from treadle_server.training.optimizers import OPTIMIZERS

IDS = [[5, 9, 2, 7, 7, 1], [3, 8, 4]]
PAGE = Path(__file__).parents[2] / "plugins" / "README.md"


def squared(logits: np.ndarray, targets: Targets, *, power: float = 1.0) -> RowLosses:
    """(1 - p(target)^power)^2."""
    result = LOSSES["cross_entropy"].function(logits, Targets(targets.ids, np.ones(len(targets.ids))))
    raised = np.exp(power * result.logprobs)
    losses = (1 - raised) ** 2 * targets.weights
    slopes = 2 * (1 - raised) * power * raised * targets.weights
    result.dlogits[...] *= slopes[:, None].astype(result.dlogits.dtype)
    return RowLosses(losses, result.dlogits, result.logprobs)


def signs(
    parameter: np.ndarray,
    gradient: np.ndarray,
    state: list[np.ndarray],
    step: int,
    *,
    lr: float,
    weight_decay: float = 0.0,
    floor: float = 0.0,
) -> None:
    """Move by the sign."""
    (count,) = state
    count += 1
    parameter *= 1 - lr * weight_decay
    parameter -= lr * np.sign(gradient) * (np.abs(gradient) >= floor)


SQUARED = Loss("squared", squared, {"power": (0.1, 10)})
SIGNS = Optimizer("signs", signs, ("count",))


def plugin(*parts: object, name: str = "mine") -> PluginSource:
    """A foreign plugin of losses and optimizers."""

    @hookimpl
    def treadle_register_losses(register: Callable[[object], None]) -> None:
        for part in parts:
            if not isinstance(part, Optimizer):
                register(part)

    @hookimpl
    def treadle_register_optimizers(register: Callable[[object], None]) -> None:
        for part in parts:
            if isinstance(part, Optimizer):
                register(part)

    hooks = SimpleNamespace(
        treadle_register_losses=treadle_register_losses, treadle_register_optimizers=treadle_register_optimizers
    )
    return PluginSource(name, f"dist-{name}", "1.0", lambda: hooks)


def manager_of(*sources: PluginSource, strict: bool = True) -> PluginManager:
    """A manager of what is built in and the given plugins."""
    return PluginManager([*(one for one in installed_sources() if one.built_in), *sources], strict=strict)


def status_of(manager: PluginManager, name: str = "mine") -> Any:
    """The line of one plugin."""
    return next(one for one in manager.plugins if one.name == name)


def test_what_is_built_in_comes_through_the_door() -> None:
    """One plugin brings all of it, and can be seen."""
    status = status_of(manager_of(), "training")
    assert (status.status, status.distribution) == ("active", "treadle-server")
    assert [loss.name for loss in status.losses] == list(LOSSES)
    assert [optimizer.name for optimizer in status.optimizers] == list(OPTIMIZERS)


def test_a_loss_and_an_optimizer_of_a_plugin_train(golden: Path) -> None:
    """With options; the loss falls and the state is the plugin's."""
    manager = manager_of(plugin(SQUARED, SIGNS))
    one = Trainer.load(golden / "train" / "llama", optimizer="signs", plugins=manager)
    losses = []
    for _ in range(4):
        losses.append(one.forward_backward(IDS, loss="squared", power=0.5).loss)
        one.optim_step(lr=1e-3, floor=1e-9)
    assert losses == sorted(losses, reverse=True)
    assert (one._stepper.state["embedding.weight"][0] == 4).all()
    with pytest.raises(InvalidRequestError, match=r"^power: must be 0\.1 to 10, but is 11"):
        one.forward_backward(IDS, loss="squared", power=11)
    with pytest.raises(InvalidRequestError, match=r"^betas: is no option of signs; its options: floor"):
        one.optim_step(lr=1e-3, betas=(0.9, 0.9))


def test_resuming_with_a_plugins_optimizer_is_exact(golden: Path, tmp_path: Path) -> None:
    """Its state is saved under its names."""
    manager = manager_of(plugin(SIGNS))
    straight, first, second = (
        Trainer.load(golden / "train" / "llama", optimizer="signs", plugins=manager) for _ in range(3)
    )
    for one, num_steps in ((straight, 2), (first, 1)):
        for _ in range(num_steps):
            one.forward_backward(IDS)
            one.optim_step(lr=1e-3)
    first.save(tmp_path / "saved")
    second.load_state(tmp_path / "saved")
    second.forward_backward(IDS)
    second.optim_step(lr=1e-3)
    left, right = straight.parameters(), second.parameters()
    assert all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (replace(SQUARED, name="ppo"), "loss 'ppo' of 'mine' .* is built in: 'training'"),
        (replace(SIGNS, name="adamw"), "optimizer 'adamw' of 'mine' .* is built in: 'training'"),
        ("squared", "loss 'squared' is no treadle_plugin_api.loss.Loss"),
        (replace(SQUARED, name="Squared!"), "must be called by lower-case letters"),
        (replace(SQUARED, function=None), "has None where a function belongs"),
        (replace(SQUARED, function=lambda logits: None), "loss 'squared' cannot be called as the contract says"),
        (replace(SQUARED, ranges={"gamma": (0, 1)}), "has a range of 'gamma', which is no keyword-only argument"),
        (replace(SQUARED, ranges={"power": 3}), "has the range 3 of 'power', not two numbers"),
        (replace(SQUARED, ranges=[]), "has ranges .*, not a mapping"),
        (replace(SIGNS, apply=lambda parameter, gradient: None), "optimizer 'signs' cannot be called"),
        (replace(SIGNS, state_names=["count"]), "has state_names .*, not a tuple of names that differ"),
        (replace(SIGNS, state_names=("a/b",)), "has state_names"),
    ],
)
def test_a_bad_part_fails_its_plugin_alone(part: Any, reason: str) -> None:
    """All of the plugin or nothing; what is built in stays, and who asks for it is told."""
    good = Loss("good", squared)
    manager = manager_of(plugin(good, part), strict=False)
    assert status_of(manager).status == "failed"
    assert re.search(reason, status_of(manager).reason)
    assert manager.losses.names == tuple(LOSSES)
    assert manager.optimizers.names == tuple(OPTIMIZERS)
    with pytest.raises(KeyError, match=r"must be one of cross_entropy, .*but is 'good'; plugin 'mine' is failed"):
        manager.losses.get("good")


def test_two_plugins_with_one_name_both_fail() -> None:
    """Numbers must not depend on which came first; a loss and an optimizer may share a name."""
    manager = manager_of(plugin(SQUARED), plugin(SQUARED, SIGNS, name="others"), strict=False)
    assert {status_of(manager, name).status for name in ("mine", "others")} == {"failed"}
    assert manager.losses.names == tuple(LOSSES)
    assert status_of(manager_of(plugin(SQUARED, replace(SIGNS, name="squared")))).status == "active"
    assert "is registered twice" in status_of(manager_of(plugin(SQUARED, SQUARED), strict=False)).reason


def failing(change: Callable[[RowLosses], Any]) -> Loss:
    """A loss whose result is changed."""
    return Loss("failing", lambda logits, targets: change(squared(logits, targets)))


def raise_(error: BaseException) -> Any:
    """Raise an error."""
    raise error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: raise_(RuntimeError("boom")), "raised RuntimeError: boom"),
        (lambda result: raise_(SystemExit(1)), "raised SystemExit"),
        (lambda result: None, "returned NoneType, not RowLosses"),
        (lambda result: replace(result, losses=result.losses[:1]), r"returned losses as float64 \[1\], not .* \[7\]"),
        (lambda result: replace(result, losses=1.0), "returned losses as float"),
        (lambda result: replace(result, dlogits=result.dlogits.astype(np.float64)), "returned dlogits as float64"),
        (lambda result: replace(result, losses=result.losses * np.nan), "returned losses with a NaN .* in row 0"),
        (lambda result: replace(result, dlogits=result.dlogits + np.float32(np.inf)), "returned dlogits with a NaN"),
    ],
)  # fmt: skip
def test_a_loss_that_goes_wrong_is_named(golden: Path, change: Callable[[RowLosses], Any], message: str) -> None:
    """Nothing is gathered, and what was gathered before stays."""
    one = Trainer.load(golden / "train" / "llama", plugins=manager_of(plugin(failing(change))))
    one.forward_backward(IDS)
    before = one.gradients()
    with pytest.raises(
        TrainingError, match=rf"loss 'failing' of plugin 'mine' \(dist-mine\) {message}.*nothing was cha"
    ):
        one.forward_backward(IDS, loss="failing")
    after = one.gradients()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def breaking(call: Callable[[np.ndarray], None]) -> Optimizer:
    """An optimizer that does well for two parameters and then does something else."""
    done: list[int] = []

    def apply(
        parameter: np.ndarray,
        gradient: np.ndarray,
        state: list[np.ndarray],
        step: int,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        done.append(step)
        parameter -= lr * gradient
        state[0] += 1
        if len(done) == 3:
            call(parameter)

    return Optimizer("breaking", apply, ("count",))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda parameter: raise_(RuntimeError("boom")), "raised RuntimeError: boom: nothing was changed"),
        (lambda parameter: parameter.fill(np.nan), r"made model\..*\.weight not finite: nothing was changed"),
    ],
)
def test_an_optimizer_that_goes_wrong_changes_nothing(
    golden: Path, call: Callable[[np.ndarray], None], message: str
) -> None:
    """Parameters, state, step and gradients are as before; the next step works."""
    one = Trainer.load(golden / "train" / "llama", optimizer="breaking", plugins=manager_of(plugin(breaking(call))))
    before = one.parameters()
    one.forward_backward(IDS)
    gradients = one.gradients()
    with pytest.raises(TrainingError, match=rf"optimizer 'breaking' of plugin 'mine' \(dist-mine\) {message}"):
        one.optim_step(lr=0.1, grad_clip_norm=0.5)
    assert one.step == 0
    assert not one._stepper.state
    assert all(np.array_equal(array, before[name]) for name, array in one.parameters().items())
    assert all(np.array_equal(array, gradients[name]) for name, array in one.gradients().items())
    assert one.optim_step(lr=0.1).step == 1


def test_unknown_names_are_listed(golden: Path) -> None:
    """With what there is."""
    one = Trainer.load(golden / "train" / "llama", plugins=manager_of(plugin(SQUARED)))
    with pytest.raises(InvalidRequestError, match=r"^loss: must be one of cross_entropy, .*, squared, but is 'mse'"):
        one.compute_loss(IDS, loss="mse")
    with pytest.raises(InvalidRequestError, match=r"^optimizer: must be one of adamw, sgd, lion, but is 'muon'"):
        Trainer.load(golden / "train" / "llama", optimizer="muon")


# ---- the kit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*LOSSES.values(), SQUARED], ids=lambda loss: loss.name)
def test_good_losses_pass(loss: Loss) -> None:
    """The built-in ones do, with options as well."""
    check_loss(loss)
    if loss.name == "cross_entropy":
        check_loss(loss, label_smoothing=0.1, z_loss=0.01)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), SIGNS], ids=lambda optimizer: optimizer.name)
def test_good_optimizers_pass(optimizer: Optimizer) -> None:
    """The built-in ones do, with options as well."""
    check_optimizer(optimizer)
    if optimizer.name == "sgd":
        check_optimizer(optimizer, momentum=0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: replace(result, dlogits=-result.dlogits), "but the summed losses change by"),
        (lambda result: replace(result, losses=result.losses + 1), "weights times 0 does not return losses times 0"),
        (lambda result: replace(result, losses=result.losses / len(result.losses),
                                dlogits=result.dlogits / len(result.losses)), "gives row 0 another result alone"),
        (lambda result: replace(result, logprobs=2 * result.logprobs), "logprobs are not the log-probabilities"),
        (lambda result: raise_(RuntimeError("boom")), "on float64 logits: raised RuntimeError: boom"),
        (lambda result: replace(result, losses=result.losses.astype(np.float32)), "returned losses as float32"),
    ],
)  # fmt: skip
def test_the_kit_finds_what_is_wrong_with_a_loss(change: Callable[[RowLosses], Any], message: str) -> None:
    """And says it."""
    with pytest.raises(AssertionError, match=f"loss 'failing' .*{message}"):
        check_loss(failing(change))


def remembering() -> Optimizer:
    """An optimizer with a memory of its own."""
    last: list[np.ndarray] = []

    def apply(
        parameter: np.ndarray,
        gradient: np.ndarray,
        state: list[np.ndarray],
        step: int,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        if last and last[0].shape == gradient.shape:
            parameter -= lr * last[0]
        last[:] = [gradient]

    return Optimizer("remembering", apply)


def stepping(move: Callable[..., None]) -> Optimizer:
    """An optimizer that does something simple."""

    def apply(
        parameter: np.ndarray,
        gradient: np.ndarray,
        state: list[np.ndarray],
        step: int,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        move(parameter, gradient, lr)

    return Optimizer("stepping", apply)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (remembering(), "it remembers more"),
        (stepping(lambda p, g, lr: np.subtract(p, 0.1 * g, out=p)), "a learning rate of 0 changes the parameter"),
        (stepping(lambda p, g, lr: np.add(p, lr * g, out=p)), "do not lead down"),
        (stepping(lambda p, g, lr: np.divide(p, lr, out=p)), "left a NaN or an infinity|divide by zero"),
        (stepping(lambda p, g, lr: raise_(RuntimeError("boom"))), "raised RuntimeError: boom"),
        (replace(SIGNS, name=""), "must be called by lower-case letters"),
    ],
)
def test_the_kit_finds_what_is_wrong_with_an_optimizer(optimizer: Optimizer, message: str) -> None:
    """And says it."""
    with pytest.raises(AssertionError, match=message):
        check_optimizer(optimizer)


def test_plugins_check_runs_the_kit() -> None:
    """Of losses and optimizers that are not built in."""
    sound = checked(status_of(manager_of(plugin(SQUARED, SIGNS))))
    assert sound.status == "passed"
    wrong = failing(lambda result: replace(result, dlogits=-result.dlogits))
    spoilt = checked(status_of(manager_of(plugin(wrong, stepping(lambda p, g, lr: None)))))
    assert spoilt.status == "failed"
    assert "the summed losses change by" in spoilt.reason
    assert "do not lead down" in spoilt.reason


def test_the_readme_loss_works(golden: Path, tmp_path: Path) -> None:
    """The loss and the optimizer of plugins/README.md load, keep the contract, and train."""
    listings = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (listing,) = (text for text in listings if "treadle_register_losses" in text)
    (tmp_path / "focal.py").write_text(listing, encoding="utf-8")
    built_in = [one for one in installed_sources() if one.built_in]
    manager = PluginManager([*built_in, *local_sources([tmp_path])], strict=True)
    check_loss(manager.losses.get("focal").part, gamma=1.5)
    check_optimizer(manager.optimizers.get("signs").part)
    one = Trainer.load(golden / "train" / "llama", optimizer="signs", plugins=manager)
    before = one.forward_backward(IDS, loss="focal", gamma=1.0).loss
    one.optim_step(lr=1e-3)
    assert one.compute_loss(IDS, loss="focal", gamma=1.0).loss < before


def test_the_readme_says_how_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the loss and its use in one's own process, beside a folder `stages` that holds the plugin."""
    listings = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "stages").mkdir()
    marks = {"stages/focal.py": "treadle_register_losses", "test_focal.py": "import FOCAL", "use.py": "Trainer.load"}
    for name, mark in marks.items():
        (listing,) = (text for text in listings if mark in text)
        (tmp_path / name).write_text(listing, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "stages")
    for command in (["-m", "pytest", "test_focal.py"], ["use.py"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert float(done.stdout) > 0
