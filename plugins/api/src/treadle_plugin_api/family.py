"""The contract of a model family: config.json -> DecoderConfig, and an invertible table of tensor names.

Canonical parameters are the finest there are, each `[out, in]` (`layer` runs from 0):

    embedding.weight [vocab, dim]                      positions.weight [context, dim]   (learned positions)
    layers.N.attention.{q,k,v,o}.{weight,bias}         layers.N.mlp.{gate,up,down}.{weight,bias}
    layers.N.{attention_norm,mlp_norm}.{weight,bias}   final_norm.{weight,bias}          head.{weight,bias}

The table moves numbers and never changes them, so it serves loading, saving, gradients and adapters alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle_plugin_api.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint file and the canonical parameters it holds.

    Attributes:
        file_name: the tensor's name in the file.
        params: canonical names; their leading rows, one parameter after the other, make up the tensor.
        transposed: the file stores `[in, out]`; rows are counted after transposing back.
    """

    file_name: str
    params: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of one `model_type` are read and written.

    Attributes:
        model_type: the value of `model_type` in config.json.
        config_from_hf: fills a DecoderConfig; raises UnsupportedSettingError for arithmetic that treadle lacks and
            ValueError for a value out of range, both naming the key. `tied_head` may follow the file's flag: the
            loader decides by the tensors that are present.
        tensor_table: the entries of a checkpoint, head included even when it may be tied.
        optional_prefix: start of file names that some checkpoints leave out (`transformer.` of GPT-2).
        ignored: regular expressions of whole file names that hold buffers, not parameters.
    """

    model_type: str
    config_from_hf: Callable[[Mapping[str, object]], DecoderConfig]
    tensor_table: Callable[[DecoderConfig], tuple[TensorEntry, ...]]
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ()


class UnsupportedSettingError(ValueError):
    """Raised by a family for a setting whose arithmetic it does not have; the message names key and value."""
