"""`treadle train`."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from treadle_server.cli.train import TrainFlags
from treadle_server.cli.train_display import format_duration
from treadle_server.training.train_config import TrainConfig

Run = Callable[..., Any]  # the fixtures `treadle` and `start`
FEW_STEPS = ("--steps", "6", "--batch-tokens", "256", "--lr", "0.003")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of short stories."""
    path = tmp_path / "stories.jsonl"
    animals = ("cat", "mouse", "dog", "bird", "猫")
    texts = [f"The {a} saw the {b}. " * 4 for a in animals for b in animals]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def wait_for(process: Any, text: bytes) -> bytes:
    """Read the stderr of a process up to the line that has a text."""
    read = b""
    for line in process.stderr:
        read += line
        if text in line:
            return read
    raise AssertionError(read.decode())


def test_it_trains_a_model_that_generates(treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """The folder of a finished run goes into `generate`; stdout has one line, stderr how it went."""
    out = tmp_path / "better"
    done = treadle("train", data, "--model", tiny_folder, "--out", out, *FEW_STEPS, "--held-out-fraction", "0.1")
    assert re.fullmatch(
        re.escape(str(out)) + r": 6 steps, \d+ tokens, loss \d\.\d+, "
        r"held-out loss \d\.\d+ \(perplexity \d+\.\d+\) at step 6\n",
        done.stdout,
    )
    assert re.search(r"^step 1/6: loss \d\.\d+, \d+ tokens/s, 0:\d\d left$", done.stderr, re.MULTILINE)
    assert "step 6: held-out loss" in done.stderr
    assert {"loss.csv", "loss.png", "model.safetensors"} <= {path.name for path in out.iterdir()}
    treadle("generate", "The cat", "-m", out, "--max-tokens", "2")


def test_it_says_what_next(treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """The last line of stderr generates with the model, or with the adapter and the model that it is for."""
    one, two = tmp_path / "a b", tmp_path / "lora"
    done = treadle("train", data, "-m", tiny_folder, "-o", one, *FEW_STEPS)
    assert done.stderr.splitlines()[-1] == f"try: treadle generate PROMPT --model '{one}'"
    done = treadle("train", data, "-m", tiny_folder, "-o", two, *FEW_STEPS, "--lora-rank", "2")
    model = shlex.quote(str(tiny_folder))
    assert done.stderr.splitlines()[-1] == f"try: treadle generate PROMPT --model {model} --adapter {two}"
    words = ["is a LoRA adapter: use --model", str(tiny_folder), f"--adapter {two}"]
    refused = treadle("generate", "The cat", "--model", two, status=1).stderr
    assert [word for word in words if word not in refused] == []


def test_plugins_are_taken_from_a_folder(treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """One that does not load is named with its reason, and left out where it is told to be."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "broken.py").write_text("import nothing_of_this_name\n")
    options = ("-m", tiny_folder, *FEW_STEPS, "--plugin-dir", tmp_path / "mine")
    done = treadle("train", data, "-o", tmp_path / "one", *options)
    assert "plugin broken is not active: " in done.stderr
    done = treadle("train", data, "-o", tmp_path / "two", *options, "--no-plugin", "broken", "--json")
    assert "broken" not in done.stderr
    assert "try:" not in done.stderr


def test_json_has_the_final_figures(treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """--json writes one line with what came of the run; settings come from the file, options win."""
    (tmp_path / "train.toml").write_text('steps = 2\nlr = 1e-3\noptimizer = "sgd"\n')
    options = ("--config", tmp_path / "train.toml", "--steps", "3", "--json")
    done = treadle("train", data, "-m", tiny_folder, "-o", tmp_path / "out", *options)
    figures = json.loads(done.stdout)
    assert (figures["status"], figures["step"], figures["best_step"]) == ("finished", 3, 3)
    assert figures["folder"] == str(tmp_path / "out")
    assert figures["held_out_loss"] is None
    assert figures["num_tokens"] > 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["optimizer"] == "sgd"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on(
    start: Run, treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path, number: int, status: int
) -> None:
    """Ctrl-C and SIGTERM end it after a step with a checkpoint, and --resume takes it to the end."""
    out = tmp_path / "out"
    options = ("--steps", "100000", "--batch-tokens", "256", "--schedule", "constant")
    with start("train", data, "-m", tiny_folder, "-o", out, *options) as process:
        wait_for(process, b"step 1/100000")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == status, stderr.decode()
    assert b"stopping after this step; another signal exits at once" in stderr
    stopped = int(re.search(rb"stopped after step (\d+); go on with: treadle train --resume --out", stderr)[1])
    assert stdout.decode().startswith(f"{out}/checkpoints/step-{stopped:08d}: {stopped} steps")
    done = treadle("train", "--resume", "--out", out, "--steps", str(stopped + 2), "--json")
    assert json.loads(done.stdout)["step"] == stopped + 2


def test_a_second_signal_exits_at_once(start: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """While the step under way takes its time, another Ctrl-C does not wait for it."""
    data.write_text(data.read_text() * 100)
    options = ("--batch-tokens", "100000", "--sequence-length", "64")
    with start("train", data, "-m", tiny_folder, "-o", tmp_path / "out", *options) as process:
        while not (tmp_path / "out" / "loss.csv").exists():
            assert process.poll() is None
            time.sleep(0.02)
        for _ in range(2):
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_killed_run_goes_on(start: Run, treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """Killed while it saves after every step, it has a complete checkpoint to go on from."""
    out = tmp_path / "out"
    options = ("--steps", "100000", "--batch-tokens", "256", "--checkpoint-interval", "1")
    with start("train", data, "-m", tiny_folder, "-o", out, *options) as process:
        wait_for(process, b"step 3: saved")
        time.sleep(0.1)
        process.kill()
    done = treadle("train", "--resume", "--out", out, "--steps", "60", "--checkpoint-interval", "500", "--json")
    assert json.loads(done.stdout)["status"] == "finished"


def test_a_terminal_gets_a_bar(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """On a terminal stderr has a bar with steps, loss, speed and time left, and lines above it."""
    terminal, process_end = pty.openpty()
    command = [sys.executable, "-m", "treadle_server.cli", "train", data, "-m", tiny_folder, "-o", tmp_path / "out"]
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    done = subprocess.run(
        [*map(str, command), *FEW_STEPS],
        check=False,
        stdout=subprocess.PIPE,
        stderr=process_end,
        env=environment,
        timeout=60,
    )
    shown = os.read(terminal, 1 << 16).decode()
    os.close(process_end)
    os.close(terminal)
    assert done.returncode == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"step 6/6 .*loss \d\.\d+ +\d+ tokens/s .*left", plain)
    assert "step 6: saved" in plain


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lr", "-1", "--label-smoothing", "2"], ["lr", "greater than or equal to 0, got -1", "label_smoothing"]),
        (["--steps", "3", "--epochs", "3"], ["steps and epochs"]),
        (["--optimizer", "adam"], ["optimizer", "adamw", "'adam'"]),
        (["--lr", "fast"], ["--lr", "'fast'"]),
        (["--momentum", "0.5"], ["momentum", "adamw"]),
        (["--frozen", "nothing.*"], ["frozen", "'nothing.*'"]),
        (["--resume"], ["--resume", "neither"]),
    ],
)
def test_wrong_options_are_named(
    treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    """Wrong settings exit with 2, say what was wrong, and leave nothing on stdout."""
    done = treadle("train", data, "-m", tiny_folder, "-o", tmp_path / "out", *options, status=2)
    assert done.stdout == ""
    assert [word for word in words if word not in done.stderr] == []


@pytest.mark.parametrize(
    "arguments", [["--out", "x"], ["data.txt", "--out", "x"], ["-m", "x", "--out", "x"], ["data.txt", "-m", "x"]]
)
def test_what_is_missing_is_named(treadle: Run, arguments: list[str]) -> None:
    """Without data, model or folder nothing starts."""
    assert "needed" in treadle("train", *arguments, status=2).stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "good"}\n{"text": \n', "stories.jsonl, line 2: is no JSON"),
        ("", "there is no document in"),
    ],
)
def test_bad_data_is_named(
    treadle: Run, tiny_folder: Path, data: Path, tmp_path: Path, content: str, words: str
) -> None:
    """Data that cannot be read exits with 1 and its file and line, and makes no folder."""
    data.write_text(content)
    assert words in treadle("train", data, "-m", tiny_folder, "-o", tmp_path / "out", status=1).stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_keeps_the_last_checkpoint(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """A file that cannot grow, as on a full disk, ends it with 1, a line that says so, and what was saved before."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # the model's file has 460 kB

    command = [sys.executable, "-m", "treadle_server.cli", "train", data, "-m", tiny_folder, "-o", tmp_path / "out"]
    done = subprocess.run(
        [*map(str, command), *FEW_STEPS], check=False, capture_output=True, preexec_fn=limit_files, timeout=60
    )
    stderr = done.stderr.decode()
    assert done.returncode == 1, stderr
    assert "Traceback" not in stderr
    assert re.search(r"error: after 6 steps: .*cannot be written.*there is no checkpoint", stderr)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05"), (360000, "100:00:00")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    """Minutes and seconds, with hours where there are any."""
    assert format_duration(seconds) == text


def test_every_setting_is_an_option() -> None:
    """Each field of TrainConfig has an option of its name."""
    assert get_type_hints(TrainFlags).keys() == TrainConfig.model_fields.keys()
