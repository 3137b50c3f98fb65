"""The table of roles against the protocol."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import treadle_protos.v1
from treadle_server.service.security.permissions import ROLES, Role, is_open, role_needed

ADMIN = {
    "ModelService": {"LoadModel", "UnloadModel", "UpdateWeights", "LoadAdapter", "UnloadAdapter"},
    "TrainingService": {"*"},
}


def protocol() -> list[tuple[str, str]]:
    """Return the service and the name of every RPC of the protocol, whoever serves it."""
    found = []
    for module in pkgutil.iter_modules(treadle_protos.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"treadle_protos.v1.{module.name}").DESCRIPTOR
            services = descriptor.services_by_name.values()
            found += [(service.full_name, method.name) for service in services for method in service.methods]
    return found


@pytest.mark.parametrize(("service", "method"), protocol())
def test_every_rpc_is_in_the_table(service: str, method: str) -> None:
    """An RPC that is added needs a decision about who may call it; loading and training are for administrators."""
    assert {f"{service}/{method}", f"{service}/*"} & ROLES.keys()
    admin = ADMIN.get(service.rpartition(".")[2], set())
    assert (role_needed(f"/{service}/{method}") is Role.ADMIN) == bool(admin & {method, "*"})
    assert not is_open(f"/{service}/{method}")


def test_table_names_nothing_that_is_gone() -> None:
    """Every method in the table is one of the protocol."""
    known = {f"{service}/{method}" for service, method in protocol()}
    assert {name for name in ROLES if not name.endswith("/*")} <= known


def test_what_is_unknown_needs_the_highest_role() -> None:
    """A method that nobody thought of is for administrators; only health is open."""
    assert role_needed("/treadle_protos.v1.ModelService/New") is Role.ADMIN
    assert role_needed("/else.Service/Method") is Role.ADMIN
    assert is_open("/grpc.health.v1.Health/Watch")
    assert not is_open("/grpc.health.v1.Healthy/Watch")


def test_admin_includes_user() -> None:
    """An administrator may do what a user may, not the other way round."""
    assert Role.ADMIN.includes(Role.USER)
    assert Role.USER.includes(Role.USER)
    assert not Role.USER.includes(Role.ADMIN)
