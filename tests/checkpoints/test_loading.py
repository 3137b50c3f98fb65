"""Opening model folders: what is accepted, and what is refused with file and tensor named."""

from __future__ import annotations

import json
import logging
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from treadle_plugin_api.backend import Batch
from treadle_server.checkpoints.loading import INDEX_NAME, load_checkpoint
from treadle_server.checkpoints.safetensors_io import write_safetensors
from treadle_server.errors import CheckpointError, UnsupportedModelError
from treadle_server.model.decoder import Decoder
from treadle_server.model.params import param_shapes, random_arrays

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Folder = Callable[[str], Path]


@pytest.fixture
def copy_model(golden, tmp_path) -> Folder:
    """Copies a reference model to a folder of the test's own."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(golden / "models" / name, tmp_path / name))

    return copy


def edit_config(folder: Path, **values: object) -> Path:
    """Change keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def edit_tensors(folder: Path, **values: np.ndarray | None) -> Path:
    """Change tensors of model.safetensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | values
    write_safetensors(folder / "model.safetensors", {k: v for k, v in tensors.items() if v is not None})
    return folder


def logits(folder: Path) -> np.ndarray:
    """Load, run and close."""
    with load_checkpoint(folder) as checkpoint:
        decoder = Decoder(checkpoint.config, checkpoint.params)
    return decoder.head(decoder.forward(Batch.of([[5, 6, 7, 8]])))


def test_a_checkpoint_shows_what_its_folder_holds(golden):
    """Config, family, generation config and stored bytes are there before any weight is read."""
    with load_checkpoint(golden / "models" / "llama_mqa_bf16") as checkpoint:
        assert checkpoint.family.model_type == checkpoint.hf_config["model_type"] == "llama"
        assert checkpoint.generation_config["eos_token_id"] == 2
        sizes = [np.prod(shape) for shape in param_shapes(checkpoint.config).values()]
        assert checkpoint.num_bytes == 2 * sum(sizes)
        weight = checkpoint.params["layers.0.attention.q.weight"]
        assert (weight.dtype, weight.view().dtype) == ("bfloat16", ml_dtypes.bfloat16)


def test_sharded_and_single_files_load_the_same(copy_model):
    """The index's shards joined in one file give the same logits; without the index all shards are read."""
    folder = copy_model("llama_sharded")
    sharded = logits(folder)
    (folder / INDEX_NAME).unlink()
    np.testing.assert_array_equal(logits(folder), sharded)
    shards = sorted(folder.glob("*.safetensors"))
    joined = {name: array for shard in shards for name, array in load_file(shard).items()}
    write_safetensors(folder / "model.safetensors", joined)
    np.testing.assert_array_equal(logits(folder), sharded)


def test_files_outside_the_index_are_not_opened(copy_model):
    """A consolidated copy beside the shards is left alone."""
    folder = copy_model("llama_sharded")
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    logits(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..safetensors", "x.bin", 3]
)
def test_unsafe_shard_names_are_refused(copy_model, name):
    """An index may only name safetensors files beside it."""
    folder = copy_model("llama_sharded")
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][HEAD] = name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"'{HEAD}' lies in"):
        load_checkpoint(folder)


def test_a_missing_shard_and_a_missing_map_are_named(copy_model):
    """The error names the shard that is not there, or the index without a map."""
    folder = copy_model("llama_sharded")
    (folder / "model-00003-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00005.safetensors: cannot be opened"):
        load_checkpoint(folder)
    (folder / INDEX_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: weight_map must be an object"):
        load_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(copy_model):
    """Neither copy is preferred silently."""
    folder = copy_model("llama_sharded")
    write_safetensors(folder / "model-00006.safetensors", {HEAD: np.zeros((300, 64), np.float32)})
    (folder / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=rf"tensor '{HEAD}' is in .* and in"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model.norm.weight": None}, "tensor 'model.norm.weight' is missing"),
        (
            {"extra.weight": np.zeros(2, np.float32)},
            "model.safetensors: tensor 'extra.weight' is not part of the model",
        ),
        (
            {"model.norm.weight": np.zeros(65, np.float32)},
            r"model.safetensors: tensor 'model.norm.weight' must have shape \[64\] by config.json, but has \[65\]",
        ),
        ({"model.norm.weight": np.zeros(64, np.int8)}, "'model.norm.weight' is stored as I8"),
        ({EMBEDDING: None}, f"tensor '{EMBEDDING}' is missing"),
        (
            {"model.layers.0.self_attn.q_proj.weight_scale": np.zeros(1, np.float32)},
            "'model.layers.0.self_attn.q_proj.weight_scale' is not part of the model",
        ),
    ],
)
def test_names_and_shapes_are_strict(copy_model, values, message):
    """A missing, extra, mis-shaped or quantised tensor is refused with its name and the file."""
    folder = edit_tensors(copy_model("llama_plain"), **values)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_truncated_file_is_named(copy_model):
    """A download that stopped half-way names the file and the tensor it ends in."""
    folder = copy_model("llama_plain")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cut short inside tensor"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("config.json", "config.json"), ("generation_config.json", "generation_config.json")],
)
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"[]", "must hold a JSON object, but holds list")],
)
def test_broken_json_is_named(copy_model, name, expected, content, message):
    """A JSON file that cannot be read is named with the reason."""
    folder = copy_model("llama_plain")
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{expected}: {message}"):
        load_checkpoint(folder)


def test_a_giant_config_is_not_read(copy_model):
    """A file of more than 64 MB is no config."""
    folder = copy_model("llama_plain")
    with (folder / "config.json").open("wb") as file:
        file.truncate(64_000_001)
    with pytest.raises(CheckpointError, match=r"larger than 64000000 bytes"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "mamba"},
            "'mamba' is not supported; supported types: bloom, cohere, .*, starcoder2, treadle_classic",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": "x", "auto_map": {"AutoModel": "m.M"}}, "'x' is not supported and its own code is never run"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised \(fp8\)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"the weights are quantised"),
        ({"vision_config": {}}, r"a multimodal model \(config.json has 'vision_config'\)"),
        ({"mm_vision_tower": "openai/clip"}, "a multimodal model .*'mm_vision_tower'"),
        ({"mm_projector_type": "mlp"}, "a multimodal model .*'mm_projector_type'"),
        ({"audio_encoder": {}}, "a multimodal model .*'audio_encoder'"),
        ({"speech_config": {"layers": 2}}, "a multimodal model .*'speech_config'"),
        ({"hidden_act": "mish"}, "config.json: hidden_act 'mish' is not supported.*as a plugin"),
    ],
)
def test_models_that_need_something_else_are_refused_in_a_sentence(copy_model, values, message):
    """UnsupportedModelError says what the folder asks for."""
    folder = edit_config(copy_model("llama_plain"), **values)
    with pytest.raises(UnsupportedModelError, match=message):
        load_checkpoint(folder)


def test_senses_that_are_switched_off_do_not_matter(copy_model):
    """A text-only version may keep the keys, null or false."""
    load_checkpoint(edit_config(copy_model("llama_plain"), vision_config=None, mm_use_im_start_end=False)).close()


def test_remote_code_of_a_supported_type_is_ignored(copy_model):
    """`auto_map` beside a known model_type loads natively."""
    folder = copy_model("llama_plain")
    before = logits(folder)
    np.testing.assert_array_equal(logits(edit_config(folder, auto_map={"AutoModel": "modeling.X"})), before)


def test_a_value_out_of_range_in_config_is_named(copy_model):
    """The error names config.json, the key and the value."""
    folder = edit_config(copy_model("llama_plain"), num_hidden_layers="two")
    with pytest.raises(CheckpointError, match=r"config.json: num_hidden_layers must be an integer, but is 'two'"):
        load_checkpoint(folder)


def test_folders_that_are_no_model_are_refused(tmp_path):
    """No folder, an empty one, an adapter, and one that holds pickles only."""
    with pytest.raises(CheckpointError, match=r"not a folder"):
        load_checkpoint(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"holds only an adapter"):
        load_checkpoint(tmp_path)


def test_pickles_are_never_opened(copy_model):
    """A folder with a .bin only is refused with what to do."""
    folder = copy_model("llama_plain")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle"):
        load_checkpoint(folder)


class TestTiedHeads:
    """Whether the head is the embedding is decided by the tensors; the flag is a hint."""

    def test_flag_and_no_head(self, copy_model):
        """The normal tied model shares the matrix in memory."""
        with load_checkpoint(copy_model("llama_tied_gqa")) as checkpoint:
            prepared = Decoder(checkpoint.config, checkpoint.params)._prepared
        assert prepared.head.weight is prepared.embedding

    def test_flag_and_an_identical_head(self, copy_model):
        """A stored copy of the embedding is dropped."""
        folder = copy_model("llama_tied_gqa")
        before = logits(folder)
        edit_tensors(folder, **{HEAD: load_file(folder / "model.safetensors")[EMBEDDING]})
        with load_checkpoint(folder) as checkpoint:
            assert checkpoint.config.tied_head
        np.testing.assert_array_equal(logits(folder), before)

    def test_flag_and_another_head(self, copy_model, caplog):
        """The stored head is used, with a warning."""
        folder = copy_model("llama_plain")
        before = logits(folder)
        edit_config(folder, tie_word_embeddings=True)
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(logits(folder), before)
        assert "differs from the embedding; the stored head is used" in caplog.text

    def test_no_flag_and_no_head(self, copy_model, caplog):
        """The embedding is used, with a warning."""
        folder = copy_model("llama_tied_gqa")
        before = logits(folder)
        edit_config(folder, tie_word_embeddings=False)
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(logits(folder), before)
        assert "is absent; the embedding is used" in caplog.text

    def test_flag_and_only_a_head(self, copy_model):
        """A file that stores the shared matrix under the head's name loads."""
        folder = copy_model("llama_tied_gqa")
        before = logits(folder)
        edit_tensors(folder, **{HEAD: load_file(folder / "model.safetensors")[EMBEDDING], EMBEDDING: None})
        np.testing.assert_array_equal(logits(folder), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_preparing_takes_little_more_memory_than_the_weights(tmp_path, odd_llama_folder, dtype):
    """Tensors are read straight into the buffers they are used from: no second copy, whatever the stored format."""
    folder = odd_llama_folder(dtype)
    with load_checkpoint(folder) as checkpoint:
        needed = 4 * sum(np.prod(shape) for shape in param_shapes(checkpoint.config).values())
        tracemalloc.start()
        decoder = Decoder(checkpoint.config, checkpoint.params)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert decoder.config.vocab_size == 20_000
    assert needed > 20_000_000
    assert peak < needed + 6_000_000


@pytest.fixture
def odd_llama_folder(tmp_path) -> Callable[[str], Path]:
    """Writes a random llama of 25 MB in float32."""

    def write(dtype: str) -> Path:
        config = {
            "model_type": "llama", "vocab_size": 20_000, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        from treadle_server.model.families.llama import LLAMA

        decoder_config = LLAMA.config_from_hf(config)
        arrays = random_arrays(decoder_config, 0)
        number = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        entries = [entry for entry in LLAMA.tensor_table(decoder_config) if entry.file_name != HEAD]
        write_safetensors(
            tmp_path / "model.safetensors",
            {entry.file_name: arrays[entry.params[0]].astype(number) for entry in entries},
        )
        return tmp_path

    return write
