"""GGUF files become Hugging Face folders that hold the same numbers and the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from treadle_server.checkpoints.gguf_file import GgufTensor, open_gguf
from treadle_server.checkpoints.gguf_import import import_gguf
from treadle_server.checkpoints.gguf_tensors import MappedTensor, to_source
from treadle_server.checkpoints.safetensors_stream import write_stream
from treadle_server.errors import CheckpointError, TreadleError, UnsupportedModelError

WriteGguf = Callable[..., Path]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
TEXTS = [
    "The cat sat 12345 times",
    "it's THEY'LL\n\n  x",
    "  two  spaces ",
    "数字 ½ ١٢",
    "a<tool>b<s>c",
    "\r\n\t",
    "e\u0301",
]


def byte_level(use_regex: bool) -> dict[str, Any]:
    """A ByteLevel pre-tokenizer as tokenizer.json spells it."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str) -> dict[str, Any]:
    """A Split pre-tokenizer as tokenizer.json spells it."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_PATTERN = GPT4O_PATTERN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
NORMALISED = {"qwen2", "stablelm2", "olmo", "command-r"}
PRE_TOKENIZERS = {
    "gpt-2": [byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "llama-bpe": [split(LLAMA3_PATTERN), byte_level(False)],
    "qwen2": [split(QWEN2_PATTERN), byte_level(False)],
    "stablelm2": [split(QWEN2_PATTERN), byte_level(False)],
    "dbrx": [split(LLAMA3_PATTERN), byte_level(False)],
    "olmo": [byte_level(True)],
    "command-r": [{"type": "Digits", "individual_digits": True}, byte_level(True)],
    "bloom": [split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), byte_level(False)],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(True),
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ],
    "gpt-4o": [split(GPT4O_PATTERN), byte_level(False)],
    "tekken": [split(TEKKEN_PATTERN), byte_level(False)],
}


@pytest.fixture
def convert(write_gguf: WriteGguf, tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file, imports it and returns the folder."""

    def convert(**request: Any) -> Path:
        folder = tmp_path / "imported"
        folder.mkdir()
        import_gguf(write_gguf(**request), folder)
        return folder

    return convert


def read_json(folder: Path, name: str) -> Any:
    """The content of a JSON file of the imported folder."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def refused(convert: Callable[..., Path], error: type[TreadleError], match: str, **request: Any) -> None:
    """Importing such a file raises an error that names the file and matches."""
    with pytest.raises(error, match=match) as caught:
        convert(**request)
    assert "Tiny-Llama.Q4_0.gguf" in str(caught.value)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_float_tensors_are_exact(convert: Callable[..., Path], tiny_llama: Any, kind: Kind) -> None:
    """Every tensor of a float file comes back bit for bit, under its Hugging Face name."""
    loaded = load_file(convert(kind=kind) / "model.safetensors")
    assert loaded.keys() == tiny_llama.tensors.keys()
    for name, array in tiny_llama.tensors.items():
        np.testing.assert_array_equal(loaded[name].astype(np.float32), array, err_msg=name)


def test_float32_is_kept_where_bfloat16_would_round(convert: Callable[..., Path]) -> None:
    """A float32 tensor with more bits than bfloat16 has stays float32; the others shrink."""
    norm = np.full(64, 1 / 3, np.float32)
    loaded = load_file(convert(tensors={"output_norm.weight": norm}) / "model.safetensors")
    np.testing.assert_array_equal(loaded["model.norm.weight"], norm)
    assert loaded["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_tensors_equal_ggufs_own_dequantisation(
    convert: Callable[..., Path], tiny_llama: Any, kind: Kind
) -> None:
    """A quantised matrix is what the gguf package dequantises, rounded to bfloat16."""
    loaded = load_file(convert(kind=kind) / "model.safetensors")
    for name, array in tiny_llama.tensors.items():
        expected = array if array.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        np.testing.assert_array_equal(loaded[name], expected.astype(ml_dtypes.bfloat16), err_msg=name)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name))
def test_every_type_that_gguf_dequantises(tmp_path: Path, kind: Kind) -> None:
    """Also those that gguf cannot quantise, K and IQ types among them: any bytes give gguf's own numbers."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes under 0x78 make no infinite scale in float16.
    stored = np.random.default_rng(0).integers(0, 0x78, (3, 2 * block_bytes)).astype(np.uint8)
    tensor = GgufTensor("t", (3, 2 * block_size), kind, stored)
    path = tmp_path / "t.safetensors"
    write_stream(
        path, [to_source(MappedTensor(name="t", tensor=tensor, shape=tensor.shape), path)], lambda num_bytes: None
    )
    expected = gguf.quants.dequantize(stored, kind)
    exact = kind in (Kind.F32, Kind.F16)
    np.testing.assert_array_equal(load_file(path)["t"], expected if exact else expected.astype(ml_dtypes.bfloat16))


def test_attention_scores_survive_the_reordering(convert: Callable[..., Path], write_gguf: WriteGguf) -> None:
    """q.k is the same when the file's rows turn in neighbouring pairs and the imported rows turn in halves."""
    folder = convert()
    loaded = load_file(folder / "model.safetensors")
    stored = open_gguf(write_gguf()).tensors
    angles = np.outer([3.0, 11.0], 10000.0 ** (-np.arange(8) / 8))
    x = np.random.default_rng(1).normal(size=(2, 64))

    def halves(name: str, row: int) -> np.ndarray:
        first, second = np.split(loaded[f"model.layers.0.self_attn.{name}.weight"].astype(np.float64)[:16] @ x[row], 2)
        turn = np.exp(1j * angles[row])
        return (first + 1j * second) * turn

    def pairs(name: str, row: int) -> np.ndarray:
        rows = (
            np.ascontiguousarray(stored[f"blk.0.{name}.weight"].rows).view(np.float32)[:16].astype(np.float64) @ x[row]
        )
        return (rows[0::2] + 1j * rows[1::2]) * np.exp(1j * angles[row])

    imported = np.vdot(halves("q_proj", 0), halves("k_proj", 1)).real
    original = np.vdot(pairs("attn_q", 0), pairs("attn_k", 1)).real
    assert imported == pytest.approx(original, rel=1e-12)


def test_config_says_what_the_metadata_says(convert: Callable[..., Path], tiny_llama: Any) -> None:
    """config.json has the sizes, ids and settings of the file; float32 settings are spelled shortly."""
    config = read_json(convert(), "config.json")
    assert config["model_type"] == "llama"
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (
        2,
        16,
        len(tiny_llama.vocabulary),
    )
    assert (config["rms_norm_eps"], config["rope_theta"], config["rope_scaling"]) == (1e-5, 10000.0, None)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert (config["tie_word_embeddings"], config["attention_bias"], config["torch_dtype"]) == (True, False, "bfloat16")


def test_head_size_may_differ_from_hidden_over_heads(convert: Callable[..., Path]) -> None:
    """attention.key_length is the head size when it is given: 8 heads of 8 here, rather than 4 of 16."""
    lengths = {"llama.attention.key_length": 8, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8}
    heads = {"llama.attention.head_count": 8, "llama.attention.head_count_kv": 4}
    assert read_json(convert(metadata=lengths | heads), "config.json")["head_dim"] == 8


def test_an_output_tensor_unties_the_head(convert: Callable[..., Path], tiny_llama: Any) -> None:
    """With output.weight in the file the head is its own."""
    head = -tiny_llama.tensors["model.embed_tokens.weight"]
    folder = convert(tensors={"output.weight": head})
    assert read_json(folder, "config.json")["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], head)


def test_biases_are_imported_and_reordered(convert: Callable[..., Path]) -> None:
    """Biases on all four projections set attention_bias; q's are reordered with its rows."""
    q_bias = np.arange(64, dtype=np.float32)
    sizes = {
        "attn_q": q_bias,
        "attn_k": np.ones(32, np.float32),
        "attn_v": np.ones(32, np.float32),
        "attn_output": q_bias,
    }
    folder = convert(tensors={f"blk.{layer}.{name}.bias": bias for layer in (0, 1) for name, bias in sizes.items()})
    assert read_json(folder, "config.json")["attention_bias"] is True
    bias = load_file(folder / "model.safetensors")["model.layers.1.self_attn.q_proj.bias"].astype(np.float32)
    assert bias[:4].tolist() == [0, 2, 4, 6]
    assert bias[8:12].tolist() == [1, 3, 5, 7]


def test_linear_scaling_is_kept(convert: Callable[..., Path]) -> None:
    """Linear rope scaling comes out as Hugging Face spells it."""
    config = read_json(
        convert(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}), "config.json"
    )
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def llama3_factors(factor: float, original: int) -> np.ndarray:
    """The divisors of each frequency, written one at a time as the Llama 3.1 reference code does."""
    factors = []
    for i in range(0, 16, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / 16)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_factors_are_recognised(convert: Callable[..., Path]) -> None:
    """The factors that llama3 scaling gives are named by their parameters."""
    tensors = {"rope_freqs.weight": llama3_factors(8.0, 8192)}
    scaling = read_json(convert(tensors=tensors), "config.json")["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_other_factors_are_refused(convert: Callable[..., Path]) -> None:
    """Factors that no known scaling gives are refused by the tensor's name."""
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    refused(convert, UnsupportedModelError, "rope_freqs.weight", tensors={"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'.*supported: bloom, .*llama"),
        ({"llama.rope.scaling.type": "dynamic"}, "'dynamic' is not supported"),
        ({"llama.attention.temperature_scale": 8}, "llama.attention.temperature_scale = 8 is not supported"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.yarn_attn_factor": 1.5,
                "llama.rope.scaling.factor": 2.0,
            },
            "yarn_attn_factor = 1.5 is not supported",
        ),
        ({"split.count": 3}, "one part of a split model"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False is not supported"),
        ({"llama.attention.head_count_kv": [2, 4]}, "must be one number"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ({"tokenizer.ggml.model": "bert"}, "vocabularies of the kind 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre = 'klingon'.*supported are .*smollm"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(
    convert: Callable[..., Path], metadata: dict[str, Any], match: str
) -> None:
    """A setting that would change the arithmetic or the tokens is never ignored."""
    refused(convert, UnsupportedModelError, match, metadata=metadata)


def test_unsupported_number_types_are_refused(convert: Callable[..., Path]) -> None:
    """A tensor of a type that gguf cannot dequantise is named with its type and what is supported."""
    match = "'output_norm.weight' is stored as I32, .*supported are F32, F16, BF16"
    refused(convert, UnsupportedModelError, match, tensors={"output_norm.weight": np.ones(64, np.int32)})


def test_an_unknown_tensor_is_refused(convert: Callable[..., Path]) -> None:
    """A tensor without a place in the model is named."""
    refused(
        convert,
        UnsupportedModelError,
        "blk.0.attn_q_norm.weight",
        tensors={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)},
    )


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count must be of type int"),
        ({"llama.block_count": 4_000_000_000}, "llama.block_count must be from 1 to the number of tensors"),
        (
            {"llama.expert_count": 4, "llama.expert_used_count": 2},
            r"4 experts, but blk\.0\.ffn_gate_inp\.weight is missing",
        ),
        (
            {"llama.attention.key_length": 4_000_000_000, "llama.rope.dimension_count": None},
            "has 64 rows, 4 query heads",
        ),
        ({"llama.attention.head_count": 2, "llama.rope.dimension_count": None}, "has 32 rows"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id must be under"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
    ],
)
def test_contradictions_are_errors(convert: Callable[..., Path], metadata: dict[str, Any], match: str) -> None:
    """Metadata that contradicts itself or the tensors is refused, key and value named."""
    refused(convert, CheckpointError, match, metadata=metadata)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_tokenizer_equals_the_original(convert: Callable[..., Path], tiny_llama: Any, pre: str) -> None:
    """The imported tokenizer encodes and decodes as the one in the model's own tokenizer.json would."""
    imported = Tokenizer.from_file(
        str(convert(metadata={"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}) / "tokenizer.json")
    )
    original = original_tokenizer(tiny_llama, pre)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert imported.encode(text).ids == ids
        for skip in (True, False):
            assert imported.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


def original_tokenizer(tiny_llama: Any, pre: str) -> Tokenizer:
    """The tiny tokenizer as such a model's tokenizer.json describes it."""
    added = [
        {"id": i, "content": token, "special": i < 3, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, token in enumerate(["<pad>", "<s>", "</s>", "<tool>"])
    ]  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": pre in ("llama-bpe", "tekken"),
        "vocab": tiny_llama.vocabulary, "merges": [list(merge) for merge in tiny_llama.merges],
    }  # fmt: skip
    description = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in NORMALISED else None, "post_processor": None,
        "decoder": byte_level(True),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]}, "model": model,
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(description))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, [False, False]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [True, True]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [True, False]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [False, False]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    convert: Callable[..., Path], metadata: dict[str, Any], expected: list[bool]
) -> None:
    """A text begins with BOS and ends with EOS where the metadata, or else the pre-tokenizer's custom, says so."""
    tokenizer = Tokenizer.from_file(str(convert(metadata=metadata) / "tokenizer.json"))
    ids = tokenizer.encode("cat").ids
    assert [ids[0] == 1, ids[-1] == 2] == expected
    assert tokenizer.encode("cat", add_special_tokens=False).ids == [i for i in ids if i not in (1, 2)]


def test_tokenizer_config_names_the_special_tokens(convert: Callable[..., Path]) -> None:
    """tokenizer_config.json has the special tokens' texts and the chat template."""
    config = read_json(convert(metadata={"tokenizer.ggml.unknown_token_id": 0}), "tokenizer_config.json")
    assert [config[f"{kind}_token"] for kind in ("bos", "eos", "unk", "pad")] == ["<s>", "</s>", "<pad>", "<pad>"]
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_fillers_of_a_padded_vocabulary_are_no_tokens(convert: Callable[..., Path], tiny_llama: Any) -> None:
    """Rows past the tokenizer's size stay in the embedding, their fillers stay out of the tokenizer."""
    tokens = [*sorted(tiny_llama.vocabulary, key=tiny_llama.vocabulary.get), f"[PAD{len(tiny_llama.vocabulary)}]"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [5]}
    table = np.ones((len(tokens), 64), np.float32)
    folder = convert(metadata=metadata, tensors={"token_embd.weight": table})
    assert read_json(folder, "config.json")["vocab_size"] == len(tokens)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == len(tokens) - 1


def test_every_end_of_turn_is_an_eos(convert: Callable[..., Path]) -> None:
    """generation_config.json lists the end-of-turn token beside EOS, and nothing of sampling that the file lacks."""
    folder = convert(metadata={"tokenizer.ggml.eot_token_id": 3})
    assert read_json(folder, "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}


def test_stored_sampling_defaults_are_kept(convert: Callable[..., Path]) -> None:
    """Sampling defaults of the file's author reach generation_config.json."""
    folder = convert(metadata={"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    config = read_json(folder, "generation_config.json")
    assert (config["temperature"], config["top_k"]) == (0.5, 20)


def test_a_file_cut_anywhere_is_an_error_that_names_it(write_gguf: WriteGguf, tmp_path: Path) -> None:
    """However much of the file is there, the error is ours."""
    whole = write_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 1, len(whole) // 60), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_gguf(cut)


def test_damaged_bytes_never_escape_our_errors(write_gguf: WriteGguf, tmp_path: Path) -> None:
    """A flipped bit in the metadata is read as another value or refused, without a foreign error or an endless read."""
    whole = bytearray(write_gguf(kind=Kind.Q4_0).read_bytes())
    folder = tmp_path / "imported"
    folder.mkdir()
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    for position in rng.integers(0, 14_000, 150):
        content = whole.copy()
        content[position] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(content)
        error = error_of(import_gguf, damaged, folder)
        assert error is None or "damaged.gguf" in str(error)


def error_of(function: Callable[..., object], *arguments: object) -> TreadleError | None:
    """Return the error of ours that a call raises, if any."""
    try:
        function(*arguments)
    except TreadleError as error:
        return error
    return None


def test_infinite_weights_are_refused(convert: Callable[..., Path]) -> None:
    """A tensor with a number that is not finite is named."""
    norm = np.full(64, np.inf, np.float32)
    refused(
        convert,
        CheckpointError,
        "tensor 'output_norm.weight' holds NaN or infinite",
        tensors={"output_norm.weight": norm},
    )


def test_a_missing_tensor_is_an_error(convert: Callable[..., Path]) -> None:
    """A model that could not be loaded is refused when it is imported, by its Hugging Face name."""
    refused(
        convert, CheckpointError, r"layers\.1\.mlp\.up_proj\.weight' is missing", tensors={"blk.1.ffn_up.weight": None}
    )


def test_something_else_is_not_a_gguf_file(tmp_path: Path) -> None:
    """A file of another kind is told apart by its first bytes."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"x\.gguf: is not a GGUF file"):
        open_gguf(path)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    """A file of the other byte order is named as such."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        open_gguf(path)
