"""The contract of a model family: config.json -> DecoderConfig, and an invertible table of tensor names.

Canonical parameters, the finest there are, are listed in `parameters.py`. The table moves numbers and never changes
them, so it serves loading, saving, gradients and adapters alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle_plugin_api.decoder_config import DecoderConfig

TensorTable = Callable[[DecoderConfig], "tuple[TensorEntry, ...]"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint file and the canonical parameters it holds.

    Attributes:
        file_name: the tensor's name in the file.
        params: canonical names; their leading rows, one parameter after the other, make up the tensor.
        transposed: the file stores `[in, out]`; rows are counted after transposing back.
        groups: each parameter is cut into so many equal pieces of rows, and the tensor holds piece 0 of every
            parameter, then piece 1 of every parameter, and so on (q, k, v of one head after the other).
        stacked: the tensor has a leading axis of this length, into which its rows are cut; 0 for none.
    """

    file_name: str
    params: tuple[str, ...]
    transposed: bool = False
    groups: int = 1
    stacked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of one `model_type` are read and written.

    Attributes:
        model_type: the value of `model_type` in config.json.
        config_from_hf: fills a DecoderConfig; raises UnsupportedSettingError for arithmetic that treadle lacks and
            ValueError for a value out of range, both naming the key. `tied_head` may follow the file's flag: the
            loader decides by the tensors that are present.
        tensor_table: the entries of a checkpoint, head included even when it may be tied.
        other_tables: tables of other layouts that checkpoints have; the loader takes the one that fits the files.
        optional_prefix: start of file names that some checkpoints leave out (`transformer.` of GPT-2).
        ignored: regular expressions of whole file names that hold buffers, not parameters.
    """

    model_type: str
    config_from_hf: Callable[[Mapping[str, object]], DecoderConfig]
    tensor_table: TensorTable
    other_tables: tuple[TensorTable, ...] = ()
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ()


class UnsupportedSettingError(ValueError):
    """Raised by a family for a setting whose arithmetic it does not have; the message names key and value."""
