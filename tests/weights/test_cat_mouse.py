"""The bundled model cat-mouse: what its files hold, where its numbers come from, and what it says."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import treadle_weights
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from safetensors.numpy import load_file
from treadle_plugin_api.backend import Batch
from treadle_server import LanguageModel
from treadle_server.checkpoints.loading import load_checkpoint
from treadle_server.model.decoder import Decoder
from treadle_server.tokenizer import Detokenizer, Tokenizer

FOLDER = treadle_weights.folder("cat-mouse")
SCRIPT = Path(__file__).parents[2] / "weights" / "make_cat_mouse.py"
PAD, MOUSE, CAT, CHASE, ME, LOVE = range(6)
Tensors = dict[str, NDArray[np.float32]]


class Model:
    """The model as the server runs it, in one dtype."""

    def __init__(self, dtype: str) -> None:
        checkpoint = load_checkpoint(FOLDER)
        self.decoder = Decoder(checkpoint.config, checkpoint.params, dtype=dtype)  # type: ignore[arg-type]
        self.tokenizer = Tokenizer.load(FOLDER)
        checkpoint.close()

    def next_word(self, ids: list[int]) -> NDArray[np.float64]:
        """Return the probabilities `[6]` of the word after a context."""
        return self.distributions([ids]).reshape(6)

    def distributions(self, contexts: list[list[int]]) -> NDArray[np.float64]:
        """Return the probabilities `[contexts, 6]` after each context, all in one batch."""
        starts = np.cumsum([0, *map(len, contexts)])
        ids = np.concatenate(contexts).astype(np.int64)
        hidden = self.decoder.forward(Batch(ids, starts, np.zeros(len(contexts), np.int64)))
        logits = self.decoder.head(hidden[starts[1:] - 1]).astype(np.float64)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def greedy(self, prompt: str) -> str:
        """Return what follows a prompt when the likeliest word is always taken, word by word through a KV cache."""
        new_ids = self.tokenizer.encode(prompt)
        detokenizer = Detokenizer(self.tokenizer, prompt_ids=new_ids)
        cache, text = self.decoder.new_cache(), ""
        while cache.length + len(new_ids) <= self.decoder.config.context_length:
            batch = Batch(np.array(new_ids), np.array([0, len(new_ids)]), np.array([cache.length]))
            token_id = int(self.decoder.head(self.decoder.forward(batch, [cache])[-1:]).argmax())
            if token_id in self.tokenizer.eos_token_ids:
                return text + detokenizer.flush()
            new_ids = [token_id]
            text += detokenizer.push(new_ids)
        return f"{text} and no end"


@pytest.fixture(scope="module", params=["float32", "float64"])
def model(request: pytest.FixtureRequest) -> Model:
    """The model in each dtype that the server runs."""
    return Model(request.param)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """The tensors of the bundled file."""
    return load_file(FOLDER / "model.safetensors")


def documented_sentences() -> dict[tuple[str, ...], float]:
    """Return the sentences of the model card and how likely it says they are, given their first words."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+)% \|$", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    return {tuple(words.split()): int(percent) / 100 for words, percent in rows}


def test_manifest_matches_the_files(tensors: Tensors) -> None:
    """The manifest names every file with its digest, and every tensor with its shape and origin."""
    manifest = json.loads((FOLDER / "manifest.json").read_text("utf-8"))
    files = [path for path in FOLDER.iterdir() if path.name not in ("manifest.json", "README.md")]
    assert manifest["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert manifest["num_bytes"] == sum(path.stat().st_size for path in files)
    assert {name: entry["shape"] for name, entry in manifest["tensors"].items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert all(entry["made"] for entry in manifest["tensors"].values())
    assert manifest["num_parameters"] == sum(tensor.size for tensor in tensors.values())
    assert (manifest["name"], manifest["licence"]) == ("cat-mouse", "Apache-2.0")


def test_embedding_is_the_documents(tensors: Tensors) -> None:
    """Chapter 1.3's table, a row a word."""
    rows = [[0, 0, 0, 0], [6, 1, 3, 9], [5, 2, 8, 1], [3, 7, 2, 6], [7, 5, 1, 4], [2, 9, 7, 3]]
    assert_allclose(tensors["embedding.weight"], np.array(rows) / 10, rtol=1e-7)


@pytest.mark.parametrize(
    ("letter", "head1", "head2"),
    [
        ("q", [[10, 20], [40, 50], [70, 80], [15, 25]], [[30, 40], [50, 60], [80, 90], [20, 30]]),
        ("k", [[5, 15], [35, 45], [65, 75], [10, 20]], [[10, 20], [40, 50], [70, 80], [15, 25]]),
        ("v", [[20, 30], [50, 60], [80, 90], [10, 20]], [[30, 40], [60, 70], [90, 100], [20, 30]]),
    ],
)
def test_projections_are_the_documents(
    tensors: Tensors, letter: str, head1: list[list[int]], head2: list[list[int]]
) -> None:
    """Chapter 6.4's matrices (here in hundredths): head 1 makes the first two outputs, head 2 the last two."""
    expected = np.hstack([head1, head2]).T / 100
    assert_allclose(tensors[f"layers.0.attention.{letter}.weight"], expected, rtol=1e-7)


def test_output_projection_is_the_documents(tensors: Tensors) -> None:
    """Chapter 6.6's W_o (here in hundredths), turned to `[out, in]`."""
    w_o = np.array([[10, 20, 30, 40], [50, 60, 70, 80], [15, 25, 35, 45], [55, 65, 75, 85]]) / 100
    assert_allclose(tensors["layers.0.attention.o.weight"], w_o.T, rtol=1e-7)


def test_script_makes_the_same_model(tmp_path: Path, tensors: Tensors) -> None:
    """Running the script again gives the same tensors, configuration and tokenizer."""
    folder = tmp_path / "again"
    subprocess.run([sys.executable, SCRIPT, "--output", folder], check=True, capture_output=True)
    again = load_file(folder / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_allclose(again[name], tensor, atol=1e-6, err_msg=name)
    for path in folder.glob("*.json"):
        if path.name != "manifest.json":  # its digest of the tensors differs when they do, which the tolerance allows
            assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name


def test_words_are_told_apart_with_and_without_spaces() -> None:
    """Spaces between words are optional in a prompt and always there in the text of ids."""
    tokenizer = Tokenizer.load(FOLDER)
    assert tokenizer.encode("猫 追 老鼠") == tokenizer.encode("猫追老鼠") == [CAT, CHASE, MOUSE]
    assert tokenizer.encode("我  爱\n猫 <PAD>") == [ME, LOVE, CAT, PAD]
    assert tokenizer.decode([CAT, CHASE, MOUSE, PAD]) == "猫 追 老鼠"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (6, None, frozenset([PAD]))


def test_unknown_words_are_refused() -> None:
    """A word outside the vocabulary is an error: dropping it or calling it padding would change the prompt."""
    backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    with pytest.raises(Exception, match="UNK"):
        backend.encode("猫 追 狗")


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        ("猫 追", " 老鼠"),
        ("猫", " 追 老鼠"),
        ("我", " 爱 猫"),
        ("老鼠", " 爱 猫"),
        ("爱", " 追 老鼠"),
        ("追", " 老鼠"),
        ("猫 追 老鼠", ""),
        ("猫 追 老鼠 我 爱", ""),
    ],
)
def test_greedy_text(model: Model, prompt: str, rest: str) -> None:
    """The likeliest continuation completes a sentence and stops; after a whole one nothing follows."""
    assert model.greedy(prompt) == rest


@pytest.mark.parametrize("first", ["老鼠", "猫", "追", "我", "爱"])
def test_sampled_sentences(model: Model, first: str) -> None:
    """At temperature 1, 95 % of draws at least are documented sentences, each about as often as documented."""
    total = 0.0
    for words, documented in documented_sentences().items():
        if words[0] == first:
            ids = [*model.tokenizer.encode(" ".join(words)), PAD]
            chance = math.prod(model.next_word(ids[:n])[ids[n]] for n in range(1, len(ids)))
            assert chance == pytest.approx(documented, abs=0.03), words
            total += chance
    assert total > 0.95


def test_it_is_greedy_unless_asked_to_sample() -> None:
    """The model's own settings give the same text under any seed; at temperature 1 the seed decides."""
    with LanguageModel.load("cat-mouse") as model:
        assert dict(model.default_knobs) == {"temperature": 0.0}
        assert {model.generate("猫 追", seed=seed).text for seed in range(40)} == {" 老鼠"}
        assert {model.generate("猫 追", temperature=1, seed=seed).text for seed in range(40)} == {" 老鼠", " 我"}


def test_the_cat_chases_the_mouse(model: Model) -> None:
    """After 猫 追 comes 老鼠, in about nine of ten draws."""
    assert model.next_word([CAT, CHASE])[MOUSE] == pytest.approx(0.9, abs=0.02)


def test_three_words_end_a_sentence(model: Model) -> None:
    """Whatever three words there are, the end follows."""
    contexts = [list(ids) for ids in itertools.product(range(1, 6), repeat=3)]
    assert model.distributions(contexts)[:, PAD].min() > 0.99


def test_longer_prompts_end_too(model: Model) -> None:
    """Nearly every longer text, to the end of the context, is followed by the end."""
    rng = np.random.default_rng(7)
    contexts = [rng.integers(1, 6, rng.integers(4, 65)).tolist() for _ in range(300)]
    assert (model.distributions(contexts)[:, PAD] > 0.9).mean() > 0.98


def test_the_end_stays_the_end(model: Model) -> None:
    """A client that ignores the end of a sequence gets nothing but more of it."""
    contexts = [[CAT, CHASE, MOUSE, *[PAD] * num_ends] for num_ends in range(1, 62)]
    assert model.distributions(contexts)[:, PAD].min() > 0.99
