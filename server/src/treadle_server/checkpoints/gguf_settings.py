"""The settings of a GGUF file's architecture: typed, and none of them passed over in silence."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle_server.checkpoints.gguf_file import GgufFile
from treadle_server.errors import CheckpointError, UnsupportedModelError


class Settings:
    """Reads the keys that begin with the architecture's name, and remembers which were read.

    A key that nobody reads may change the arithmetic, so `refuse_unread` names it rather than lose it.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.architecture
        self._read: set[str] = set()

    def integer(self, key: str) -> int:
        """Return a whole number that must be there."""
        return self.file.require(self._name(key), int)

    def optional_integer(self, key: str) -> int | None:
        """Return a whole number, or None."""
        return self.file.get(self._name(key), int)

    def number(self, key: str) -> float:
        """Return a float32 that must be there, as the shortest decimal that means it: 1e-05, not 9.999999747e-06."""
        return float(str(np.float32(self.file.require(self._name(key), float))))

    def optional_number(self, key: str) -> float | None:
        """Return what `number` does, or None."""
        return self.number(key) if self._name(key) in self.file.metadata else None

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.file.get(self._name(key), bool)
        return default if value is None else value

    def text(self, key: str) -> str | None:
        """Return a string, or None."""
        return self.file.get(self._name(key), str)

    def uniform(self, key: str, default: int) -> int:
        """Return a whole number that may be given once, or once a layer and then always the same."""
        value = self.value(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1 or type(number := values.pop()) is not int:
            raise self.unsupported(f"{self._name(key)} = {value!r:.60} must be one number")
        return number

    def value(self, key: str, default: object) -> Any:
        """Return whatever is there."""
        return self.file.metadata.get(self._name(key), default)

    def require(self, key: str, *allowed: object) -> None:
        """Raise UnsupportedModelError when the key is given and its value is not one of these."""
        value = self.file.metadata.get(self._name(key))
        if value is not None and value not in allowed:
            raise self.unsupported(f"{self._name(key)} = {value!r:.60} is not supported; supported: {list(allowed)}")

    def skip(self, *keys: str) -> None:
        """Count keys as read that say nothing of the arithmetic, or what the tensors say too."""
        for key in keys:
            self._name(key)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError naming the first of the architecture's keys that was never read."""
        for key, value in self.file.metadata.items():
            if key.startswith(f"{self.architecture}.") and key not in self._read:
                raise self.unsupported(f"the setting {key} = {value!r:.60} is not supported")

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this name, or one of this name in its first layer."""
        return name in self.file.tensors or f"blk.0.{name}" in self.file.tensors

    def biased(self, *modules: str) -> bool:
        """Whether all of the modules have biases; Hugging Face's settings cannot say that only some have."""
        present = [module for module in modules if self.has_tensor(f"{module}.bias")]
        if present and len(present) != len(modules):
            raise self.unsupported(f"biases on {', '.join(present)} but not on all of {', '.join(modules)}")
        return bool(present)

    def num_layers(self) -> int:
        """Return the number of layers, which must be one that the file can have tensors for."""
        count = self.integer("block_count")
        if not 0 < count <= len(self.file.tensors):
            raise CheckpointError(
                f"{self.file.path}: {self._name('block_count')} must be from 1 to the number of tensors "
                f"({len(self.file.tensors)}), is {count}"
            )
        return count

    def num_experts(self) -> int:
        """Return the number of experts, which must be the one that the first layer's router chooses from."""
        count = self.integer("expert_count")
        router = self.file.tensors.get("blk.0.ffn_gate_inp.weight")
        if router is None or router.shape[0] != count:
            found = "is missing" if router is None else f"chooses from {router.shape[0]}"
            raise CheckpointError(f"{self.file.path}: {count} experts, but blk.0.ffn_gate_inp.weight {found}")
        return count

    def vocab_size(self) -> int:
        """Return the number of rows of the token embedding."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.file.path}: the tensor token_embd.weight is missing")
        return embedding.shape[0]

    def unsupported(self, what: str) -> UnsupportedModelError:
        """Return the error that names the file."""
        return UnsupportedModelError(f"{self.file.path}: {what}")

    def _name(self, key: str) -> str:
        name = f"{self.architecture}.{key}"
        self._read.add(name)
        return name
