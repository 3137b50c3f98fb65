"""The models a server has, by name."""

from __future__ import annotations

from treadle_server.errors import InvalidRequestError, ModelExistsError, ModelNotFoundError, UnavailableError
from treadle_server.language_model import LanguageModel


class ServedModels:
    """The models by name, and whether requests may use them now."""

    def __init__(self) -> None:
        self._models: dict[str, LanguageModel] = {}
        self._retired: set[str] = set()
        self._unavailable: str | None = "the server is loading its models"

    def add(self, model: LanguageModel) -> None:
        """Serve one more model."""
        self._models[model.name] = model

    def retire(self, name: str) -> LanguageModel:
        """Refuse requests of a model from now on; those under way go on.

        Raises:
            ModelNotFoundError: there is no such model; an empty name is none.
        """
        if name not in self._models:
            raise ModelNotFoundError(name, self._models)
        self._retired.add(name)
        return self._models.pop(name)

    def forget(self, name: str) -> None:
        """Know nothing more of a model that was retired."""
        self._retired.discard(name)

    def open(self) -> None:
        """Take requests from now on."""
        self._unavailable = None

    def drain(self) -> None:
        """Refuse requests from now on; those under way go on."""
        self._unavailable = "the server is shutting down and takes no new requests"

    def all(self) -> list[LanguageModel]:
        """Every model, by name; may be asked in any thread."""
        return [model for _, model in sorted(self._models.items())]

    def get(self, name: str) -> LanguageModel:
        """Return a model by name; the only one where the name is empty.

        Raises:
            UnavailableError: the server is loading or draining, or the model is being unloaded.
            ModelNotFoundError: there is no such model.
            InvalidRequestError: the name is empty and there are several models.
        """
        if not name:
            return self._unnamed()
        self.check_available()
        if name in self._retired:
            raise UnavailableError(f"the model {name!r} is being unloaded")
        if name not in self._models:
            raise ModelNotFoundError(name, self._models)
        return self._models[name]

    def _unnamed(self) -> LanguageModel:
        only = self.only()
        if only is not None:
            return only
        if not self._models:
            raise ModelNotFoundError("")
        known = ", ".join(sorted(self._models))
        raise InvalidRequestError.of("model", f"must name one of the served models: {known}")

    def only(self) -> LanguageModel | None:
        """Return the model that needs no name; None where there are several.

        Raises:
            UnavailableError: the server is loading or draining.
        """
        self.check_available()
        return next(iter(self._models.values())) if len(self._models) == 1 else None

    def check_available(self) -> None:
        """Raise UnavailableError while the server loads or drains."""
        if self._unavailable:
            raise UnavailableError(self._unavailable)

    def check_free(self, name: str) -> None:
        """Raise ModelExistsError if a model is served under the name."""
        if name in self._models:
            raise ModelExistsError(f"a model is served as {name!r} already; unload it first, or choose another name")
