"""What every server does before it opens: find its models, load its plugins and its models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle_server.checkpoints.store import ModelStore
from treadle_server.config import ServerConfig
from treadle_server.errors import ConfigError
from treadle_server.language_model import LanguageModel
from treadle_server.plugins import PluginManager
from treadle_server.service.app import InferenceServer
from treadle_server.service.training.config import TrainerConfig

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to serve: the name that requests use, and its folder."""

    name: str
    folder: Path


def find_models(texts: Iterable[str]) -> list[ModelSource]:
    """Return the models for texts such as `smollm2-135m-instruct`, `path/to/folder` and `name=path/to/folder`.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: two models would have the same name, or one has none.
    """
    store = ModelStore()
    sources: dict[str, ModelSource] = {}
    for text in texts:
        source = _find(text, store)
        if source.name in sources:
            raise ConfigError(f"two models would be called {source.name!r}; write NAME={text} to give one another name")
        sources[source.name] = source
    return list(sources.values())


def _find(text: str, store: ModelStore) -> ModelSource:
    name, equals, source = text.partition("=")
    if not equals or Path(text).exists():  # a folder's name may hold an equals sign
        folder = store.resolve(text)
        return ModelSource(name=folder.resolve().name.lower(), folder=folder)
    if not name:
        raise ConfigError(f"the name before '=' must not be empty, got {text!r}")
    return ModelSource(name=name, folder=store.resolve(source))


def find_adapters(texts: Iterable[str], sources: Sequence[ModelSource]) -> dict[str, dict[str, str]]:
    """Return folders by model and adapter for texts such as `cats=path/to/adapter` and `model:cats=path/to/adapter`.

    Raises:
        ConfigError: a text has another form, names no served model, or none where there are several.
    """
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        model, colon, adapter = name.rpartition(":")
        if not equals or not adapter or not folder:
            raise ConfigError(f"an adapter is written NAME=FOLDER or MODEL:NAME=FOLDER, got {text!r}")
        if not colon and len(sources) > 1:
            raise ConfigError(f"there are several models; write MODEL:{text} to say which one the adapter is for")
        found.setdefault(model if colon else sources[0].name, {})[adapter] = folder
    return found


def check_adapters(config: ServerConfig, sources: Sequence[ModelSource]) -> None:
    """Raise ConfigError if adapters are set for a model that is not served."""
    names = [source.name for source in sources]
    for model in config.adapters:
        if model not in names:
            raise ConfigError(f"adapters are set for the model {model!r}; the served ones are: {', '.join(names)}")


def load_plugins(config: ServerConfig | TrainerConfig) -> PluginManager:
    """Load the plugins that the settings name; each one that fails is logged.

    Raises:
        PluginError: see PluginManager.load.
    """
    plugins = PluginManager.load(config.plugin_dirs, blocked=config.no_plugins, strict=config.strict_plugins)
    for plugin in plugins.plugins:
        if plugin.is_faulty:
            _LOG.warning("plugin %s is not active: %s", plugin.name, plugin.reason)
    return plugins


def load_models(server: InferenceServer, sources: Sequence[ModelSource]) -> list[LanguageModel]:
    """Load models one after the other; they are not served yet. May run in any thread."""
    models = []
    for source in sources:
        _LOG.info("loading %s from %s", source.name, source.folder)
        model = server.load_model(str(source.folder), source.name)
        decoder = model.decoder
        what = source.name, decoder.backend.name, decoder.dtype, decoder.cache_dtype
        _LOG.info("loaded %s: the backend %s computes in %s, and keeps keys and values in %s", *what)
        for name, folder in server.config.adapters.get(source.name, {}).items():
            model.load_adapter(name, folder)
        models.append(model)
    return models
