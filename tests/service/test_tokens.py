"""The token file: what it may hold, who may read it, and when it is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from treadle_server.errors import ConfigError
from treadle_server.service.security.permissions import Role
from treadle_server.service.security.tokens import Caller, TokenFile

TOKEN = "0123456789abcdef-token"
NEW = "fedcba9876543210-token"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A token file of one administrator."""
    return write(tmp_path / "tokens", f"alice admin {TOKEN}\n")


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    """Write a file with a mode."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_lines_comments_and_names(path: Path) -> None:
    """A line is a role and a token, or a name before them; one without a name is called by role and line."""
    write(path, f"# comment\n\n  alice\tadmin {TOKEN}  \r\nuser {NEW}\n")
    tokens = TokenFile(path)
    assert len(tokens) == 2
    assert tokens.find(TOKEN) == Caller("alice", Role.ADMIN)
    assert tokens.find(NEW) == Caller("user@4", Role.USER)
    assert tokens.find(TOKEN[:-1]) is tokens.find("") is tokens.find("\udc80") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no token"),
        ("# only a comment\n", "holds no token"),
        (f"{TOKEN}\n", "line 1 .* has 1 words"),
        (f"user {NEW}\na b user {TOKEN}\n", "line 2 .* has 4 words"),
        (f"boss {TOKEN}\n", "line 1 .* names no role where one is expected: user, admin"),
        (f"{TOKEN} user\n", "names no role"),
        (f"user {TOKEN[:15]}\n", "line 1 .* has no token of 16 or more visible ASCII characters"),
        (f"user {TOKEN}é\n", "visible ASCII"),
        (f"user {TOKEN}\nadmin {TOKEN}\n", "holds a token twice"),
        (b"user \xff\n", "is not UTF-8"),
        (b"#" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_broken_file_is_refused_without_showing_it(path: Path, content: str | bytes, message: str) -> None:
    """The error names the file and the line, and never shows a word of it."""
    write(path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)
    assert TOKEN[:15] not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"


def test_missing_file_is_named(tmp_path: Path) -> None:
    """The error gives the path and the system's reason."""
    with pytest.raises(ConfigError, match=f"token file {tmp_path / 'none'}: No such file"):
        TokenFile(tmp_path / "none")


@pytest.mark.parametrize(
    ("mode", "good"), [(0o600, True), (0o400, True), (0o640, True), (0o604, False), (0o602, False)]
)
def test_file_that_others_can_read_is_refused(path: Path, mode: int, good: bool) -> None:
    """Other users of the machine must have no access; the group may."""
    path.chmod(mode)
    if good:
        assert len(TokenFile(path)) == 1
    else:
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
            TokenFile(path)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def test_file_is_looked_at_once_a_second(path: Path) -> None:
    """A change is seen at the first token after a second, not before; a call to reload sees it at once."""
    clock = Clock()
    tokens = TokenFile(path, clock)
    write(path, f"bob user {NEW}\n")
    clock.now_s = 0.9
    assert tokens.find(NEW) is None
    clock.now_s = 1.1
    assert tokens.find(NEW) == Caller("bob", Role.USER)
    assert tokens.find(TOKEN) is None
    write(path, f"alice admin {TOKEN}\n")
    tokens.reload()
    assert tokens.find(TOKEN) == Caller("alice", Role.ADMIN)


@pytest.mark.parametrize("spoil", ["broken", "open", "missing"])
def test_file_that_breaks_leaves_the_tokens(path: Path, spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    """Old tokens stay, the log says why once, and the next good file is taken."""
    clock = Clock()
    tokens = TokenFile(path, clock)
    if spoil == "missing":
        path.unlink()
    else:
        write(path, f"nonsense {NEW}\n" if spoil == "broken" else f"user {NEW}\n", 0o644 if spoil == "open" else 0o600)
    for clock.now_s in (2.0, 4.0):
        assert tokens.find(TOKEN) is not None
        assert tokens.find(NEW) is None
    assert len(caplog.records) == 1
    assert NEW not in caplog.text
    write(path, f"user {NEW}\n")
    os.utime(path, (1, 1))
    clock.now_s = 6.0
    assert tokens.find(NEW) is not None


def test_no_token_is_kept(path: Path) -> None:
    """What the server holds of a token is its hash, which no repr shows either."""
    tokens = TokenFile(path)
    assert TOKEN not in repr(vars(tokens))
    assert "digest" not in repr(vars(tokens))
