"""Metrics, scraped from real servers over HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from treadle_client import (
    AsyncClient,
    DeadlineExceededError,
    PermissionDeniedError,
    TreadleClientError,
    UnauthenticatedError,
)
from treadle_server.config import ServerConfig
from treadle_server.errors import ConfigError
from treadle_server.plugins import PluginManager
from treadle_server.service.app import InferenceServer
from treadle_server.service.training.app import TrainerServer
from treadle_server.service.training.config import TrainerConfig

README = Path(__file__).parents[2] / "server/src/treadle_server/service/README.md"
TOKEN = "0123456789abcdef"


@asynccontextmanager
async def serving(config: ServerConfig, **models: Path) -> AsyncIterator[tuple[InferenceServer, str]]:
    """A server of these models, and its address."""
    server = InferenceServer(config, PluginManager.load(config.plugin_dirs))
    try:
        target = f"127.0.0.1:{await server.start()}"
        for name, folder in models.items():
            server.models.add(await asyncio.to_thread(server.load_model, str(folder), name))
        await server.open()
        yield server, target
    finally:
        await server.stop(0)


def get(url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> str:
    """Fetch a page."""
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return answer.read().decode()


async def scrape(server: InferenceServer | TrainerServer) -> dict[str, float]:
    """Return every sample by name and labels, such as `name{model=tiny}`."""
    page = await asyncio.to_thread(get, server.observability.metrics_url)
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {
        f"{s.name}{{{','.join(f'{name}={value}' for name, value in sorted(s.labels.items()))}}}": s.value
        for s in samples
    }


def listed(server: InferenceServer | TrainerServer) -> set[tuple[str, str, str]]:
    """Name, kind and labels of every metric of ours, as the table in the README has them."""
    found = set()
    for family in server.observability.registry.collect():
        if family.name.startswith("treadle_"):
            labels = {name for sample in family.samples for name in sample.labels} - {"le"}
            name = family.name + ("_total" if family.type == "counter" else "")
            found.add((name, family.type, ", ".join(sorted(labels))))
    return found


def table() -> dict[str, tuple[str, str]]:
    """Kind and labels of each metric in the README."""
    rows = re.findall(r"^\| `(treadle_\w+)` \| (\w+) \| ([\w, ]*?) ?\|", README.read_text(), re.MULTILINE)
    return {name: (kind, ", ".join(sorted(filter(None, labels.split(", "))))) for name, kind, labels in rows}


async def test_a_scrape_tells_what_was_done(tiny_folder: Path, overflowing_folder: Path, plugin_dir: Path) -> None:
    """Counts of requests, tokens, reasons, failures and RPCs are those of the requests that were made."""
    config = ServerConfig(port=0, metrics_port=0, plugin_dirs=(plugin_dir,), max_stage_s=0.001)
    async with serving(config, tiny=tiny_folder, overflowing=overflowing_folder) as (server, target):
        async with AsyncClient(target, retries=0, timeout_s=20) as client:
            await client.generate([5, 6, 7], model="tiny", n=2, max_tokens=4, ignore_eos=True)
            slow = [("faulty", {"how": "sleep"})]
            await client.generate([5], model="tiny", max_tokens=2, ignore_eos=True, stages=slow)
            for model, options in (
                ("tiny", {"stages": ["faulty"]}),
                ("tiny", {"top_p": 7}),
                ("overflowing", {}),
                ("none", {}),
            ):
                with pytest.raises(TreadleClientError):
                    await client.generate([5], model=model, **options)
        found = await scrape(server)
    assert found["treadle_prompt_tokens_total{model=tiny}"] == 3 + 1 + 1
    assert found["treadle_generated_tokens_total{model=tiny}"] == 2 * 4 + 2
    assert found["treadle_first_token_seconds_count{model=tiny}"] == 2
    assert found["treadle_inter_token_seconds_count{model=tiny}"] == 2 * 3 + 1
    assert found["treadle_choices_total{model=tiny,reason=max_tokens}"] == 3
    assert found["treadle_requests_total{model=tiny,outcome=finished}"] == 2
    assert found["treadle_requests_total{model=tiny,outcome=refused}"] == 1
    assert found["treadle_requests_total{model=tiny,outcome=failed}"] == 1
    assert found["treadle_stage_failures_total{model=tiny,plugin=faulty,stage=faulty}"] == 1
    assert found["treadle_slow_stage_calls_total{model=tiny,stage=faulty}"] == 2
    assert found["treadle_corrupted_requests_total{model=overflowing}"] == 1
    assert found["treadle_rpcs_total{code=NOT_FOUND,method=GenerationService/Generate}"] == 1
    assert found["treadle_rpc_seconds_count{method=GenerationService/Generate}"] == 6
    assert found["treadle_rpcs_under_way{}"] == found["treadle_kv_bytes{model=tiny}"] == 0
    assert found["treadle_weight_version{model=tiny}"] == 1
    assert found["treadle_plugins{state=failed}"] == 1
    assert found["process_resident_memory_bytes{}"] > 1e7


async def test_who_went_away_is_counted_apart_from_who_ran_out_of_time(tiny_folder: Path) -> None:
    """One nobody waits for is cancelled, a passed deadline a deadline; labels hold nothing that a client chose."""
    config = ServerConfig(port=0, metrics_port=0)
    release = threading.Event()
    async with serving(config, tiny=tiny_folder) as (server, target), AsyncClient(target, retries=0) as client:
        server._worker.call(release.wait)  # nothing is answered before both are over
        try:
            leaving = asyncio.create_task(client.generate([5]))
            while not server.models.get("tiny").engine.load().num_waiting_requests:
                await asyncio.sleep(0.01)
            leaving.cancel()
            with pytest.raises(DeadlineExceededError):
                await client.generate([7], timeout_s=2)
            while (found := await scrape(server))["treadle_rpcs_under_way{}"]:
                await asyncio.sleep(0.05)
        finally:
            release.set()
    assert found["treadle_requests_total{model=tiny,outcome=cancelled}"] == 1
    assert found["treadle_requests_total{model=tiny,outcome=deadline}"] == 1


async def test_the_table_lists_every_metric(tiny_folder: Path) -> None:
    """The README's table has the metrics of a server and of a trainer, with their kinds and labels, and no others."""
    config = ServerConfig(port=0, metrics_port=0)
    async with serving(config, tiny=tiny_folder) as (server, target), AsyncClient(target, retries=0) as client:
        await client.generate([5], max_tokens=1)
        found = listed(server)
    trainer = TrainerServer(TrainerConfig(port=0))
    found |= listed(trainer)
    await trainer.stop(0)
    documented = table()
    assert documented.keys() == {name for name, _, _ in found}
    for name, kind, labels in found:
        assert documented[name][0] == kind
        assert not labels or documented[name][1] == labels


async def test_a_taken_port_and_an_open_host_are_refused(tiny_folder: Path) -> None:
    """As for the port of gRPC: the address is named, and nothing is shown beyond this machine in plain text."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = InferenceServer(ServerConfig(port=0, metrics_port=port), PluginManager.load())
        with pytest.raises(ConfigError, match=f"{port} for metrics"):
            await server.start()
        await server.stop(0)
    with pytest.raises(ConfigError, match="other machines"):
        InferenceServer(ServerConfig(port=0, host="0.0.0.0", metrics_port=0), PluginManager.load())


async def test_metrics_are_off_by_default(tiny_folder: Path) -> None:
    """Without a port nothing listens."""
    async with serving(ServerConfig(port=0), tiny=tiny_folder) as (server, _):
        assert server.observability.metrics_url is None


async def test_metrics_need_the_servers_token_and_speak_its_tls(tmp_path: Path) -> None:
    """A token of any role opens them, over HTTPS where the server has a certificate; other pages are not there."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    (tmp_path / "server.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    for name, content in (("server.key", issued.private_key_pem.bytes()), ("tokens", f"user {TOKEN}\n".encode())):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(content)
    config = ServerConfig(
        port=0,
        metrics_port=0,
        tls_certificate=tmp_path / "server.pem",
        tls_key=tmp_path / "server.key",
        token_file=tmp_path / "tokens",
    )
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving(config) as (server, _):
        url = server.observability.metrics_url
        assert url is not None
        assert "treadle_build" in await asyncio.to_thread(get, url, TOKEN, context)
        for page, token, code in ((url, None, 401), (url, "f" * 16, 401), (url + "x", TOKEN, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(get, page, token, context)
            refused.value.close()
            assert refused.value.code == code


async def test_callers_who_may_not_call_are_counted(tmp_path: Path) -> None:
    """Without a token, and with one whose role is not enough."""
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text(f"user {TOKEN}\n")
    async with serving(ServerConfig(port=0, metrics_port=0, token_file=tmp_path / "tokens")) as (server, target):
        async with AsyncClient(target, retries=0) as nobody, AsyncClient(target, retries=0, token=TOKEN) as user:
            with pytest.raises(UnauthenticatedError):
                await nobody.server_info()
            with pytest.raises(PermissionDeniedError):
                await user.unload_model("tiny")
        page = await asyncio.to_thread(get, server.observability.metrics_url, TOKEN)
    for code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        assert f'treadle_auth_failures_total{{code="{code}"}} 1.0' in page


async def test_connections_that_say_nothing_do_not_keep_others_out_for_ever(tiny_folder: Path) -> None:
    """A few idle connections leave room for a scrape; many are hung up on."""
    async with serving(ServerConfig(port=0, metrics_port=0), tiny=tiny_folder) as (server, _):
        port = int(server.observability.metrics_url.split(":")[2].split("/")[0])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(7)]
        assert "treadle_weight_version{model=tiny}" in await scrape(server)
        over = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        over[-1].settimeout(5)
        assert await asyncio.to_thread(over[-1].recv, 1) == b""
        for connection in (*idle, *over):
            connection.close()


async def test_a_trainer_shows_its_steps(tiny_folder: Path) -> None:
    """Steps, loss, speed and gradient of the newest step, beside the counts of RPCs."""
    from treadle_client import AsyncTrainingClient

    server = TrainerServer(TrainerConfig(port=0, metrics_port=0))
    target = f"127.0.0.1:{await server.start()}"
    await server.open(await asyncio.to_thread(server.load, str(tiny_folder)))
    async with AsyncTrainingClient(target) as client:
        done = await client.step([[5, 6, 7, 8]], lr=1e-3)
        await asyncio.sleep(0.2)
        found = await scrape(server)
    await server.stop(0)
    assert found["treadle_trainer_steps_total{}"] == found["treadle_trainer_step{}"] == 1
    assert found["treadle_trainer_loss{}"] == pytest.approx(done.result.loss)
    assert found["treadle_trainer_gradient_norm{}"] == pytest.approx(done.grad_norm)
    assert found["treadle_trainer_tokens_per_second{}"] > 0
    assert found["treadle_rpcs_total{code=OK,method=TrainingService/Step}"] == 1
