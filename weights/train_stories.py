"""Makes the bundled model `stories`: a small llama, trained by treadle's own trainer on the stories of `stories/`.

    python weights/train_stories.py [--output FOLDER] [--work FOLDER] [--steps N] [--batch N] [--fall N] [--held-out N]

Every `CHECKPOINT_EVERY` steps the trainer is saved under `--work`; the same command goes on from there. Data, first
weights and schedule follow from fixed seeds. How a machine's BLAS rounds its sums does not, so another machine's run
ends in other last digits, and in a model as good.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stories.corpus import held_out_stories, training_stories
from stories.model import SEED, VOCAB_SIZE, write_start
from stories.record import LossRow, read_rows, write_curve, write_manifest, write_rows
from stories.teller import LANGUAGES
from stories.tokenizer import END_ID, train_tokenizer
from tokenizers import Tokenizer
from treadle_server import Trainer
from treadle_server.training.schedules import Schedule

NAME = "stories"
FOLDER = Path(__file__).parent / "src" / "treadle_weights" / NAME
WORK = Path(__file__).parent / "build" / NAME

NUM_STEPS = 3500
STORIES_PER_STEP = 16
FALL_STEPS = 2500  # at the end the learning rate falls to 0 in a straight line; before, it stays
WARMUP_STEPS = 100
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRAD_CLIP_NORM = 1.0

NUM_TOKENIZER_STORIES = 20_000
NUM_HELD_OUT = 200  # stories of each language that the manifest's perplexity is of
NUM_WATCHED = 32  # of them, at most so many whose loss stands in the curve
CHECKPOINT_EVERY = 100
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the command line says."""

    output: Path
    work: Path
    steps: int
    batch: int
    fall: int
    held_out: int

    @property
    def num_stories(self) -> int:
        """How many stories the model sees."""
        return self.steps * self.batch

    def command(self) -> str:
        """Return the command that repeats this run, the folders aside."""
        numbers = {"steps": self.steps, "batch": self.batch, "fall": self.fall, "held-out": self.held_out}
        return " ".join(["python weights/train_stories.py", *(f"--{name} {value}" for name, value in numbers.items())])


def learning_rate(run: Run) -> Schedule:
    """Return the schedule: up in a line, level, and down in a line, so that a run can be made longer while level."""

    def rate(step: int) -> float:
        return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS, (run.steps - step) / run.fall)

    return rate


def encode(tokenizer: Tokenizer, story: str) -> list[int]:
    """Return a story as ids, its begin and its end included."""
    return [*tokenizer.encode(story).ids, END_ID]


def batches(tokenizer: Tokenizer, run: Run, first_step: int) -> Iterator[list[list[int]]]:
    """Yield the batches of the steps from `first_step`, a story a row."""
    stories = itertools.islice(training_stories(), first_step * run.batch, run.num_stories)
    rows = (encode(tokenizer, story) for story in stories)
    while batch := list(itertools.islice(rows, run.batch)):
        yield batch


def held_out_loss(trainer: Trainer, tokenizer: Tokenizer, stories: list[str]) -> float:
    """Return the mean loss of a token of the stories, each story's end counted, its begin not."""
    total, num_tokens = 0.0, 0
    for start in range(0, len(stories), STORIES_PER_STEP):
        rows = [encode(tokenizer, story) for story in stories[start : start + STORIES_PER_STEP]]
        result = trainer.compute_loss(rows, reduction="sum")
        total, num_tokens = total + result.loss, num_tokens + result.num_tokens
    return total / num_tokens


def start(run: Run) -> tuple[Trainer, Tokenizer]:
    """Return a trainer at the first step, or at the last one that was saved, and the tokenizer."""
    folder, saved = run.work / "start", run.work / "saved"
    if not folder.exists():
        write_start(folder, train_tokenizer(itertools.islice(training_stories(), NUM_TOKENIZER_STORIES), VOCAB_SIZE))
    trainer = Trainer.load(folder, no_decay=("*norm.weight",))
    if saved.exists():
        trainer.load_state(saved)
    return trainer, Tokenizer.from_file(str(folder / "tokenizer.json"))


def train(run: Run, trainer: Trainer, tokenizer: Tokenizer) -> None:
    """Take the steps that are left, with a row of the loss curve at each checkpoint."""
    rate, since, losses, num_tokens = learning_rate(run), time.perf_counter(), [], 0
    num_watched = min(NUM_WATCHED, run.held_out)
    watched = [held_out_stories(name, num_watched, num_training=run.num_stories) for name in LANGUAGES]
    for rows in batches(tokenizer, run, trainer.step):
        lr = rate(trainer.step)
        result = trainer.forward_backward(rows)
        trainer.optim_step(lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, grad_clip_norm=GRAD_CLIP_NORM)
        losses.append(result.loss)
        num_tokens += result.num_tokens
        if trainer.step % CHECKPOINT_EVERY and trainer.step != run.steps:
            continue
        held_out = [held_out_loss(trainer, tokenizer, stories) for stories in watched]
        row = LossRow(trainer.step, lr, math.fsum(losses) / len(losses), *held_out)
        trainer.save(run.work / "saved")
        write_rows(run.work / "loss.csv", [*read_rows(run.work / "loss.csv"), row])
        print(f"{row}, {num_tokens / (time.perf_counter() - since):.0f} tokens/s", flush=True)
        since, losses, num_tokens = time.perf_counter(), [], 0


def finish(run: Run, trainer: Trainer, tokenizer: Tokenizer) -> None:
    """Write the model's folder in bfloat16, with its loss curve and its manifest."""
    rounded = run.work / "bfloat16"
    trainer.save(rounded, dtype="bfloat16")
    run.output.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        shutil.copyfile(rounded / name, run.output / name)
    rows = read_rows(run.work / "loss.csv")
    write_rows(run.output / "loss.csv", rows)
    write_curve(run.output / "loss.svg", rows)
    published = Trainer.load(run.output)
    stories = {name: held_out_stories(name, run.held_out, num_training=run.num_stories) for name in LANGUAGES}
    perplexity = {name: math.exp(held_out_loss(published, tokenizer, texts)) for name, texts in stories.items()}
    write_manifest(run.output, training_record(run), perplexity)


def training_record(run: Run) -> dict[str, object]:
    """Return what the manifest says about how the model was trained."""
    return {
        "command": run.command(),
        "seed": SEED,
        "steps": run.steps,
        "stories": run.num_stories,
        "stories_per_step": run.batch,
        "optimizer": "adamw",
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP_STEPS,
        "fall_steps": run.fall,
        "betas": list(BETAS),
        "weight_decay": WEIGHT_DECAY,
        "no_decay": ["*norm.weight"],
        "grad_clip_norm": GRAD_CLIP_NORM,
        "held_out_stories": run.held_out,
    }


def parse_run() -> Run:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=f"Train the bundled model {NAME}.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write the model to (the bundled one)")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints to go on from")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"steps to take ({NUM_STEPS})")
    parser.add_argument("--batch", type=int, default=STORIES_PER_STEP, help=f"stories a step ({STORIES_PER_STEP})")
    parser.add_argument("--fall", type=int, default=FALL_STEPS, help=f"steps of falling learning rate ({FALL_STEPS})")
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT, help=f"stories to measure on ({NUM_HELD_OUT})")
    return Run(**vars(parser.parse_args()))


def main() -> None:
    """Train the model and write its files."""
    run = parse_run()
    trainer, tokenizer = start(run)
    train(run, trainer, tokenizer)
    finish(run, trainer, tokenizer)
    print(f"wrote {run.output}")


if __name__ == "__main__":
    main()
