"""Publishing: weights written where the server may read them, and the call that makes it serve them."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from treadle_protos.v1 import model_pb2, model_pb2_grpc
from treadle_protos.v1 import training_pb2 as pb

from treadle_server.errors import (
    CheckpointError,
    CheckpointWriteError,
    PublishDeniedError,
    PublishError,
    PublishTargetError,
    TrainingError,
)
from treadle_server.service.status import is_denied, is_unreachable
from treadle_server.service.training.config import PublishTarget
from treadle_server.training import Trainer
from treadle_server.training.state_files import discard

# The newest is served; the one before it can be gone back to.
_NUM_KEPT = 2
_PREFLIGHT_S = 10.0  # to ask the server what it serves: it answers at once or is not there
_NUM_CHECKED_TOKENS = 16  # of one row, from all over the vocabulary
_FOLDER = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")
_PARTIAL = ".partial"  # weights that are being written


class Publisher:
    """Gives weights to one server. Belongs to the trainer's thread.

    Args:
        target: the server; None where there is none, so that publishing is refused.
        root: folder that both sides may use, of this trainer alone.
        model_type: of the trained model: the served one must have the same.
        num_parameters: of the trained model, adapters aside.
        is_adapter: whether an adapter is trained.
    """

    def __init__(
        self,
        target: PublishTarget | None,
        root: Path | None,
        *,
        model_type: str,
        num_parameters: int,
        is_adapter: bool,
    ) -> None:
        self._target = target
        self._root = None if root is None else root.absolute()
        self._model_type = model_type
        self._num_parameters = num_parameters
        self._is_adapter = is_adapter
        self.last: pb.Publication | None = None

    def publish(self, trainer: Trainer, *, label: str, expected_version: int | None) -> pb.Publication:
        """Write the weights, let the server take them, and return what it serves now.

        Raises:
            TrainingError: the model computes no numbers with them.
            PublishError: the server did not take them; the trainer is as before, and what was written is removed.
        """
        target, root = self._target, self._root
        if target is None or root is None:
            raise PublishError("this trainer has no server to publish to: start it with --server HOST:PORT")
        with _connected(target) as stub:
            served = self._served(stub, target, expected_version)
            _check_logits(trainer)
            folder = root / f"step-{trainer.step:08d}-{secrets.token_hex(4)}"
            try:
                _write(trainer, folder)
                publication = self._hand_over(stub, target, folder, served, label)
            except BaseException:
                discard(folder)
                raise
        publication.step = trainer.step
        _keep_newest(root, folder)
        self.last = publication
        return publication

    def _served(
        self, stub: model_pb2_grpc.ModelServiceStub, target: PublishTarget, expected_version: int | None
    ) -> model_pb2.Model:
        """Return what the server serves before anything is written, if it is the model that is trained."""
        request = model_pb2.GetModelRequest(model=target.model)
        served: model_pb2.Model = _call(target, stub.GetModel, request, _PREFLIGHT_S).model
        if (served.model_type, served.num_parameters) != (self._model_type, self._num_parameters):
            raise PublishError(
                f"the server at {target.address} serves {target.model!r}, a {served.model_type} of "
                f"{served.num_parameters} parameters; this is a {self._model_type} of {self._num_parameters}"
            )
        if expected_version not in (None, served.weight_version):
            raise PublishError(f"the server has version {served.weight_version}, not {expected_version} as expected")
        return served

    def _hand_over(
        self,
        stub: model_pb2_grpc.ModelServiceStub,
        target: PublishTarget,
        folder: Path,
        served: model_pb2.Model,
        label: str,
    ) -> pb.Publication:
        """Let the server load the folder, and return what it serves then."""
        done = pb.Publication(model=served.name, weight_version=served.weight_version)
        if self._is_adapter:
            load = model_pb2.LoadAdapterRequest(model=served.name, adapter=target.adapter, path=str(folder))
            loaded = _call(target, stub.LoadAdapter, load, target.timeout_s).adapter
            done.adapter, done.adapter_version = loaded.name, loaded.version
        else:
            update = model_pb2.UpdateWeightsRequest(
                model=served.name, path=str(folder), label=label, expected_version=served.weight_version
            )
            done.weight_version = _call(target, stub.UpdateWeights, update, target.timeout_s).weight_version
        return done


def _check_logits(trainer: Trainer) -> None:
    """Raise TrainingError for weights that are finite, but with which every request would fail: the pass overflows."""
    config = trainer.config
    ids = np.linspace(0, config.vocab_size - 1, min(_NUM_CHECKED_TOKENS, config.context_length)).astype(int).tolist()
    try:
        trainer.compute_loss([ids])
    except TrainingError as error:
        reason = f"the model's logits are not finite after step {trainer.step}"
        raise TrainingError(f"{reason}: nothing was published; load an earlier checkpoint") from error


def _write(trainer: Trainer, folder: Path) -> None:
    """Write the weights beside their place and rename them: whoever kills the process leaves nothing by that name."""
    partial = folder.with_name(folder.name + _PARTIAL)
    try:
        partial.mkdir(parents=True)
        trainer.save_weights(partial)
        partial.rename(folder)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = error if isinstance(error, OSError) else error.__cause__ or error
        raise CheckpointWriteError(f"{folder}: cannot be written: {reason}") from error


@contextmanager
def _connected(target: PublishTarget) -> Iterator[model_pb2_grpc.ModelServiceStub]:
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if target.tls_server_name is not None:
        options.append(("grpc.ssl_target_name_override", target.tls_server_name))
    if target.speaks_tls:
        channel = grpc.secure_channel(target.address, _credentials(target), options)
    else:
        channel = grpc.insecure_channel(target.address, options)
    with channel:
        yield model_pb2_grpc.ModelServiceStub(channel)


def _credentials(target: PublishTarget) -> Any:
    files = (target.tls_ca, target.tls_key, target.tls_certificate)
    try:
        return grpc.ssl_channel_credentials(*(None if path is None else path.read_bytes() for path in files))
    except OSError as error:
        raise PublishError(f"the certificates for {target.address} cannot be read: {error}") from error


def _call(target: PublishTarget, method: Callable[..., Any], request: Any, timeout_s: float) -> Any:
    """Call the server; raises the PublishError that says what it answered."""
    metadata = () if target.token is None else (("authorization", f"Bearer {target.token}"),)
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        kind = PublishError
        if is_unreachable(error):
            kind = PublishTargetError
        elif is_denied(error):
            kind = PublishDeniedError
        reason = error.details() or error.code().name
        raise kind(f"the server at {target.address} did not take the weights: {reason}") from error


def _keep_newest(root: Path, newest: Path) -> None:
    """Remove what was published before, but the last one, and what a trainer that was killed had not finished."""
    for path in root.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path != newest]
    folders.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in folders[: max(0, len(folders) - _NUM_KEPT + 1)]:
        discard(path)
