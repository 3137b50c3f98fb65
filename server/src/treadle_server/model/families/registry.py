"""The families treadle knows, by `model_type`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from treadle_plugin_api.family import Family

from treadle_server.model.families.bloom import BLOOM
from treadle_server.model.families.cohere import COHERE
from treadle_server.model.families.cohere2 import COHERE2
from treadle_server.model.families.falcon import FALCON
from treadle_server.model.families.gemma import GEMMA
from treadle_server.model.families.gemma2 import GEMMA2
from treadle_server.model.families.gemma3_text import GEMMA3_TEXT
from treadle_server.model.families.gpt2 import GPT2
from treadle_server.model.families.gpt_bigcode import GPT_BIGCODE
from treadle_server.model.families.gpt_neo import GPT_NEO
from treadle_server.model.families.gpt_neox import GPT_NEOX
from treadle_server.model.families.gptj import GPTJ
from treadle_server.model.families.granite import GRANITE
from treadle_server.model.families.llama import LLAMA
from treadle_server.model.families.mistral import MISTRAL
from treadle_server.model.families.mixtral import MIXTRAL
from treadle_server.model.families.olmo import OLMO
from treadle_server.model.families.olmo2 import OLMO2
from treadle_server.model.families.opt import OPT
from treadle_server.model.families.phi import PHI
from treadle_server.model.families.phi3 import PHI3
from treadle_server.model.families.qwen2 import QWEN2
from treadle_server.model.families.qwen2_moe import QWEN2_MOE
from treadle_server.model.families.qwen3 import QWEN3
from treadle_server.model.families.qwen3_moe import QWEN3_MOE
from treadle_server.model.families.smollm3 import SMOLLM3
from treadle_server.model.families.stablelm import STABLELM
from treadle_server.model.families.starcoder2 import STARCODER2
from treadle_server.model.families.treadle_classic import TREADLE_CLASSIC

BUILT_IN = (
    BLOOM,
    COHERE,
    COHERE2,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    GPT_NEOX,
    GPTJ,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO,
    OLMO2,
    OPT,
    PHI,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    TREADLE_CLASSIC,
)


def family_problems(families: Sequence[object]) -> list[str]:
    """Return what is wrong with the families that a plugin registers; nothing when they can be used."""
    problems = []
    names = [family.model_type for family in BUILT_IN]
    for family in families:
        if not isinstance(family, Family):
            problems.append(f"family {family!r} is no treadle_plugin_api.family.Family")
        elif not isinstance(family.model_type, str) or not family.model_type:
            problems.append(f"family {family!r} has no model_type")
        elif family.model_type in names:
            problems.append(f"model_type {family.model_type!r} is built in, or registered twice")
        else:
            names.append(family.model_type)
    return problems


class FamilyRegistry:
    """Families by `model_type`; the built-in ones first, those of plugins added at start. A name is never replaced."""

    def __init__(self, extra: Iterable[Family] = (), *, built_in: Iterable[Family] = BUILT_IN) -> None:
        self._families: dict[str, Family] = {}
        for family in (*built_in, *extra):
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
