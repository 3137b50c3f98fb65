"""Models on a Hugging Face hub: the few files that a model needs, at one revision.

The hub is the one that HF_ENDPOINT names, else the public one; HF_TOKEN opens private and gated models. The library
`huggingface_hub` reads these, HF_HUB_OFFLINE and the system's proxies and certificates.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treadle_server.checkpoints.config_file import TOKENIZER_FILE, WITHOUT_TOKENIZER, read_json_object
from treadle_server.checkpoints.loading import INDEX_NAME, check_config, load_checkpoint
from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.errors import CheckpointError, ImportSourceError

_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+))?(?:@(?P<revision>\S+))?")
_TEXT_FILES = (
    "config*.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*.j*", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SINGLE = "model.safetensors"
_SHARDS = "model*.safetensors"


@dataclass(frozen=True, slots=True)
class HubSource:
    """What is after `hf:`: a repository OWNER/NAME, a GGUF file in it or None, and a revision or None."""

    repository: str
    file: str | None
    revision: str | None

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.repository.partition("/")[2]


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a repository holds at one commit: the size in bytes of every file, by path."""

    source: HubSource
    commit: str
    sizes: Mapping[str, int]
    licence: str | None


def parse_hub_source(text: str) -> HubSource:
    """Read OWNER/NAME[/FILE.gguf][@REVISION]; raises ImportSourceError for anything else."""
    match = _SOURCE.fullmatch(text)
    if match is None or (match["file"] is not None and not match["file"].lower().endswith(".gguf")):
        raise ImportSourceError(
            f"a hub source is hf:OWNER/NAME[@REVISION] or hf:OWNER/NAME/FILE.gguf[@REVISION], received hf:{text}"
        )
    return HubSource(match["repository"], match["file"], match["revision"])


def fetch_folder(source: HubSource, folder: Path, progress: Progress | None) -> str | None:
    """Fill an empty folder with the model's files and return the licence that its card states, if any.

    Raises ImportSourceError when they cannot be had, CheckpointError or UnsupportedModelError when treadle could not
    serve them; what the config can tell is found out before the weights are fetched.
    """
    listing = _list(source)
    texts = [path for path in listing.sizes if _beside_config(path, *_TEXT_FILES)]
    _refuse_without_weights(listing)
    index = [INDEX_NAME] if INDEX_NAME in listing.sizes else []
    _fetch(listing, [*texts, *index], folder, progress, "settings of")
    check_config(folder)
    if TOKENIZER_FILE not in listing.sizes:
        raise ImportSourceError(f"hf:{source.repository} {WITHOUT_TOKENIZER}")
    _fetch(listing, _weight_names(listing, folder), folder, progress, "")
    load_checkpoint(folder).close()
    return listing.licence


def fetch_gguf(source: HubSource, folder: Path, progress: Progress | None) -> tuple[Path, str | None]:
    """Fetch the one GGUF file of a source into a folder and return it, and the licence of the card, if any."""
    listing = _list(source)
    name = source.file or ""
    if name not in listing.sizes:
        raise ImportSourceError(f"hf:{source.repository} holds no {name}; {_gguf_files(listing)}")
    _fetch(listing, [name], folder, progress, "")
    return folder / name, listing.licence


def _beside_config(path: str, *patterns: str) -> bool:
    """Whether a path of a repository lies in no folder and fits a pattern; `*` of fnmatch would cross a slash."""
    return "/" not in path and any(fnmatchcase(path, pattern) for pattern in patterns)


def _refuse_without_weights(listing: _Listing) -> None:
    names = listing.sizes.keys()
    if INDEX_NAME in names or any(_beside_config(name, _SHARDS) for name in names):
        return
    if any(name.lower().endswith(".gguf") for name in names):
        raise ImportSourceError(f"hf:{listing.source.repository} holds no safetensors; {_gguf_files(listing)}")
    raise ImportSourceError(
        f"hf:{listing.source.repository} holds no model.safetensors or {INDEX_NAME}; weights in other formats (.bin, "
        ".pth) can run code when they are read and are not fetched"
    )


def _gguf_files(listing: _Listing) -> str:
    names = sorted(name for name in listing.sizes if name.lower().endswith(".gguf"))
    shown = ", ".join(f"hf:{listing.source.repository}/{name}" for name in names[:10])
    return f"its GGUF files are {shown}" if names else "it has no GGUF files"


def _weight_names(listing: _Listing, folder: Path) -> list[str]:
    """The files of the index, which has been fetched, else the single file, else every shard."""
    names = listing.sizes.keys()
    if INDEX_NAME in names:
        weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()}) if isinstance(weight_map, dict) else []
        missing = [shard for shard in shards if shard not in names or "/" in shard]
        if missing or not shards:
            raise CheckpointError(f"hf:{listing.source.repository}: {INDEX_NAME} names no shards, or missing {missing}")
        return shards
    return [_SINGLE] if _SINGLE in names else sorted(name for name in names if _beside_config(name, _SHARDS))


def _list(source: HubSource) -> _Listing:
    from huggingface_hub import HfApi  # slow to import, and only this needs it

    with _explained(source):
        info = HfApi(endpoint=_endpoint(), library_name="treadle").model_info(
            source.repository, revision=source.revision, files_metadata=True
        )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    if info.sha is None:
        raise ImportSourceError(f"hf:{source.repository}: the hub did not say which commit it serves")
    licence = info.card_data.get("license") if info.card_data is not None else None
    return _Listing(source, info.sha, sizes, licence if isinstance(licence, str) else None)


def _fetch(listing: _Listing, names: list[str], folder: Path, progress: Progress | None, what: str) -> None:
    from huggingface_hub import hf_hub_download

    source = listing.source
    num_bytes = sum(listing.sizes[name] for name in names)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ImportSourceError(f"hf:{source.repository} needs {num_bytes} bytes in {folder}, {free} are free")
    reporter = Reporter(progress, f"downloading {what} {source.repository}".replace("  ", " "), num_bytes)
    for name in names:
        with _explained(source):
            hf_hub_download(
                source.repository,
                name,
                revision=listing.commit,
                local_dir=folder,
                endpoint=_endpoint(),
                library_name="treadle",
                tqdm_class=_bar(reporter),
            )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes on what it has fetched


def _bar(reporter: Reporter) -> Any:
    """Return a class that takes the place of the library's progress bars."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            reporter.advance(int(n or 0))

    return Bar


def _endpoint() -> str | None:
    """Read it now: the library does when it is imported."""
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Turn the library's errors into one sentence each."""
    from huggingface_hub import errors

    name = f"hf:{source.repository}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ImportSourceError(
            f"{name} is gated: accept its terms on its page, and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ImportSourceError(f"{name} has no revision {source.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ImportSourceError(
            f"{name} does not exist, or is private; for a private one set HF_TOKEN to a token that may read it"
        ) from error
    except errors.HFValidationError as error:
        raise ImportSourceError(f"{name}: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise ImportSourceError(f"{name} cannot be fetched while HF_HUB_OFFLINE is set") from error
    except Exception as error:  # those of the HTTP client and of the disk share no base class
        raise ImportSourceError(f"{name} cannot be fetched: {type(error).__name__}: {error}") from error
