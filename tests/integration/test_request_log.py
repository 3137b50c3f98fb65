"""What the log says of requests, and the ids by which they are found in it."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from treadle_client import Client, InvalidArgumentError, ServerInternalError
from treadle_protos.v1 import generation_pb2 as pb
from treadle_protos.v1 import generation_pb2_grpc
from treadle_server.cli.observing import JsonFormatter, TextFormatter

SECRET = "the secret of the cat"
STARTED = logging.getLogger("treadle_server.requests")


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Run `treadle serve` with a log file, and lend its address."""
    command = [sys.executable, "-m", "treadle_server.cli", "serve", f"tiny={model}", "--port", "0", "--json", *options]
    with log.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def lines_about(log: Path, request_id: str) -> list[dict[str, Any]]:
    """The lines of a JSON log about a request, waited for."""
    for _ in range(200):
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        found = [line for line in lines if line.get("request_id") == request_id]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no line about {request_id}:\n{log.read_text()}")


def test_each_request_is_one_line_of_json(tiny_folder: Path, tmp_path: Path, plugin_dir: Path) -> None:
    """A line has the facts of a request that went well, and one the reason of one that did not; no texts."""
    log = tmp_path / "log"
    options = ("--log-format", "json", "--log-level", "debug", "--plugin-dir", str(plugin_dir))
    with serving(tiny_folder, log, *options) as target, Client(target, retries=0) as client:
        answer = client.generate(SECRET, n=2, max_tokens=4, ignore_eos=True)
        with pytest.raises(InvalidArgumentError) as refused:
            client.generate(SECRET, stop=[SECRET] * 2, top_p=7)
        with pytest.raises(ServerInternalError) as failed:
            client.generate(SECRET, stages=["faulty"])
        (line,) = lines_about(log, answer.prompt_info.request_id)
        (refusal,) = lines_about(log, refused.value.request_id)
        (failure,) = lines_about(log, failed.value.request_id)
    assert (line["method"], line["code"], line["model"], line["client"]) == (
        "GenerationService/Generate", "OK", "tiny", "127.0.0.1",
    )  # fmt: skip
    assert (line["generated_tokens"], line["finish_reasons"]) == (8, ["max_tokens", "max_tokens"])
    assert (line["weight_version"], line["prompt_tokens"]) == (1, answer.choices[0].finish.usage.num_prompt_tokens)
    assert 0 < line["prefill_s"] + line["decode_s"] <= line["duration_s"]
    assert (refusal["code"], refusal["reason"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert (failure["level"], failure["plugin"], failure["stage"]) == ("error", "faulty", "faulty")
    assert all(SECRET not in text and answer.text not in text for text in (json.dumps(line), json.dumps(refusal)))
    assert SECRET not in log.read_text()


def test_text_is_the_default_and_a_level_cuts_it(tiny_folder: Path, tmp_path: Path) -> None:
    """A line of words by default; at the level warning there is none."""
    for options, count in (((), 1), (("--log-level", "warning"), 0)):
        log = tmp_path / "log"
        with serving(tiny_folder, log, *options) as target, Client(target) as client:
            request_id = client.generate("hello", max_tokens=1).prompt_info.request_id
            client.server_info()
        assert log.read_text().count(f"GenerationService/Generate OK: request_id={request_id} ") == count


def test_a_log_that_nobody_reads_holds_nothing_up(tiny_folder: Path) -> None:
    """Far more lines than a pipe takes, and every call is answered; the process ends when it is told to."""
    command = [sys.executable, "-m", "treadle_server.cli", "serve", f"tiny={tiny_folder}", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            with Client(json.loads(process.stdout.readline())["address"], timeout_s=20) as client:
                for _ in range(600):
                    client.server_info()
            process.terminate()
            assert process.wait(20) == 0
            assert len(process.stderr.read()) > 30_000
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3/4+=_", True), ("x" * 128, True), ("x" * 129, False), ("two words", False), ("", False)],
)
def test_a_sane_id_of_the_client_is_kept(target: str, given: str, kept: bool) -> None:
    """It comes back in PromptInfo and in the trailing metadata; in place of another one a new one does."""
    request = pb.GenerateRequest(spec=pb.GenerationSpec(model="tiny", text="a"))
    with grpc.insecure_channel(target) as channel:
        generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate
        answer, call = generate.with_call(request, metadata=[("x-request-id", given)])
    request_id = answer.prompt_info.request_id
    assert ("x-request-id", request_id) in [(m.key, m.value) for m in call.trailing_metadata()]
    assert (request_id == given) is kept
    assert len(request_id) >= 14


def test_a_stream_tells_its_id_too(target: str) -> None:
    """In its first message and, when it has ended, in the trailing metadata."""
    request = pb.GenerateStreamRequest(spec=pb.GenerationSpec(model="tiny", text="a"))
    with grpc.insecure_channel(target) as channel:
        stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(
            request, metadata=[("x-request-id", "mine")]
        )
        messages = list(stream)
        assert messages[0].prompt_info.request_id == "mine"
        assert ("x-request-id", "mine") in [(m.key, m.value) for m in stream.trailing_metadata()]


def record(message: str, **extra: object) -> logging.LogRecord:
    """A line to be formatted."""
    return STARTED.makeRecord(STARTED.name, logging.WARNING, __file__, 1, message, (), None, extra=extra)


def test_times_carry_the_zone() -> None:
    """A line for people has the local time with its offset, as that of JSON has Z."""
    line = TextFormatter("%(asctime)s %(message)s").format(record("slow"))
    time_of_day, zone = re.fullmatch(r"\d{4}-\d\d-\d\d (\S{12})([+-]\d\d:\d\d) slow", line).groups()
    assert time_of_day[8] == "."
    assert zone


def test_formatters_name_the_request_once() -> None:
    """A line that names its request itself does not get the id again; JSON has it in a field of its own."""
    text = TextFormatter("%(levelname)s %(message)s")
    assert text.format(record("slow", request_id="7f")) == "WARNING slow request_id=7f"
    assert text.format(record("slow request_id=7f", request_id="7f")) == "WARNING slow request_id=7f"
    assert text.format(record("slow", request_id="")) == "WARNING slow"
    told = record("Get OK: client=web", facts={"client": "web"}, summary="Get OK")
    assert text.format(told) == "WARNING Get OK: client=web"
    assert json.loads(JsonFormatter().format(told))["message"] == "Get OK"
    line = json.loads(JsonFormatter().format(record("two\nlines", request_id="7f", facts={"code": "OK"})))
    assert (line["message"], line["request_id"], line["code"], line["level"]) == ("two\nlines", "7f", "OK", "warning")
