"""The families treadle knows, by `model_type`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from treadle_plugin_api.family import Family

from treadle_server.model.families.gpt2 import GPT2
from treadle_server.model.families.llama import LLAMA
from treadle_server.model.families.treadle_classic import TREADLE_CLASSIC


class FamilyRegistry:
    """Families by `model_type`; the built-in ones first, those of plugins added at start. A name is never replaced."""

    def __init__(self, extra: Iterable[Family] = ()) -> None:
        self._families: dict[str, Family] = {}
        for family in (LLAMA, GPT2, TREADLE_CLASSIC, *extra):
            self.register(family)

    def register(self, family: Family) -> None:
        """Add a family. Raises ValueError when its model_type is taken."""
        if family.model_type in self._families:
            raise ValueError(f"model_type {family.model_type!r} is registered already")
        self._families[family.model_type] = family

    def find(self, model_type: str) -> Family | None:
        """Return the family of a model_type, or None."""
        return self._families.get(model_type)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._families))
