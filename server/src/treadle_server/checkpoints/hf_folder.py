"""Copies the parts of a Hugging Face folder that a model needs: configs, tokenizer files, safetensors, licence.

Nothing that is code, or pickled, is copied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from treadle_server.checkpoints.config_file import TOKENIZER_FILE, WITHOUT_TOKENIZER, read_json_object
from treadle_server.checkpoints.loading import INDEX_NAME, load_checkpoint
from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.errors import CheckpointError

_TEXT_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".md"})
_LICENCE_FILE = re.compile(r"(LICEN[CS]E|NOTICE)([.-].*)?", re.IGNORECASE)
_CARD_LICENCE = re.compile(r"^licen[cs]e:[ \t]*(\S+)", re.MULTILINE)
_COPY_BLOCK_BYTES = 1 << 20


def copy_hf_folder(source: Path, folder: Path, progress: Progress | None = None) -> str | None:
    """Copy a Hugging Face folder into an empty one and return the licence its card states, if any.

    Raises CheckpointError when it is damaged, UnsupportedModelError when treadle could not serve it, before anything
    is copied.
    """
    load_checkpoint(source).close()
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"{source}: {WITHOUT_TOKENIZER}")
    weights = [source / name for name in _weight_names(source)]
    paths = weights + [path for path in sorted(source.iterdir()) if _is_wanted_text(path)]
    reporter = Reporter(progress, f"copying {source.name}", sum(path.stat().st_size for path in paths))
    for path in paths:
        _copy(path, folder / path.name, reporter)
    return _card_licence(source / "README.md")


def _weight_names(source: Path) -> list[str]:
    """The files that hold the model, in a folder that has been checked: those of the index, or the loader's choice."""
    if (source / INDEX_NAME).exists():
        return sorted(set(cast("dict[str, str]", read_json_object(source / INDEX_NAME)["weight_map"]).values()))
    single = source / "model.safetensors"
    return [single.name] if single.exists() else sorted(path.name for path in source.glob("model*.safetensors"))


def _is_wanted_text(path: Path) -> bool:
    return path.is_file() and (path.suffix in _TEXT_SUFFIXES or _LICENCE_FILE.fullmatch(path.name) is not None)


def _copy(path: Path, target: Path, reporter: Reporter) -> None:
    with path.open("rb") as source, target.open("wb") as file:
        while block := source.read(_COPY_BLOCK_BYTES):
            file.write(block)
            reporter.advance(len(block))


def _card_licence(card: Path) -> str | None:
    """The licence line in the front matter of a model card."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front_matter = text.split("---", 2)[1] if text.startswith("---") and text.count("---") >= 2 else ""
    match = _CARD_LICENCE.search(front_matter)
    return match[1] if match else None
