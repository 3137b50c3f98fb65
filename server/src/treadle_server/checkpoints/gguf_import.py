"""Turns a GGUF file into a Hugging Face folder: config.json, generation_config.json, tokenizer, model.safetensors.

What is particular to an architecture is an entry of `gguf_architectures` and a function of `gguf_configs`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treadle_server.checkpoints.gguf_architectures import Architecture, find_architecture
from treadle_server.checkpoints.gguf_configs import head_sizes
from treadle_server.checkpoints.gguf_file import GgufFile, open_gguf
from treadle_server.checkpoints.gguf_mapping import map_tensors
from treadle_server.checkpoints.gguf_rows import Heads
from treadle_server.checkpoints.gguf_settings import Settings
from treadle_server.checkpoints.gguf_tensors import to_source
from treadle_server.checkpoints.gguf_tokenizer import write_tokenizer
from treadle_server.checkpoints.gguf_vocabulary import SpecialIds
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.checkpoints.progress import Progress, Reporter
from treadle_server.checkpoints.safetensors_stream import TensorSource, write_stream
from treadle_server.errors import CheckpointError, UnsupportedModelError

_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING_DEFAULTS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def import_gguf(path: Path, folder: Path, progress: Progress | None = None) -> str | None:
    """Write the model into an empty folder and return its licence, if the file says one.

    Raises CheckpointError when the file is damaged, UnsupportedModelError when treadle cannot say what it holds.
    """
    file = open_gguf(path)
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(f"{path}: is one part of a split model; join the parts with llama-gguf-split first")
    settings = Settings(file)
    architecture = find_architecture(settings)
    config = _config(settings, architecture)
    heads = Heads(*head_sizes(settings))
    sources = [to_source(mapped, path) for mapped in map_tensors(settings, architecture, heads)]
    ids = write_tokenizer(file, folder)
    _write_json(folder / "config.json", config | _config_ids(ids) | {"torch_dtype": _main_dtype(sources)})
    _write_json(folder / "generation_config.json", _generation_config(file, ids))
    reporter = Reporter(progress, f"converting {path.name}", sum(source.num_bytes for source in sources))
    write_stream(folder / "model.safetensors", sources, reporter.advance)
    _check_loads(path, folder)
    return file.get("general.license", str)


def _config(settings: Settings, architecture: Architecture) -> dict[str, Any]:
    config = architecture.config(settings)
    settings.refuse_unread()
    return {"architectures": [architecture.hf_class], "model_type": architecture.model_type} | config


def _check_loads(path: Path, folder: Path) -> None:
    """Open the result as a server would: every tensor that the model needs is there, in its shape."""
    try:
        load_checkpoint(folder).close()
    except CheckpointError as error:
        raise type(error)(f"{path}: converts into a model that cannot be loaded: {error}") from error


def _config_ids(ids: SpecialIds) -> dict[str, Any]:
    eos = list(ids.eos)
    return {"bos_token_id": ids.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None, "pad_token_id": ids.pad}


def _generation_config(file: GgufFile, ids: SpecialIds) -> dict[str, Any]:
    """Ids, and sampling defaults only where the file's author stored some."""
    sampling = {theirs: file.metadata.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING_DEFAULTS.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return _config_ids(ids) | given


def _main_dtype(sources: Iterable[TensorSource]) -> str:
    """The type of most of the numbers, as config.json spells it."""
    totals = dict.fromkeys(_TORCH_DTYPES, 0)
    for source in sources:
        totals[source.dtype] += source.num_elements
    return _TORCH_DTYPES[max(totals, key=lambda dtype: totals[dtype])]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
