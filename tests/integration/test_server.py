"""Health, reflection, and the life of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from treadle_client import AsyncClient, Client, UnavailableError
from treadle_server.config import ServerConfig
from treadle_server.errors import ConfigError
from treadle_server.plugins import PluginManager
from treadle_server.service.app import SERVICES, InferenceServer
from treadle_server.service.embedded import embedded_server


def test_reflection_lists_the_services(target: str) -> None:
    """Tools can find every service without its proto files."""
    with grpc.insecure_channel(target) as channel:
        names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {*SERVICES, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health_is_serving_for_each_service(target: str, service: str) -> None:
    """The server as a whole and each service answer SERVING."""
    with grpc.insecure_channel(target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_checks_that_make_no_sense_are_refused(target: str) -> None:
    """Broken bytes are INVALID_ARGUMENT, and the list that this server has not is UNIMPLEMENTED."""
    with grpc.insecure_channel(target) as channel:
        for method, raw, code in (("Check", b"\n\x05", "INVALID_ARGUMENT"), ("List", b"", "UNIMPLEMENTED")):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/grpc.health.v1.Health/{method}")(raw)
            assert caught.value.code().name == code


def test_models_and_info(client: Client, tiny_folder: Path) -> None:
    """The server describes its models, its limits and its load."""
    models = {model.name: model for model in client.list_models()}
    tiny = models["tiny"]
    assert (tiny.model_type, tiny.context_length, tiny.eos_token_ids, tiny.bos_token_id) == ("llama", 128, (2,), 1)
    assert (tiny.numerics, tiny.dtype, tiny.has_chat_template) == ("reproducible", "float32", True)
    assert client.get_model("tiny") == tiny
    assert client.server_info().limits.max_message_bytes == 16 << 20


async def health(target: str) -> int:
    """Ask the server as a whole for its health."""
    async with grpc.aio.insecure_channel(target) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def test_not_serving_while_loading_and_draining(tiny_folder: Path) -> None:
    """Health tells a loading and a draining server from a serving one; a stream under way finishes."""
    server = InferenceServer(ServerConfig(port=0), PluginManager.load())
    target = f"127.0.0.1:{await server.start()}"
    assert await health(target) == health_pb2.HealthCheckResponse.NOT_SERVING
    async with AsyncClient(target, retries=0, timeout_s=20) as client:
        with pytest.raises(UnavailableError, match="loading"):
            await client.generate("a")
        server.models.add(await asyncio.to_thread(server.load_model, str(tiny_folder)))
        await server.open()
        assert await health(target) == health_pb2.HealthCheckResponse.SERVING
        stream = client.stream([5, 6], ignore_eos=True, max_tokens=100)
        first = await anext(aiter(stream))
        stopping = asyncio.create_task(server.stop(grace_s=10))
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish.usage.num_generated_tokens == 100
        assert first is not None
        await stopping
        with pytest.raises(UnavailableError):
            await client.generate("a")


async def test_grace_that_ends_cancels_what_is_left(tiny_folder: Path) -> None:
    """After the grace period an open stream is cancelled and the server is gone."""
    server = InferenceServer(ServerConfig(port=0, max_prefill_tokens=1), PluginManager.load())
    target = f"127.0.0.1:{await server.start()}"
    server.models.add(await asyncio.to_thread(server.load_model, str(tiny_folder)))
    await server.open()
    async with AsyncClient(target, retries=0) as client:
        tasks = [
            asyncio.create_task(client.generate([7] * 100, n=20, ignore_eos=True, max_tokens=27)) for _ in range(40)
        ]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(server.stop(grace_s=0), timeout=10)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, Exception) for result in results)


async def test_taken_port_is_a_clear_error() -> None:
    """A second server on the same port does not start, and names the address."""
    first = InferenceServer(ServerConfig(port=0), PluginManager.load())
    port = await first.start()
    second = InferenceServer(ServerConfig(port=port), PluginManager.load())
    with pytest.raises(ConfigError, match=str(port)):
        await second.start()
    await second.stop(0)
    await first.stop(0)


def test_draft_model_is_a_setting_of_the_served_model(tiny_folder: Path) -> None:
    """A model that the settings give a draft model takes requests that ask for it, and counts what it accepts."""
    config = ServerConfig(port=0, numerics="reproducible", drafts={"tiny": str(tiny_folder)}, grace_s=0)
    with embedded_server([f"tiny={tiny_folder}"], config) as target, Client(target) as client:
        answer = client.generate("hello", temperature=0, max_tokens=20, ignore_eos=True, speculation="draft_model")
    usage = answer.choices[0].finish.usage
    assert 0 < usage.num_accepted_tokens <= usage.num_draft_tokens
