"""The bundled model stories: what its files hold, how well it predicts, what it writes, and the script that made it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import train_stories
import treadle_weights
from safetensors import safe_open
from stories.corpus import HELD_OUT_SEED, TRAINING_SEED, training_stories
from stories.model import VOCAB_SIZE, config, generation_config, shapes
from stories.record import read_rows
from stories.teller import LANGUAGES, tell
from tokenizers import Tokenizer
from treadle_server import LanguageModel, Trainer

FOLDER = treadle_weights.folder("stories")
SCRIPT = Path(__file__).parents[2] / "weights" / "train_stories.py"
PROMPTS = {
    "english": ["The cat", "The mouse", "Once upon a time", "One day, the cat", "A little mouse", "There was a cat"],
    "chinese": ["小猫", "老鼠", "从前", "有一天，老鼠", "小猫和老鼠", "猫"],
}
SEEDS = range(3)


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The manifest."""
    return dict(json.loads((FOLDER / "manifest.json").read_text("utf-8")))


@functools.cache
def texts(language: str) -> list[str]:
    """Return what the model makes of each prompt under each seed by its own settings, the prompt included."""
    with LanguageModel.load("stories") as model:
        pairs = itertools.product(PROMPTS[language], SEEDS)
        results = [(prompt, model.generate(prompt, seed=seed)) for prompt, seed in pairs]
    assert {result.choices[0].finish.reason.name for _, result in results} == {"EOS"}
    return [prompt + result.text for prompt, result in results]


def test_manifest_matches_the_files(manifest: dict[str, Any]) -> None:
    """The manifest names every file with its digest, and every tensor with its shape and origin."""
    files = [path for path in FOLDER.iterdir() if path.name not in ("manifest.json", "README.md")]
    assert manifest["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert manifest["num_bytes"] == sum(path.stat().st_size for path in files)
    assert {name: tuple(entry["shape"]) for name, entry in manifest["tensors"].items()} == shapes()
    assert all(entry["made"] for entry in manifest["tensors"].values())
    assert manifest["num_parameters"] == sum(map(math.prod, shapes().values()))
    assert (manifest["name"], manifest["licence"]) == ("stories", "Apache-2.0")


def test_it_is_small() -> None:
    """One to five million parameters in bfloat16, and all bundled models together are under 10 MB."""
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - no mapping
    assert 1_000_000 <= sum(map(math.prod, shapes().values())) <= 5_000_000
    assert sum(path.stat().st_size for path in FOLDER.parent.rglob("*") if path.is_file()) < 10_000_000


def test_configuration_is_the_scripts() -> None:
    """config.json and generation_config.json are those that the script writes, but for the dtype."""
    written = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert written == config() | {"torch_dtype": "bfloat16"}
    assert json.loads((FOLDER / "generation_config.json").read_text("utf-8")) == generation_config()


def test_curve_falls_to_the_manifests_perplexity(manifest: dict[str, Any]) -> None:
    """The loss curve ends at the last step, far below its beginning, near the perplexity of the whole sample."""
    rows = read_rows(FOLDER / "loss.csv")
    assert rows[-1].step == manifest["training"]["steps"]
    assert rows[-1].loss < rows[0].loss / 2
    perplexity = manifest["held_out_perplexity"]
    assert math.exp(rows[-1].held_out_english) == pytest.approx(perplexity["english"], rel=0.15)
    assert math.exp(rows[-1].held_out_chinese) == pytest.approx(perplexity["chinese"], rel=0.15)
    assert (FOLDER / "loss.svg").read_text("utf-8").count("<polyline") == 3


@pytest.mark.parametrize("language", LANGUAGES)
def test_perplexity_of_unseen_stories_is_the_manifests(language: str, manifest: dict[str, Any]) -> None:
    """Stories of a seed that nobody used are as likely as the manifest says, within their own spread."""
    seed = 1 + max(TRAINING_SEED, HELD_OUT_SEED)
    stories = list(itertools.islice(tell(language, seed), 60))
    trainer, tokenizer = Trainer.load(FOLDER), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    perplexity = math.exp(train_stories.held_out_loss(trainer, tokenizer, stories))
    assert perplexity == pytest.approx(manifest["held_out_perplexity"][language], rel=0.08)
    assert perplexity < 4


def test_tokenizer_is_whole() -> None:
    """Every id up to the vocabulary's size is a token, and the corpus comes back from its ids in few tokens."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    stories = list(itertools.islice(training_stories(), 200))
    encoded = [tokenizer.encode(story).ids for story in stories]
    assert tokenizer.decode_batch(encoded) == stories
    assert sum(map(len, encoded)) < sum(map(len, stories)) / 2


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_are_whole_sentences(language: str) -> None:
    """By default a text goes on for some sentences, ends itself after a mark, and pairs its quotation marks."""
    for text in texts(language):
        assert re.search(r"[.!?]\"?$|[。！？]”?$", text), text
        assert len(re.findall(r"[.!?。！？]", text)) >= 3, text
        assert "�" not in text
        marks = re.findall('[“”"]', text)
        assert marks == (["“", "”"] if language == "chinese" else ['"', '"']) * (len(marks) // 2), text


def test_texts_stay_in_their_language() -> None:
    """An English beginning gets English, a Chinese one Chinese."""
    assert all(text.isascii() for text in texts("english"))
    assert not any(re.search("[A-Za-z]", text) for text in texts("chinese"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_use_words_that_exist(language: str) -> None:
    """Nearly every text is made of the stories' words alone (Chinese: their pairs of characters)."""
    pattern = r"[A-Za-z]+" if language == "english" else r"(?=([一-鿿]{2}))"
    known = set(re.findall(pattern, " ".join(itertools.islice(tell(language, 11), 5000))))
    invented = [text for text in texts(language) if not set(re.findall(pattern, text)) <= known]
    assert len(invented) <= 0.1 * len(texts(language)), invented


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_differ(language: str) -> None:
    """Another prompt or seed, another story."""
    assert len(set(texts(language))) == len(texts(language))


def test_generate_takes_it_by_default_and_is_quick() -> None:
    """`treadle generate "The cat"` needs no options and, load included, less than two seconds of a processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "treadle_server.cli", "generate", "The cat"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert re.search(r"[.!?]\"?\n$", done.stdout), done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two steps that is gone on with for two more; the folder it wrote and its manifest."""
    folder = tmp_path_factory.mktemp("run")
    for steps in (2, 4):
        options = f"--steps {steps} --fall 1 --batch 4 --held-out 2 --work {folder}/work --output {folder}/stories"
        subprocess.run([sys.executable, SCRIPT, *options.split()], check=True, capture_output=True)
    return folder / "stories", json.loads((folder / "stories" / "manifest.json").read_text("utf-8"))


def test_script_trains(tiny_run: tuple[Path, dict[str, Any]]) -> None:
    """The script takes real steps, goes on where it was, and writes a model that loads and writes text."""
    folder, written = tiny_run
    assert [row.step for row in read_rows(folder / "loss.csv")] == [2, 4]
    assert all(math.isfinite(value) for row in read_rows(folder / "loss.csv") for value in row)
    assert written["training"]["command"].endswith("--steps 4 --batch 4 --fall 1 --held-out 2")
    assert all(1 < value < 2 * VOCAB_SIZE for value in written["held_out_perplexity"].values())
    with LanguageModel.load(str(folder)) as model:
        assert model.generate("The cat", max_tokens=3).choices[0].finish is not None


def test_script_makes_the_bundled_tokenizer(tiny_run: tuple[Path, dict[str, Any]]) -> None:
    """The tokenizer and the configuration do not depend on how long the training was."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (tiny_run[0] / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_run_of_the_manifest_is_the_default(manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script without options repeats the run that the manifest records."""
    monkeypatch.setattr(sys, "argv", ["train_stories.py"])
    run = train_stories.parse_run()
    assert manifest["training"] == train_stories.training_record(run)
    assert run.output == FOLDER


def test_learning_rate_rises_stays_and_falls() -> None:
    """A warm-up, a level, and a straight line down to nearly 0."""
    run = train_stories.Run(output=FOLDER, work=FOLDER, steps=400, batch=1, fall=200, held_out=1)
    rate = train_stories.learning_rate(run)
    shares = [rate(step) / train_stories.LEARNING_RATE for step in (0, 49, 150, 300, 399)]
    assert shares == pytest.approx([0.01, 0.5, 1.0, 0.5, 1 / 200])
