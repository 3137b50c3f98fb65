"""The data of a training run: a stream of batches to train on, and the held-out batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from treadle_plugin_api.decoder_config import DecoderConfig

from treadle_server.checkpoints.store import ModelStore
from treadle_server.datasets import BatchStream, Dataset, DocumentEncoder, Position, TokenBatch
from treadle_server.errors import ConfigError, DataError
from treadle_server.tokenizer import Tokenizer
from treadle_server.training.run_folder import RunSpec
from treadle_server.training.train_config import TrainConfig

_USUAL_SEQUENCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class RunData:
    """Data, opened and checked.

    Attributes:
        stream: what is trained on.
        held_out: what is evaluated on; empty when nothing is held out.
        fingerprint: changes when any of it does.
    """

    stream: BatchStream
    held_out: Sequence[TokenBatch]
    fingerprint: str

    @classmethod
    def open(cls, spec: RunSpec, model: DecoderConfig) -> RunData:
        """Open a run's files. Raises DataError, ConfigError, and CheckpointError for a missing tokenizer."""
        config = spec.config
        tokenizer = Tokenizer.load(ModelStore().resolve(spec.model))
        make_stream = partial(
            BatchStream,
            encode=DocumentEncoder(tokenizer).encode,
            sequence_length=_sequence_length(config, model),
            batch_tokens=config.batch_tokens,
            seed=config.seed,
        )
        open_dataset = partial(Dataset.open, field=config.field, text_documents=config.text_documents)
        dataset = open_dataset(spec.data)
        training_ids, held_out_ids = dataset.split(config.held_out_fraction, config.seed)
        evaluated = dataset
        if config.held_out:
            evaluated = open_dataset(config.held_out)
            held_out_ids = np.arange(len(evaluated))
        held_out = tuple(make_stream(evaluated, held_out_ids).epoch(Position())) if len(held_out_ids) else ()
        if len(held_out_ids) and not held_out:
            raise DataError("the held-out data is too short: no document has two tokens, one to predict the other")
        fingerprint = hashlib.sha256(f"{dataset.fingerprint} {evaluated.fingerprint}".encode()).hexdigest()
        return cls(make_stream(dataset, training_ids), held_out, fingerprint)


def _sequence_length(config: TrainConfig, model: DecoderConfig) -> int:
    wanted = config.sequence_length
    if wanted is None:
        return min(_USUAL_SEQUENCE_LENGTH, model.context_length, config.batch_tokens)
    if wanted > model.context_length and model.positions.has_hard_limit:
        raise ConfigError(
            f"sequence_length: must be at most the model's context ({model.context_length}), got {wanted}"
        )
    return wanted
