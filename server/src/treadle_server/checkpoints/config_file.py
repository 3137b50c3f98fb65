"""Reading the JSON files of a model folder, and refusing folders that are something else than a plain decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from treadle_plugin_api.backend import GROUP_SIZE

from treadle_server.errors import CheckpointError, UnsupportedModelError

QUANTISED_BY = "treadle"  # the quant_method of weights that `treadle quantize` made
TOKENIZER_FILE = "tokenizer.json"
# Said of a folder or a repository.
WITHOUT_TOKENIZER = (
    "holds no tokenizer.json, without which treadle cannot turn text into tokens; AutoTokenizer.from_pretrained(...)"
    ".save_pretrained(...) of transformers writes one"
)
# Keys of models that see or hear, however their model_type calls itself.
_OTHER_SENSES = re.compile(
    r"(vision|visual|image|video|audio|speech)_(config|tower|encoder|model)|mm_\w+|multi_modal_projector\w*|img_processor"
)

# A config.json is a few kilobytes; an index of a thousand shards under ten megabytes.
MAX_JSON_BYTES = 64_000_000


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file. Raises CheckpointError naming the file when there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, but holds {type(values).__name__}")
    return values


def read_model_config(folder: Path) -> dict[str, object]:
    """Return config.json of a text-only model that is plain or quantised by treadle, or raise saying what it is."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise UnsupportedModelError(f"{folder}: holds only an adapter; load the model it was trained on instead")
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Hugging Face model folder")
    values = read_json_object(folder / "config.json")
    if not is_quantised_here(folder, values):
        refuse_quantised(folder, values)
    sense = next((key for key in values if _OTHER_SENSES.fullmatch(key) and values[key] not in (None, False)), None)
    if sense is not None:
        raise UnsupportedModelError(
            f"{folder}: a multimodal model (config.json has {sense!r}); "
            "use its text-only version: treadle runs text-only decoders"
        )
    return values


def is_quantised_here(folder: Path, values: Mapping[str, object]) -> bool:
    """Tell whether the weights are quantised as `treadle quantize` does it; raises CheckpointError for other sizes."""
    found = values.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != QUANTISED_BY:
        return False
    for field, known in (("bits", (8, 4)), ("group_size", (GROUP_SIZE,))):
        value = found.get(field)
        if type(value) is not int or value not in known:
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization_config.{field} must be {' or '.join(map(str, known))}, "
                f"but is {value!r:.80}"
            )
    return True


def refuse_quantised(folder: Path, values: Mapping[str, object]) -> None:
    """Raise UnsupportedModelError when config.json says that the weights are quantised."""
    # The last one is how MLX writes it.
    keys = ("quantization_config", "compression_config", "quantization")
    quantisation = next((values[key] for key in keys if values.get(key)), None)
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModelError(
            f"{folder}: the weights are quantised ({method}); use the model's float16, bfloat16 or float32 version"
        )


def read_generation_config(folder: Path) -> dict[str, object]:
    """Return generation_config.json, or an empty dict when the folder has none."""
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}
