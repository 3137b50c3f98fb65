"""Which role each RPC needs: one table, in which a method that is not named needs the highest."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Role(StrEnum):
    """What a caller may do. An admin may do what a user may."""

    USER = "user"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether who has this role may do what needs the other."""
        return self is Role.ADMIN or other is Role.USER


_OURS: Final = "treadle_protos.v1"
# Health answers to anyone: what probes a server has no token, and learns nothing but whether it serves.
OPEN_SERVICE: Final = "grpc.health.v1.Health"

# By `package.Service/Method`; `*` stands for every method of a service.
ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        f"{_OURS}.GenerationService/*": Role.USER,
        f"{_OURS}.TraceService/*": Role.USER,
        f"{_OURS}.SamplerService/*": Role.USER,
        f"{_OURS}.ServerService/*": Role.USER,
        f"{_OURS}.ModelService/ListModels": Role.USER,
        f"{_OURS}.ModelService/GetModel": Role.USER,
        f"{_OURS}.ModelService/ListAdapters": Role.USER,
        f"{_OURS}.ModelService/LoadModel": Role.ADMIN,
        f"{_OURS}.ModelService/UnloadModel": Role.ADMIN,
        f"{_OURS}.ModelService/UpdateWeights": Role.ADMIN,
        f"{_OURS}.ModelService/LoadAdapter": Role.ADMIN,
        f"{_OURS}.ModelService/UnloadAdapter": Role.ADMIN,
        f"{_OURS}.TrainingService/*": Role.ADMIN,
        "grpc.reflection.v1alpha.ServerReflection/*": Role.USER,
    }
)


def is_open(method: str) -> bool:
    """Whether a method, such as `/package.Service/Method`, answers to anyone."""
    return method.startswith(f"/{OPEN_SERVICE}/")


def role_needed(method: str) -> Role:
    """Return the role that a method, such as `/package.Service/Method`, needs."""
    name = method.removeprefix("/")
    service = name.partition("/")[0]
    return ROLES.get(name, ROLES.get(f"{service}/*", Role.ADMIN))
