"""`Trainer`: exact gradients, loss and steps in this process.

>>> trainer = Trainer.load("path/to/hf-folder")
>>> result = trainer.forward_backward([[1, 5, 9, 2]])
>>> trainer.optim_step(lr=1e-3)
>>> trainer.save("path/to/better")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

import numpy as np
from treadle_plugin_api.backend import Adapter, Array
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.checkpoints.adapters import merge_adapter, read_adapter
from treadle_server.checkpoints.config_file import refuse_quantised
from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.saving import save_checkpoint, to_file_tensor
from treadle_server.checkpoints.store import ModelStore
from treadle_server.errors import CheckpointError, InvalidRequestError, TrainingError
from treadle_server.model.decoder import DTypeName
from treadle_server.model.params import Params
from treadle_server.model.trainable import TrainableDecoder
from treadle_server.plugins import PluginManager
from treadle_server.training.backends import make_training_backend
from treadle_server.training.batches import FloatRows, Rows, TrainingBatch, make_batch
from treadle_server.training.chosen_loss import choose_loss
from treadle_server.training.gradients import Accumulator, clip_factor
from treadle_server.training.lora import LoraConfig, TrainedAdapter, new_adapter
from treadle_server.training.memory import keep_freed_memory
from treadle_server.training.parallel_pass import ParallelPass
from treadle_server.training.results import LossResult, StepResult
from treadle_server.training.state_files import TrainerState, read_state, replace_folder, settle, write_state
from treadle_server.training.stepping import OptimizerState, Stepper, StepSettings
from treadle_server.training.threads import BlasThreads
from treadle_server.training.trained import Trained, TrainedModel, matching_parameters

Reduction = Literal["mean", "sum"]


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
        plugins: PluginManager,
        backend: str = "auto",
        optimizer: str = "adamw",
        frozen: Sequence[str] = (),
        no_decay: Sequence[str] = (),
        adapter: Adapter | None = None,
        recompute: bool = False,
    ) -> None:
        keep_freed_memory()
        self._threads = BlasThreads()
        self.step, self._losses = 0, plugins.losses
        self._checkpoint = checkpoint
        made = make_training_backend(backend, dtype, plugins.backends.parts())
        self._stepper = Stepper(plugins.optimizers, optimizer, self._threads, made.faster)
        self._decoder = TrainableDecoder(
            checkpoint.config, checkpoint.params, dtype=dtype, backend=made, recompute=recompute
        )
        self._trained: Trained = (
            TrainedModel(checkpoint, self._decoder, plugins.families)
            if adapter is None
            else TrainedAdapter(checkpoint, adapter)
        )
        self._file_names = {name: entry.file_name for entry in self._trained.table for name in entry.params}
        self._frozen = matching_parameters("frozen", frozen, self._file_names)
        self._no_decay = matching_parameters("no_decay", no_decay, self._file_names)
        self._wanted = self._trained.wanted(self._trained.arrays.keys() - self._frozen)
        self._gathered = Accumulator(self._threads)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        dtype: DTypeName = "float32",
        backend: str = "auto",
        optimizer: str = "adamw",
        frozen: Sequence[str] = (),
        no_decay: Sequence[str] = (),
        lora: LoraConfig | None = None,
        adapter: str | Path | None = None,
        recompute: bool = False,
        plugins: PluginManager | None = None,
    ) -> Self:
        """Load a model by folder or name, to be trained in float32 or float64 whatever its files hold.

        `backend` is what computes: `numpy`, the name of a plugin's, or `auto` for the fastest that is installed and
        suits; the first time on a machine that takes a while, in which its code is compiled.

        `frozen` and `no_decay` are patterns (`*` any text) of checkpoint tensor names: tensors that never change, and
        those that weight decay leaves alone. `load_state` goes on where a saved trainer was.

        With `recompute` the backward pass runs layers again instead of keeping what was in them: less memory, same
        bits.

        With `lora` a new adapter is trained instead of the model, with `adapter` the one in that folder. Losses,
        optimizers and model families are those of `plugins`, by default of all that are installed.
        """
        if lora is not None and adapter is not None:
            raise InvalidRequestError.of("lora", "must not be given beside adapter: that one has its own settings")
        plugins = PluginManager.load() if plugins is None else plugins
        settle(Path(source))
        with load_checkpoint(ModelStore().resolve(str(source)), plugins.families) as checkpoint:
            refuse_quantised(checkpoint.folder, checkpoint.hf_config)
            trained = None if lora is None else new_adapter(checkpoint, lora, dtype)
            if adapter is not None:
                settle(Path(adapter))
                trained = read_adapter(Path(adapter), checkpoint, dtype)
            return cls(
                checkpoint,
                dtype=dtype,
                plugins=plugins,
                backend=backend,
                optimizer=optimizer,
                frozen=frozen,
                no_decay=no_decay,
                adapter=trained,
                recompute=recompute,
            )

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
        batch = self._batch(input_ids, labels, weights, logprobs, advantages)
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
        batch = self._batch(input_ids, labels, weights, logprobs, advantages)
        self._gathered.check_reduction(reduction)
        run = self._start(batch, loss, reduction, options)
        with np.errstate(all="ignore"):
            run.forward(saving=True)
            self._check_loss(run)
            grads = self._trained.gather(run.backward())
            self._gathered.add(grads, run.total_weight, reduction, self._file_names.__getitem__)
        return self._result(batch, run, reduction, self._gathered.norm())

    def gradients(self) -> dict[str, Array]:
        """Return the gradients that wait for a step, before clipping, under the checkpoint's tensor names.

        A tied head has none beside the embedding's; frozen tensors have none at all. Those of an adapter have PEFT's
        names.
        """
        if self._gathered.is_empty:
            raise TrainingError("no gradients wait for a step: call forward_backward first")
        return self._to_file(self._gathered.scaled())

    def zero_gradients(self) -> None:
        """Forget the gradients that wait for a step."""
        self._gathered.clear()

    def _batch(
        self,
        input_ids: Rows,
        labels: Rows | None,
        weights: FloatRows | None,
        logprobs: FloatRows | None,
        advantages: FloatRows | None,
    ) -> TrainingBatch:
        vocab_size, adapter = self._decoder.config.vocab_size, self._trained.adapter
        return make_batch(input_ids, labels, vocab_size, weights, logprobs, advantages, adapter)

    def _start(self, batch: TrainingBatch, loss: str, reduction: str, options: Mapping[str, float]) -> ParallelPass:
        if reduction not in ("mean", "sum"):
            raise InvalidRequestError.of("reduction", f"must be mean or sum, but is {reduction!r}")
        longest = int(np.diff(batch.batch.starts).max())
        config = self._decoder.config
        if config.positions.has_hard_limit and longest > config.context_length:
            raise InvalidRequestError.of(
                "input_ids", f"rows must have at most {config.context_length} tokens, but one has {longest}"
            )
        chosen = choose_loss(self._losses, loss, options, self._decoder.faster)
        return ParallelPass(self._decoder, batch, chosen, self._wanted, self._threads)

    def _check_loss(self, run: ParallelPass) -> None:
        if not math.isfinite(run.total_loss):
            raise TrainingError(f"the loss is {run.total_loss}: nothing was changed. {self._not_finite()}")

    def _not_finite(self) -> str:
        name = self._broken_parameter({**self._decoder.parameters, **self._trained.arrays})
        if name is not None:
            return f"The parameter {name} is not finite; load an earlier checkpoint."
        return "Every parameter is finite: the model's numbers overflow on this batch, or the loss's inputs do."

    def _check_trained(self) -> None:
        """Raise TrainingError for parameters that no folder should hold, least of all in place of a good one's."""
        name = self._broken_parameter(self._trained.arrays)
        if name is not None:
            raise TrainingError(f"the parameter {name} is not finite: nothing was saved; load an earlier checkpoint")

    def _broken_parameter(self, arrays: Mapping[str, Array]) -> str | None:
        """Return the checkpoint's name of the first array that is not finite."""
        names = {name: entry.file_name for entry in self._checkpoint.table for name in entry.params} | self._file_names
        return next((names[name] for name, array in arrays.items() if not np.isfinite(array).all()), None)

    def _result(self, batch: TrainingBatch, run: ParallelPass, reduction: str, grad_norm: float | None) -> LossResult:
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
        self.check_step(lr=lr, grad_clip_norm=grad_clip_norm, weight_decay=weight_decay, **options)
        if self._gathered.is_empty:
            raise TrainingError("no gradients wait for a step: call forward_backward first")
        norm = self._gathered.norm()
        if not math.isfinite(norm):
            raise TrainingError(f"the gradients' norm is {norm}: nothing was changed; zero_gradients forgets them")
        factor = self._gathered.scale * clip_factor(norm, grad_clip_norm)
        settings = StepSettings(self.step + 1, factor, lr, weight_decay, self._no_decay, options)
        with np.errstate(all="ignore"):
            self._stepper.step(self._trained.arrays, self._gathered.sums, settings, self._file_names.__getitem__)
            self._trained.refresh()
        self._gathered.clear()
        self.step += 1
        return StepResult(self.step, norm)

    def check_step(
        self, *, lr: float, grad_clip_norm: float | None = None, weight_decay: float = 0.0, **options: object
    ) -> None:
        """Raise InvalidRequestError for arguments that `optim_step` would refuse."""
        numbers = {"lr": lr, "weight_decay": weight_decay}
        numbers |= {} if grad_clip_norm is None else {"grad_clip_norm": grad_clip_norm}
        self._stepper.check(numbers, options)

    # ---- parameters and files ---------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Return copies of all parameters under the checkpoint's tensor names; of an adapter's, under PEFT's."""
        return {name: np.array(array) for name, array in self._to_file(self._trained.arrays).items()}

    @property
    def config(self) -> DecoderConfig:
        """What the model is."""
        return self._decoder.config

    @property
    def num_parameters(self) -> int:
        """Numbers of the model, tied ones counted once."""
        return sum(array.size for array in self._decoder.parameters.values())

    @property
    def num_trainable_parameters(self) -> int:
        """Numbers that steps change."""
        return sum(array.size for name, array in self._trained.arrays.items() if name not in self._frozen)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return not self._gathered.is_empty

    def save(
        self, path: str | Path, *, dtype: str | None = None, files: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        """Write a model folder that any server loads, with the optimizer's state in files of its own beside it.

        Of an adapter that is trained it is PEFT's folder; `save_merged` writes the whole model.
        The folder appears complete or not at all, and replaces none but one that a trainer saved. `dtype` rounds the
        model's files (`bfloat16`); training goes on from the exact numbers nevertheless. Gradients that wait for a step
        are not saved. `files` are further ones by name. Raises CheckpointError; TrainingError for a NaN in a parameter.
        """
        stored = self._stored(dtype)
        self._check_trained()
        tensors = self._stepper.tensors()
        if stored != self._decoder.dtype.name:
            tensors |= {f"weight/{name}": array for name, array in self._trained.arrays.items()}
        state = TrainerState(self.step, self._stepper.name, tensors)

        def write(folder: Path) -> None:
            self._trained.write(folder, stored)
            write_state(folder, state, files)

        replace_folder(Path(path), write)

    def save_weights(self, path: str | Path) -> None:
        """Write the weights alone into a new folder, for a server to load. Raises as `save` does."""
        self._check_trained()
        self._trained.write(Path(path), self._decoder.dtype.name)

    def save_merged(self, path: str | Path, *, dtype: str | None = None) -> None:
        """Write a whole model, the adapter added to its weights, into a folder that must not be there yet.

        Raises as `save` does.
        """
        self._check_trained()
        if Path(path).exists():
            raise CheckpointError(f"{path}: exists; a merged model replaces nothing, name another")
        stored, params = self._stored(dtype), Params.from_arrays(self._decoder.parameters)
        if self._trained.adapter is not None:
            params = merge_adapter(params, self._trained.adapter)
        replace_folder(Path(path), lambda folder: save_checkpoint(folder, self._checkpoint, params, stored))

    def _stored(self, dtype: str | None) -> str:
        stored = self._decoder.dtype.name if dtype is None else dtype
        if stored not in ("float64", "float32", "float16", "bfloat16"):
            raise InvalidRequestError.of("dtype", f"must be float64, float32, float16 or bfloat16, but is {dtype!r}")
        return stored

    def load_weights(self, path: str | Path) -> None:
        """Take the weights of a folder that a trainer saved and begin anew: step 0, no optimizer state.

        Raises CheckpointError when the folder holds another model.
        """
        folder = Path(path)
        settle(folder)
        self._take(self._trained.read(folder, read_state(folder).exact()), 0, {})

    def load_state(self, path: str | Path) -> None:
        """Go on where the trainer was that saved this folder: its parameters, step and optimizer state.

        Raises CheckpointError when the folder holds another model, and TrainingError for another optimizer's state.
        """
        folder = Path(path)
        settle(folder)
        state = read_state(folder)
        if state.optimizer != self._stepper.name:
            raise TrainingError(
                f"{folder} has the state of {state.optimizer}, but this trainer's is {self._stepper.name}"
            )
        loaded = self._trained.read(folder, state.exact())
        optimizer_state = self._stepper.read(folder, state.tensors, self._trained.arrays, self._file_names.__getitem__)
        self._take(loaded, state.step, optimizer_state)

    def _take(self, arrays: Mapping[str, Array], step: int, optimizer_state: OptimizerState) -> None:
        for name, array in arrays.items():
            self._trained.arrays[name][...] = array
        self._trained.refresh()
        self._gathered.clear()
        self.step, self._stepper.state = step, optimizer_state

    # ---- names ------------------------------------------------------------------------------------------------------

    def _to_file(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays of canonical names as the tensors of the checkpoint's files."""
        weights = Params.from_arrays(arrays)
        entries = [entry for entry in self._trained.table if all(param in weights for param in entry.params)]
        return {entry.file_name: to_file_tensor(entry, weights) for entry in entries}
