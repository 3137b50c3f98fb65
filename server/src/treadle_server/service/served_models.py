"""The models a server has, by name."""

from __future__ import annotations

from treadle_server.errors import InvalidRequestError, ModelNotFoundError, UnavailableError
from treadle_server.language_model import LanguageModel


class ServedModels:
    """The models by name, and whether requests may use them now."""

    def __init__(self) -> None:
        self._models: dict[str, LanguageModel] = {}
        self._unavailable: str | None = "the server is loading its models"

    def add(self, model: LanguageModel) -> None:
        """Serve one more model."""
        self._models[model.name] = model

    def open(self) -> None:
        """Take requests from now on."""
        self._unavailable = None

    def drain(self) -> None:
        """Refuse requests from now on; those under way go on."""
        self._unavailable = "the server is shutting down and takes no new requests"

    def all(self) -> list[LanguageModel]:
        """Every model, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def get(self, name: str) -> LanguageModel:
        """Return a model by name; the only one where the name is empty.

        Raises:
            UnavailableError: the server is loading or draining.
            ModelNotFoundError: there is no such model.
            InvalidRequestError: the name is empty and there are several models.
        """
        if not name:
            if (only := self.only()) is None:
                known = ", ".join(sorted(self._models))
                raise InvalidRequestError.of("model", f"must name one of the served models: {known}")
            return only
        self._check_available()
        if name not in self._models:
            raise ModelNotFoundError(name, self._models)
        return self._models[name]

    def only(self) -> LanguageModel | None:
        """Return the model that needs no name; None where there are several.

        Raises:
            UnavailableError: the server is loading or draining.
        """
        self._check_available()
        return next(iter(self._models.values())) if len(self._models) == 1 else None

    def _check_available(self) -> None:
        if self._unavailable:
            raise UnavailableError(self._unavailable)
