"""`Trainer`: exact gradients, loss and steps in this process.

>>> trainer = Trainer.load("path/to/hf-folder")
>>> result = trainer.forward_backward([[1, 5, 9, 2]])
>>> trainer.optim_step(lr=1e-3)
>>> trainer.save("path/to/better")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from treadle_plugin_api.backend import Array

from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.saving import save_checkpoint, to_file_tensor
from treadle_server.checkpoints.store import ModelStore
from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.model.decoder import DTypeName
from treadle_server.model.params import Params
from treadle_server.model.trainable import TrainableDecoder
from treadle_server.training.batches import FloatRows, Rows, TrainingBatch, make_batch
from treadle_server.training.gradients import Accumulator, check_finite, clip_factor
from treadle_server.training.loss_pass import LossPass, choose_loss
from treadle_server.training.optimizers import OPTIMIZERS
from treadle_server.training.options import check_options
from treadle_server.training.state_files import TrainerState, read_state, replace_folder, settle, write_state

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class LossResult:
    """What a batch's loss is.

    Attributes:
        loss: by `reduction`, of this batch alone.
        reduction: `mean`: the weighted sum of the tokens' losses over the sum of their weights; `sum`: the former.
        num_tokens: labels that counted.
        logprobs: log-probability of each counted label, a row each, where the label stands; 0 where none was counted.
        grad_norm: the norm of all gradients that wait for a step, before clipping; None when none were computed.
    """

    loss: float
    reduction: str
    num_tokens: int
    logprobs: list[NDArray[np.float64]]
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: the steps done with it, and the norm of the gradients before they were clipped."""

    step: int
    grad_norm: float


class Trainer:
    """A model in training: its parameters, the gradients that wait for a step, and the optimizer's state.

    One thread at a time uses it. A call that raises leaves it as it was.

    Attributes:
        step: steps done.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: DTypeName = "float32",
        optimizer: str = "adamw",
        frozen: Sequence[str] = (),
        no_decay: Sequence[str] = (),
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise InvalidRequestError.of("optimizer", f"must be one of {', '.join(OPTIMIZERS)}, but is {optimizer!r}")
        self.step = 0
        self._checkpoint = checkpoint
        self._decoder = TrainableDecoder(checkpoint.config, checkpoint.params, dtype=dtype)
        self._file_names = {param: entry.file_name for entry in checkpoint.table for param in entry.params}
        self._frozen = self._matching("frozen", frozen)
        self._no_decay = self._matching("no_decay", no_decay)
        self._gathered = Accumulator()
        self._optimizer_name, self._optimizer = optimizer, OPTIMIZERS[optimizer]
        self._state: dict[str, list[Array]] = {}

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: DTypeName = "float32",
        optimizer: str = "adamw",
        frozen: Sequence[str] = (),
        no_decay: Sequence[str] = (),
    ) -> Self:
        """Load a model by folder or name, to be trained in float32 or float64 whatever its files hold.

        `frozen` and `no_decay` are patterns (`*` any text) of checkpoint tensor names: tensors that never change, and
        those that weight decay leaves alone. `load_state` goes on where a saved trainer was.
        """
        settle(Path(source))
        with load_checkpoint(ModelStore().resolve(str(source))) as checkpoint:
            return cls(checkpoint, dtype=dtype, optimizer=optimizer, frozen=frozen, no_decay=no_decay)

    # ---- losses and gradients ---------------------------------------------------------------------------------------

    def compute_loss(
        self,
        input_ids: Rows,
        labels: Rows | None = None,
        *,
        loss: str = "cross_entropy",
        reduction: Reduction = "mean",
        weights: FloatRows | None = None,
        logprobs: FloatRows | None = None,
        advantages: FloatRows | None = None,
        **options: float,
    ) -> LossResult:
        """Return a batch's loss and gather no gradients; see `forward_backward`."""
        batch = make_batch(input_ids, labels, self._decoder.config.vocab_size, weights, logprobs, advantages)
        run = self._start(batch, loss, reduction, options)
        with np.errstate(all="ignore"):  # what is not finite is named below
            run.forward(saving=False)
        self._check_loss(run)
        return self._result(batch, run, reduction, None)

    def forward_backward(
        self,
        input_ids: Rows,
        labels: Rows | None = None,
        *,
        loss: str = "cross_entropy",
        reduction: Reduction = "mean",
        weights: FloatRows | None = None,
        logprobs: FloatRows | None = None,
        advantages: FloatRows | None = None,
        **options: float,
    ) -> LossResult:
        """Return a batch's loss and gather its gradients for the next step.

        Rows may differ in length and never see each other. Labels stand where their tokens stand, -100 counts for
        nothing, and the shift is made here: token t - 1 predicts label t. Without labels every token is one. Several
        batches before a step give the gradient of one that holds them all.

        `loss` is `cross_entropy` (options label_smoothing, z_loss), `importance_sampling` or `ppo` (option clip_range),
        which need `logprobs`, those the tokens were sampled with, and `advantages`. `weights`, `logprobs` and
        `advantages` have the shape of the labels.
        """
        batch = make_batch(input_ids, labels, self._decoder.config.vocab_size, weights, logprobs, advantages)
        self._gathered.check_reduction(reduction)
        run = self._start(batch, loss, reduction, options)
        with np.errstate(all="ignore"):
            run.forward(saving=True)
            self._check_loss(run)
            grads = {name: grad for name, grad in run.backward().items() if name not in self._frozen}
            check_finite(grads, self._file_names.__getitem__)
        self._gathered.add(grads, run.total_weight, reduction)
        return self._result(batch, run, reduction, self._gathered.norm())

    def gradients(self) -> dict[str, Array]:
        """Return the gradients that wait for a step, before clipping, under the checkpoint's tensor names.

        A tied head has none beside the embedding's; frozen tensors have none at all.
        """
        if self._gathered.is_empty:
            raise TrainingError("no gradients wait for a step: call forward_backward first")
        return self._to_file(self._gathered.scaled())

    def zero_gradients(self) -> None:
        """Forget the gradients that wait for a step."""
        self._gathered.clear()

    def _start(self, batch: TrainingBatch, loss: str, reduction: str, options: Mapping[str, float]) -> LossPass:
        if reduction not in ("mean", "sum"):
            raise InvalidRequestError.of("reduction", f"must be mean or sum, but is {reduction!r}")
        longest = int(np.diff(batch.batch.starts).max())
        config = self._decoder.config
        if config.positions.has_hard_limit and longest > config.context_length:
            raise InvalidRequestError.of(
                "input_ids", f"rows must have at most {config.context_length} tokens, but one has {longest}"
            )
        return LossPass(self._decoder, batch, choose_loss(loss, options))

    def _check_loss(self, run: LossPass) -> None:
        if not math.isfinite(run.total_loss):
            raise TrainingError(f"the loss is {run.total_loss}: nothing was changed. {self._not_finite()}")

    def _not_finite(self) -> str:
        for name, array in self._decoder.parameters.items():
            if not np.isfinite(array).all():
                return f"The parameter {self._file_names[name]} is not finite; load an earlier checkpoint."
        return "Every parameter is finite: the model's numbers overflow on this batch, or the loss's inputs do."

    def _result(self, batch: TrainingBatch, run: LossPass, reduction: str, grad_norm: float | None) -> LossResult:
        loss = run.total_loss / run.total_weight if reduction == "mean" else run.total_loss
        return LossResult(loss, reduction, len(batch.predicting), batch.logprobs_by_row(run.logprobs), grad_norm)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def optim_step(
        self, *, lr: float, grad_clip_norm: float | None = None, weight_decay: float = 0.0, **options: object
    ) -> StepResult:
        """Change the parameters by the gradients that wait, which are gone afterwards.

        Options are the optimizer's: betas and eps of adamw, betas of lion, momentum of sgd. Raises TrainingError when
        no gradients wait or their norm is not finite.
        """
        numbers = {"lr": lr, "weight_decay": weight_decay}
        numbers |= {} if grad_clip_norm is None else {"grad_clip_norm": grad_clip_norm}
        check_options(self._optimizer_name, self._optimizer.apply, numbers, options)
        if self._gathered.is_empty:
            raise TrainingError("no gradients wait for a step: call forward_backward first")
        norm = self._gathered.norm()
        if not math.isfinite(norm):
            raise TrainingError(f"the gradients' norm is {norm}: nothing was changed; zero_gradients forgets them")
        self.step += 1
        with np.errstate(all="ignore"):
            for name, gradient in self._gathered.take(clip_factor(norm, grad_clip_norm)).items():
                decay = 0.0 if name in self._no_decay else weight_decay
                parameter = self._decoder.parameters[name]
                state = self._state_of(name)
                self._optimizer.apply(parameter, gradient, state, self.step, lr=lr, weight_decay=decay, **options)
            self._decoder.refresh()
        return StepResult(self.step, norm)

    def _state_of(self, name: str) -> list[Array]:
        if name not in self._state:
            parameter = self._decoder.parameters[name]
            self._state[name] = [np.zeros_like(parameter) for _ in self._optimizer.state_names]
        return self._state[name]

    # ---- parameters and files ---------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Return copies of all parameters under the checkpoint's tensor names."""
        return {name: np.array(array) for name, array in self._to_file(self._decoder.parameters).items()}

    def save(self, path: str | Path, *, dtype: str | None = None) -> None:
        """Write a model folder that any server loads, with the optimizer's state in files of its own beside it.

        The folder appears complete or not at all, and replaces none but one that a trainer saved. `dtype` rounds the
        model's files (`bfloat16`); training goes on from the exact numbers nevertheless. Gradients that wait for a step
        are not saved. Raises CheckpointError.
        """
        stored = self._decoder.dtype.name if dtype is None else dtype
        if stored not in ("float64", "float32", "float16", "bfloat16"):
            raise InvalidRequestError.of("dtype", f"must be float64, float32, float16 or bfloat16, but is {dtype!r}")
        params = Params.from_arrays(self._decoder.parameters)
        tensors = {
            f"{state_name}/{name}": array
            for name, arrays in self._state.items()
            for state_name, array in zip(self._optimizer.state_names, arrays, strict=True)
        }
        if stored != self._decoder.dtype.name:
            tensors |= {f"weight/{name}": array for name, array in self._decoder.parameters.items()}
        state = TrainerState(self.step, self._optimizer_name, tensors)

        def write(folder: Path) -> None:
            save_checkpoint(folder, self._checkpoint, params, stored)
            write_state(folder, state)

        replace_folder(Path(path), write)

    def load_state(self, path: str | Path) -> None:
        """Go on where the trainer was that saved this folder: its parameters, step and optimizer state.

        Raises CheckpointError when the folder holds another model, and TrainingError for another optimizer's state.
        """
        folder = Path(path)
        settle(folder)
        state = read_state(folder)
        if state.optimizer != self._optimizer_name:
            raise TrainingError(
                f"{folder} has the state of {state.optimizer}, but this trainer's is {self._optimizer_name}"
            )
        loaded = self._read_parameters(folder, state)
        optimizer_state = self._read_optimizer_state(folder, state)
        for name, array in loaded.items():
            self._decoder.parameters[name][...] = array
        self._decoder.refresh()
        self._gathered.clear()
        self.step, self._state = state.step, optimizer_state

    def _read_parameters(self, folder: Path, state: TrainerState) -> dict[str, Array]:
        with load_checkpoint(folder) as checkpoint:
            parameters = self._decoder.parameters
            shapes = {name: weight.shape for name, weight in checkpoint.params.items()}
            if shapes != {name: array.shape for name, array in parameters.items()}:
                raise CheckpointError(f"{folder}: is another model: its tensors differ in names or shapes")
            loaded = {name: np.empty_like(array) for name, array in parameters.items()}
            for name, array in loaded.items():
                exact = state.tensors.get(f"weight/{name}")
                if exact is not None and exact.shape == array.shape:
                    array[...] = exact
                else:
                    checkpoint.params[name].read_into(array)
        return loaded

    def _read_optimizer_state(self, folder: Path, state: TrainerState) -> dict[str, list[Array]]:
        arrays: dict[str, list[Array]] = {}
        for name, parameter in self._decoder.parameters.items():
            found = [state.tensors.get(f"{state_name}/{name}") for state_name in self._optimizer.state_names]
            kept = [array.astype(parameter.dtype) for array in found if array is not None]
            if not kept:
                continue  # frozen, or no step was done
            if len(kept) < len(found) or any(array.shape != parameter.shape for array in kept):
                raise CheckpointError(f"{folder}: the optimizer's state of {self._file_names[name]} does not fit")
            arrays[name] = kept
        return arrays

    # ---- names ------------------------------------------------------------------------------------------------------

    def _to_file(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays of canonical names as the tensors of the checkpoint's files."""
        weights = Params.from_arrays(arrays)
        entries = [entry for entry in self._checkpoint.table if all(param in weights for param in entry.params)]
        return {entry.file_name: to_file_tensor(entry, weights) for entry in entries}

    def _matching(self, field: str, patterns: Sequence[str]) -> frozenset[str]:
        """Return the canonical parameters in the tensors that patterns name; each must name one at least."""
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self._file_names.values()):
                raise InvalidRequestError.of(field, f"must name tensors of the checkpoint, but {pattern!r} names none")
        return frozenset(
            param for param, name in self._file_names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
        )
