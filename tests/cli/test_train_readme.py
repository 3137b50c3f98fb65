"""The commands of the page's part about `train`, taken from it and run as they stand but for the server's port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import treadle_server.cli

PAGE = Path(treadle_server.cli.__file__).with_name("README.md").read_text("utf-8")
TRAIN = PAGE[PAGE.index("## `train`") : PAGE.index("## Settings of `serve`")]
BLOCKS = re.findall(r"```bash\n(.*?)```", TRAIN, re.DOTALL)


def shell(script: str, folder: Path) -> str:
    """Run lines of shell that must succeed, with this venv's commands first, and return what they print."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euc", script]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_model_and_an_adapter_learn_the_tales(
    serve: Callable[..., AbstractContextManager[Any]], tmp_path: Path
) -> None:
    """Both tell the tale that they were trained on, the adapter also from a server, which takes it under a name."""
    model, adapter, serve_line, served = BLOCKS
    assert "mouse number" in shell(model, tmp_path)
    assert "mouse number" in shell(adapter, tmp_path)
    assert serve_line.split() == ["treadle", "serve", "stories", "--adapter", "tales=lora"]
    with serve("stories", "--adapter", f"tales={tmp_path / 'lora'}") as (_, target):
        assert "mouse number" in shell(served.replace("127.0.0.1:7433", target), tmp_path)
