"""What a trainer's steps change: every parameter of a model, or those of an adapter beside it (`lora.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np
from treadle_plugin_api.backend import Adapter, Array
from treadle_plugin_api.family import TensorEntry

from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.saving import save_checkpoint
from treadle_server.errors import CheckpointError, InvalidRequestError
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.model.params import Params
from treadle_server.model.trainable import TrainableDecoder


class Trained(Protocol):
    """Arrays in training."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The very ones that the decoder computes with, by name."""

    @property
    def table(self) -> tuple[TensorEntry, ...]:
        """The tensors of a saved folder, and the arrays that each holds."""

    @property
    def adapter(self) -> Adapter | None:
        """What the forward pass is told of; None where it is the model that is trained."""

    def wanted(self, names: Collection[str]) -> frozenset[str]:
        """Return the gradients that the decoder is asked for, given the names of arrays that need theirs."""

    def gather(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays' gradients, given those that the decoder was asked for."""

    def refresh(self) -> None:
        """Take over what was written to the arrays."""

    def write(self, folder: Path, dtype: str) -> None:
        """Write what a server loads into a folder."""

    def read(self, folder: Path, exact: Mapping[str, Array]) -> dict[str, Array]:
        """Return new arrays as such a folder has them, those of `exact` where it has them; raise CheckpointError."""


def matching_parameters(field: str, patterns: Sequence[str], file_names: Mapping[str, str]) -> frozenset[str]:
    """Return the parameters in the tensors that patterns name, given each one's; every pattern must name one at least.

    Raises InvalidRequestError naming the field.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in file_names.values()):
            raise InvalidRequestError.of(field, f"must name tensors of the checkpoint, but {pattern!r} names none")
    return frozenset(
        param for param, name in file_names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


class TrainedModel:
    """All parameters of a model, under canonical names."""

    adapter = None

    def __init__(self, checkpoint: Checkpoint, decoder: TrainableDecoder, families: FamilyRegistry) -> None:
        self._checkpoint, self._decoder, self._families = checkpoint, decoder, families
        self.table = checkpoint.table
        self.arrays = decoder.parameters

    def wanted(self, names: Collection[str]) -> frozenset[str]:
        """Return the names."""
        return frozenset(names)

    def gather(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients."""
        return dict(grads)

    def refresh(self) -> None:
        """Tell the decoder."""
        self._decoder.refresh()

    def write(self, folder: Path, dtype: str) -> None:
        """Write a model folder."""
        save_checkpoint(folder, self._checkpoint, Params.from_arrays(self.arrays), dtype)

    def read(self, folder: Path, exact: Mapping[str, Array]) -> dict[str, Array]:
        """Return new arrays as a model folder has them, those of `exact` where it has them."""
        with load_checkpoint(folder, self._families) as checkpoint:
            shapes = {name: weight.shape for name, weight in checkpoint.params.items()}
            if shapes != {name: array.shape for name, array in self.arrays.items()}:
                raise CheckpointError(f"{folder}: is another model: its tensors differ in names or shapes")
            loaded = {name: np.empty_like(array) for name, array in self.arrays.items()}
            for name, array in loaded.items():
                if name in exact and exact[name].shape == array.shape:
                    array[...] = exact[name]
                else:
                    checkpoint.params[name].read_into(array)
        return loaded
