"""A trainer, loaded: its model, tokenizer, checkpoints and publisher put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treadle_protos.v1 import training_pb2 as pb

from treadle_server.checkpoints.config_file import read_generation_config, read_json_object
from treadle_server.checkpoints.store import ModelStore
from treadle_server.service.startup import load_plugins
from treadle_server.service.training.checkpoints import CheckpointRoot
from treadle_server.service.training.config import LoraSettings, TrainerConfig
from treadle_server.service.training.metrics import StepMetrics
from treadle_server.service.training.publish import Publisher
from treadle_server.service.training.rows import RowReader
from treadle_server.service.training.session import TrainingSession
from treadle_server.tokenizer import Tokenizer
from treadle_server.training import Trainer
from treadle_server.training.lora import LoraConfig


@dataclass(frozen=True, slots=True)
class LoadedTrainer:
    """What the servicer needs of a trainer.

    Attributes:
        reader: makes rows of requests; any thread may use it.
        session: does the calls, on the trainer's thread.
        fixed: the part of the training's state that never changes.
        checkpoints: where they are.
        publisher: knows what was published last.
    """

    reader: RowReader
    session: TrainingSession
    fixed: pb.GetTrainingStateResponse
    checkpoints: CheckpointRoot
    publisher: Publisher

    @property
    def steps_kept_nowhere(self) -> range:
        """The steps since the last one that was saved, published or loaded; any thread may ask."""
        progress = self.session.progress
        return range(progress.kept_step + 1, progress.step + 1)

    def state(self) -> pb.GetTrainingStateResponse:
        """Return where the training stands; any thread may ask."""
        state, progress = pb.GetTrainingStateResponse(), self.session.progress
        state.CopyFrom(self.fixed)
        state.step, state.num_waiting_batches = progress.step, progress.num_waiting_batches
        state.next_sequence_number = progress.next_number
        for saved in self.checkpoints.list():
            state.checkpoints.add(name=saved.name, step=saved.step, next_sequence_number=saved.next_number)
        if self.publisher.last is not None:
            state.published.CopyFrom(self.publisher.last)
        return state


def load_trainer(model: str, config: TrainerConfig, report: Callable[[StepMetrics], object]) -> LoadedTrainer:
    """Load a model by name or folder and go on from the checkpoint that the settings name.

    Raises:
        TreadleError: the model, the checkpoint or a setting cannot be used; the message says why.
    """
    folder = ModelStore().resolve(model)
    plugins = load_plugins(config)
    trainer = Trainer.load(
        folder,
        dtype=config.dtype,
        backend=config.backend,
        optimizer=config.optimizer,
        frozen=config.frozen,
        no_decay=config.no_decay,
        lora=_lora(config.lora),
        recompute=config.recompute,
        plugins=plugins,
    )
    hf_config = read_json_object(folder / "config.json")
    fixed = _fixed_state(folder, str(hf_config.get("model_type")), trainer, config)
    fixed.losses.extend(plugins.losses.names)
    checkpoints = CheckpointRoot(config.checkpoint_root)
    publisher = Publisher(
        config.target,
        config.publish_root,
        model_type=fixed.model_type,
        num_parameters=trainer.num_parameters,
        is_adapter=config.lora is not None,
    )
    session = TrainingSession(trainer, checkpoints, publisher, report)
    if config.resume is not None:
        session.resume(config.resume)
    return LoadedTrainer(_reader(folder, hf_config, trainer, config), session, fixed, checkpoints, publisher)


def _lora(settings: LoraSettings | None) -> LoraConfig | None:
    if settings is None:
        return None
    return LoraConfig(rank=settings.rank, alpha=settings.alpha, target_modules=settings.targets, seed=settings.seed)


def _reader(folder: Path, hf_config: dict[str, object], trainer: Trainer, config: TrainerConfig) -> RowReader:
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    limited = trainer.config.positions.has_hard_limit
    return RowReader(
        tokenizer,
        eos_token_id=_eos(folder, hf_config, tokenizer),
        vocab_size=trainer.config.vocab_size,
        max_document_tokens=trainer.config.context_length if limited else None,
        max_answer_bytes=config.max_message_bytes,
    )


def _eos(folder: Path, hf_config: dict[str, object], tokenizer: Tokenizer | None) -> int | None:
    """Return the token that texts end with: the tokenizer's own, else the first that the model's files name."""
    if tokenizer is not None and tokenizer.eos_token_ids:
        return min(tokenizer.eos_token_ids)
    for settings in (read_generation_config(folder), hf_config):
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and isinstance(ids[0], int):
            return ids[0]
    return None


def _fixed_state(folder: Path, model_type: str, trainer: Trainer, config: TrainerConfig) -> pb.GetTrainingStateResponse:
    return pb.GetTrainingStateResponse(
        model=folder.resolve().name.lower(),
        model_type=model_type,
        dtype=config.dtype,
        optimizer=config.optimizer,
        vocab_size=trainer.config.vocab_size,
        context_length=trainer.config.context_length,
        num_parameters=trainer.num_parameters,
        num_trainable_parameters=trainer.num_trainable_parameters,
        lora_rank=0 if config.lora is None else config.lora.rank,
    )
