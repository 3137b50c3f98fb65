"""The compute backend that a trainer is given, by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from treadle_plugin_api.backend import DifferentiableBackend
from treadle_plugin_api.backend_factory import BackendFactory

from treadle_server.errors import ConfigError
from treadle_server.model.decoder import DTypeName
from treadle_server.model.numpy_backend import NumpyBackend

_LOG = logging.getLogger(__name__)


def make_training_backend(
    name: str, dtype: DTypeName, plugged: Mapping[str, BackendFactory]
) -> DifferentiableBackend[Any]:
    """Return the named backend for training: NumPy's, a plugin's, or for `auto` a plugin's that suits, else NumPy's.

    Raises ConfigError for a name that is not there or cannot train in that number type, and where a plugin cannot make
    its own.
    """
    made = _find(name, dtype, plugged)
    _LOG.info("the backend %s trains in %s", made.name, dtype)
    return made


def _find(name: str, dtype: DTypeName, plugged: Mapping[str, BackendFactory]) -> DifferentiableBackend[Any]:
    if name == "numpy":
        return NumpyBackend(dtype)
    able = {one: factory for one, factory in plugged.items() if factory.make_training and dtype in factory.dtypes}
    if name == "auto":
        return _fastest(dtype, able)
    if name not in able:
        known = ", ".join(["auto", "numpy", *able])
        raise ConfigError(f"there is no compute backend {name!r} that trains in {dtype}; available: {known}")
    return _make(able[name], dtype)


def _fastest(dtype: DTypeName, able: Mapping[str, BackendFactory]) -> DifferentiableBackend[Any]:
    for factory in able.values():
        try:
            return _make(factory, dtype)
        except ConfigError as error:
            _LOG.warning("NumPy trains instead: %s", error)
    return NumpyBackend(dtype)


def _make(factory: BackendFactory, dtype: DTypeName) -> DifferentiableBackend[Any]:
    if factory.make_training is None:
        raise ConfigError(f"the compute backend {factory.name!r} cannot train")
    try:
        return factory.make_training(dtype)
    except Exception as error:  # a plugin's factory may raise anything
        raise ConfigError(
            f"the compute backend {factory.name!r} cannot train here: {type(error).__name__}: {error}"
        ) from error
