"""From model folders to what can run: a whole model, a further version of its weights, its draft model, an adapter."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from treadle_plugin_api import ModelInfo
from treadle_plugin_api.backend import Adapter, ComputeBackend
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.checkpoints.adapters import read_adapter
from treadle_server.checkpoints.loading import Checkpoint, load_checkpoint
from treadle_server.checkpoints.quantising import quantise
from treadle_server.checkpoints.store import ModelStore
from treadle_server.engine.speculation import DraftModel
from treadle_server.engine.weights import Weights
from treadle_server.errors import CheckpointError, EngineError
from treadle_server.model.decoder import Decoder, DTypeName, Numerics, Quantised
from treadle_server.model.families.registry import FamilyRegistry
from treadle_server.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

# Settings in which two checkpoints of one model may differ: whether the head is a tensor of its own.
_FREE_SETTINGS = frozenset({"tied_head"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """What a model folder holds, ready to run.

    Attributes:
        weights: the first version.
        eos_ids: union of the end-of-sequence tokens that config, generation config and tokenizer name.
        checkpoint: the folder's settings and names; its files are closed.
    """

    weights: Weights
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    checkpoint: Checkpoint

    @property
    def vocab_size(self) -> int:
        """Number of tokens that can be given or generated."""
        return min(self.tokenizer.vocab_size, self.weights.decoder.config.vocab_size)

    def describe(self, name: str) -> ModelInfo:
        """Return the model under a name as sampler stages see it."""
        return ModelInfo(
            name=name,
            vocab_size=self.vocab_size,
            context_length=self.checkpoint.config.context_length,
            eos_ids=self.eos_ids,
            token_bytes=self.tokenizer.token_bytes,
            encode=partial(self.tokenizer.encode, add_special_tokens=False),
            special_ids=frozenset(filter(self.tokenizer.is_special, range(self.vocab_size))),
            text_is_bytes=self.tokenizer.text_is_bytes,
        )


# Parameters below which a model is small: NumPy makes more than a hundred tokens a second of it.
SMALL_MODEL = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoader:
    """Loads with the same settings each time. May be used from any thread.

    Attributes:
        families: the model families there are.
        backend: returns what computes, `small` or not; models of the loader share it.
        dtype: number type of the arithmetic.
        numerics: fast or reproducible.
        quantize: what large matrices are rounded to, `int8` or `int4`; None leaves them as they are stored.
    """

    families: FamilyRegistry
    backend: Callable[..., ComputeBackend[Any]]
    dtype: DTypeName
    numerics: Numerics
    quantize: Quantised | None = None

    def open(self, folder: Path) -> OpenedModel:
        """Load a folder.

        Raises:
            CheckpointError: the folder is broken, or asks for what treadle does not have.
        """
        with load_checkpoint(folder, self.families) as checkpoint:
            tokenizer = Tokenizer.load(folder)
            weights = self._prepare(checkpoint, version=1)
        size = min(tokenizer.vocab_size, checkpoint.config.vocab_size)
        return OpenedModel(
            weights=weights,
            tokenizer=tokenizer,
            eos_ids=_eos_ids(checkpoint, tokenizer, size),
            checkpoint=checkpoint,
        )

    def open_version(
        self, folder: Path, *, version: int, label: str, like: DecoderConfig, tokenizer: Tokenizer
    ) -> Weights:
        """Load another checkpoint of a served model.

        Raises:
            CheckpointError: the folder is broken, or holds another architecture or another vocabulary.
        """
        with load_checkpoint(folder, self.families) as checkpoint:
            _check_config(folder, checkpoint.config, like)
            if (folder / "tokenizer.json").exists():  # a checkpoint of weights alone is as good
                _check_vocabulary(folder, Tokenizer.load(folder), tokenizer)
            return self._prepare(checkpoint, version=version, label=label)

    def open_adapter(self, folder: Path, name: str, checkpoint: Checkpoint) -> Adapter:
        """Load an adapter of a served model.

        Raises:
            CheckpointError: the folder is broken, or holds no adapter of this model.
        """
        return read_adapter(folder, checkpoint, self.dtype, name=name)

    def _prepare(self, checkpoint: Checkpoint, *, version: int, label: str = "") -> Weights:
        try:
            decoder = self._decoder(checkpoint)
        except MemoryError as error:
            raise EngineError(f"{checkpoint.folder}: there is not enough memory for its weights") from error
        return Weights(
            version=version,
            decoder=decoder,
            num_parameters=_num_parameters(checkpoint),
            label=label,
        )

    def _decoder(self, checkpoint: Checkpoint) -> Decoder:
        config, params = checkpoint.config, checkpoint.params
        backend = self.backend(small=_num_parameters(checkpoint) < SMALL_MODEL)
        if self.quantize is not None:
            params = quantise(checkpoint.folder, config, params, self.quantize)
        return Decoder(config, params, backend=backend, dtype=self.dtype, numerics=self.numerics)

    def open_draft(self, source: str, tokenizer: Tokenizer) -> DraftModel:
        """Load a draft model; CheckpointError unless its tokens are those of the model it drafts for."""
        folder = ModelStore().resolve(source)
        drafting = Tokenizer.load(folder)
        size = min(drafting.vocab_size, tokenizer.vocab_size)
        if any(drafting.token_bytes(i) != tokenizer.token_bytes(i) for i in range(size)):
            raise CheckpointError(f"{folder}: its tokens are not those of the model that it is to draft for")
        with load_checkpoint(folder, self.families) as checkpoint:
            decoder = self._decoder(checkpoint)
        return DraftModel(decoder, min(size, decoder.config.vocab_size))


def _num_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(weight.shape) for weight in checkpoint.params.values())


def _check_config(folder: Path, config: DecoderConfig, served: DecoderConfig) -> None:
    names = (field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _FREE_SETTINGS)
    for name in names:
        found, expected = getattr(config, name), getattr(served, name)
        if found != expected:
            raise CheckpointError(
                f"{folder}: is another architecture than the served model: {name} is {found!r:.200}, "
                f"expected {expected!r:.200}; load it as a model of its own"
            )


def _check_vocabulary(folder: Path, found: Tokenizer, served: Tokenizer) -> None:
    if found.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"{folder}: its tokenizer has {found.vocab_size} tokens, the served model's {served.vocab_size}"
        )
    for token_id in range(served.vocab_size):
        theirs, ours = found.token_bytes(token_id), served.token_bytes(token_id)
        if theirs != ours:
            raise CheckpointError(f"{folder}: its token {token_id} is {theirs!r:.80}, the served model's {ours!r:.80}")


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Return the union of the end-of-sequence tokens that config, generation config and tokenizer name."""
    ids = set(tokenizer.eos_token_ids)
    for config in (checkpoint.hf_config, checkpoint.generation_config):
        value = config.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        ids.update(i for i in found if isinstance(i, int) and not isinstance(i, bool))
    outside = sorted(i for i in ids if not 0 <= i < vocab_size)
    if outside:
        _LOG.warning("end-of-sequence tokens outside the vocabulary are ignored: %s", str(outside)[:200])
    return frozenset(ids.difference(outside))
