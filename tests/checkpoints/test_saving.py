"""Save round trips: the loaded file's own names, formats and numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from treadle_plugin_api.backend import Batch
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.checkpoints.safetensors_io import SafetensorsFile, write_safetensors
from treadle_server.checkpoints.saving import save_checkpoint, to_file_tensor
from treadle_server.errors import CheckpointError
from treadle_server.model.decoder import Decoder
from treadle_server.model.families.treadle_classic import TREADLE_CLASSIC
from treadle_server.model.params import Params, random_arrays

MODELS = sorted(path.name for path in (Path(__file__).parents[1] / "golden" / "models").iterdir())


def file_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return format, shape and bytes of every tensor of a folder, buffers aside."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        file = SafetensorsFile(path)
        for name, info in file.tensors.items():
            if not re.fullmatch(r"h\.\d+\.attn\.bias", name):
                tensors[name] = (info.dtype, info.shape, file.map(name).tobytes())
        file.close()
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_loading_and_saving_keeps_every_tensor(golden, tmp_path, name):
    """Names (bare ones stay bare), formats, shapes and bytes are those of the loaded files."""
    folder = golden / "models" / name
    with load_checkpoint(folder) as checkpoint:
        save_checkpoint(tmp_path / "saved", checkpoint)
    assert file_tensors(tmp_path / "saved") == file_tensors(folder)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_shared_matrix_keeps_the_name_it_was_stored_under(golden, tmp_path):
    """A tied model whose file holds the matrix as the head only is saved that way."""
    source = golden / "models" / "llama_tied_gqa"
    shutil.copytree(source, tmp_path / "a")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_safetensors(tmp_path / "a" / "model.safetensors", tensors)
    with load_checkpoint(tmp_path / "a") as checkpoint:
        save_checkpoint(tmp_path / "b", checkpoint)
    assert file_tensors(tmp_path / "b") == file_tensors(tmp_path / "a")


def test_saving_over_the_loaded_folder_is_safe(golden, tmp_path):
    """The file that is being read is replaced, not written into."""
    folder = shutil.copytree(golden / "models" / "llama_plain", tmp_path / "a")
    before = file_tensors(folder)
    with load_checkpoint(folder) as checkpoint:
        save_checkpoint(folder, checkpoint)
    assert file_tensors(folder) == before


@pytest.mark.parametrize("name", ["gpt2", "falcon_new", "bloom", "cohere_qk_norm", "stablelm_qk_norm", "mixtral"])
def test_saved_models_have_the_same_logits(golden, tmp_path, name):
    """Load, save, load: the very same numbers, even for matrices that the file stores transposed and joined."""

    def logits(folder: Path) -> np.ndarray:
        with load_checkpoint(folder) as checkpoint:
            decoder = Decoder(checkpoint.config, checkpoint.params)
        return decoder.head(decoder.forward(Batch.of([[5, 6, 7]])))

    with load_checkpoint(golden / "models" / name) as checkpoint:
        save_checkpoint(tmp_path, checkpoint)
    np.testing.assert_array_equal(logits(tmp_path), logits(golden / "models" / name))


def test_other_parameters_can_be_saved_in_another_format(golden, tmp_path):
    """New values land under the old names, in the format asked for, and config.json says so."""
    with load_checkpoint(golden / "models" / "gpt2") as checkpoint:
        arrays = random_arrays(checkpoint.config, 1)
        save_checkpoint(tmp_path, checkpoint, Params.from_arrays(arrays), dtype="bfloat16")
    with load_checkpoint(tmp_path) as saved:
        assert saved.hf_config["dtype"] == "bfloat16"
        for name, weight in saved.params.items():
            out = np.empty(weight.shape, np.float32)
            weight.read_into(out)
            np.testing.assert_allclose(out, arrays[name], rtol=2**-8)


def test_incomplete_parameters_are_refused(golden, tmp_path):
    """A missing parameter raises before anything is written."""
    with load_checkpoint(golden / "models" / "gpt2") as checkpoint:
        arrays = random_arrays(checkpoint.config, 1)
        del arrays["positions.weight"]
        with pytest.raises(CheckpointError, match=r"'positions.weight' is missing or unknown"):
            save_checkpoint(tmp_path / "saved", checkpoint, Params.from_arrays(arrays))
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_stored_in_one_tensor_load_and_save_the_same(golden, tmp_path, name):
    """The layout that transformers 5 has in memory, experts stacked, is read too, and kept when saving."""
    with load_checkpoint(golden / "models" / name) as checkpoint:
        fused = checkpoint.family.other_tables[0](checkpoint.config)
        tensors = {
            entry.file_name: to_file_tensor(entry, checkpoint.params)
            for entry in fused
            if entry.params[0] in checkpoint.params
        }
        expected = {key: weight.view().copy() for key, weight in checkpoint.params.items()}
    (tmp_path / "a").mkdir()
    shutil.copyfile(golden / "models" / name / "config.json", tmp_path / "a" / "config.json")
    write_safetensors(tmp_path / "a" / "model.safetensors", tensors)
    with load_checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.params.keys() == expected.keys()
        for key, weight in checkpoint.params.items():
            np.testing.assert_array_equal(weight.view(), expected[key])
        save_checkpoint(tmp_path / "b", checkpoint)
    assert any(len(shape) == 3 for _, shape, _ in file_tensors(tmp_path / "b").values())
    assert file_tensors(tmp_path / "b") == file_tensors(tmp_path / "a")


@pytest.mark.parametrize("tied", [False, True])
def test_treadle_classic_round_trips(tmp_path, tied):
    """A treadle_classic folder, with or without a head of its own, loads under the canonical names."""
    hf_config = {
        "model_type": "treadle_classic", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 8, "tie_word_embeddings": tied, "head_bias": True,
    }  # fmt: skip
    arrays = random_arrays(TREADLE_CLASSIC.config_from_hf(hf_config), 0)
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    write_safetensors(tmp_path / "model.safetensors", arrays)
    with load_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.tied_head == tied
        assert sorted(checkpoint.params) == sorted(arrays)
        save_checkpoint(tmp_path / "saved", checkpoint)
    assert file_tensors(tmp_path / "saved") == file_tensors(tmp_path)


# ---- saving over another model --------------------------------------------------------------------------------------


def first_weights(folder: Path) -> tuple[str, bytes]:
    """Family and embedding of what a folder loads as."""
    with load_checkpoint(folder) as checkpoint:
        return checkpoint.family.model_type, checkpoint.params["embedding.weight"].view().tobytes()


@pytest.mark.parametrize("name", ["llama_sharded", "gpt2", "mixtral"])
def test_saving_over_shards_replaces_them(golden, tmp_path, name):
    """What loads is what was saved; the old model's index and shards are gone, other files stay."""
    folder = shutil.copytree(golden / "models" / "llama_sharded", tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    with load_checkpoint(golden / "models" / name) as checkpoint:
        arrays = random_arrays(checkpoint.config, 5)
        save_checkpoint(folder, checkpoint, Params.from_arrays(arrays), dtype="float32")
    assert first_weights(folder) == (checkpoint.family.model_type, arrays["embedding.weight"].tobytes())
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert (folder / "notes.txt").exists()


def test_saving_over_a_broken_index_replaces_it(golden, tmp_path):
    """An index that leads out of the folder is removed; what it names is not touched."""
    outside = tmp_path / "x.safetensors"
    outside.write_bytes(b"mine")
    folder = shutil.copytree(golden / "models" / "llama_plain", tmp_path / "a")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with load_checkpoint(golden / "models" / "gpt2") as checkpoint:
        save_checkpoint(folder, checkpoint)
    assert first_weights(folder) == first_weights(golden / "models" / "gpt2")
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize("old", ["llama_sharded", "llama_plain"])
@pytest.mark.parametrize("new", ["llama_sharded", "gpt2"])
def test_a_save_that_is_killed_leaves_no_mixture(golden, tmp_path, monkeypatch, old, new):
    """Stopped before any of its steps, the folder loads as the old model or the new one, or not at all."""

    class Killed(BaseException):
        pass

    def stop_at(step: int) -> None:
        count = iter(range(100))
        for name in ("unlink", "replace"):
            real = getattr(Path, name)

            def stopping(self, *args, real=real, **options):
                if next(count) >= step:
                    raise Killed
                return real(self, *args, **options)

            monkeypatch.setattr(Path, name, stopping)

    with load_checkpoint(golden / "models" / new) as checkpoint:
        arrays = random_arrays(checkpoint.config, 5)
        expected = (checkpoint.family.model_type, arrays["embedding.weight"].tobytes())
        for step in range(100):
            folder = shutil.copytree(golden / "models" / old, tmp_path / str(step))
            allowed = [first_weights(folder), expected]
            try:
                stop_at(step)
                save_checkpoint(folder, checkpoint, Params.from_arrays(arrays), dtype="float32")
            except Killed:
                monkeypatch.undo()
                assert not (folder / "config.json").exists() or first_weights(folder) in allowed
            else:
                monkeypatch.undo()
                assert first_weights(folder) == expected
                break
