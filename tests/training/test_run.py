"""Whole training runs: that they learn, stop, go on bit for bit, and lose nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treadle_server import LanguageModel
from treadle_server.checkpoints.safetensors_io import SafetensorsFile
from treadle_server.errors import CheckpointError, ConfigError, DataError, InvalidRequestError, TrainingError
from treadle_server.training.loss_log import read_losses
from treadle_server.training.run import TrainingRun
from treadle_server.training.run_events import CheckpointSaved, Evaluated, RunEvent, StepDone
from treadle_server.training.run_folder import RunFolder
from treadle_server.training.train_config import train_config

Start = Callable[..., TrainingRun]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Stories of different lengths, one a line."""
    path = tmp_path / "stories.jsonl"
    animals = ("cat", "mouse", "dog", "bird")
    texts = [f"The {a} saw the {b}. " * n for n in (1, 3, 8) for a in animals for b in animals]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def start(tiny_folder: Path, data: Path, tmp_path: Path) -> Start:
    """Starts a run in a folder of the given name, of few short steps."""

    def start_run(out: str = "out", **settings: Any) -> TrainingRun:
        usual = {"batch_tokens": 256, "lr": 3e-3, **({} if "epochs" in settings else {"steps": 10})}
        return TrainingRun.start(tiny_folder, [data], tmp_path / out, train_config({**usual, **settings}))

    return start_run


def tensors(folder: Path, name: str = "model") -> dict[str, bytes]:
    """Return the bytes of every tensor of a model folder."""
    with closing(SafetensorsFile(folder / f"{name}.safetensors")) as file:
        return {name: np.array(file.map(name)).tobytes() for name in file.tensors}


def stop_at(run: TrainingRun, step: int) -> Callable[[RunEvent], None]:
    """Return a report that stops the run when it has done a step."""
    return lambda event: run.stop() if isinstance(event, StepDone) and event.step == step else None


def rows_without_speed(path: Path) -> list[list[str]]:
    """Return the rows of a loss.csv, which differ between runs in their last column alone."""
    with path.open(newline="") as file:
        return [row[:-1] for row in csv.reader(file)]


def test_a_run_learns_and_leaves_a_model_folder(start: Start) -> None:
    """The loss falls, and the folder is a model that generates and has a table and a picture of the losses."""
    run = start(steps=20)
    result = run.run()
    losses = [row.loss for row in read_losses(result.folder / "loss.csv")]
    assert (result.status, result.step, len(losses)) == ("finished", 20, 20)
    assert losses[-1] == result.loss < 0.6 * losses[0]
    assert (result.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    with LanguageModel.load(result.folder) as model:
        assert model.generate("The cat", max_tokens=3, ignore_eos=True).choices[0].token_ids
    assert not (result.folder / "trainer_state.safetensors").exists()


def test_a_stopped_run_goes_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    """Five steps, a stop and five more are ten steps: weights, losses and held-out losses."""
    settings = {
        "held_out_fraction": 0.1,
        "eval_interval": 2,
        "accumulate": 2,
        "warmup_steps": 3,
        "label_smoothing": 0.1,
    }
    whole = start("whole", **settings).run()
    first = start("parts", **settings)
    stopped = first.run(stop_at(first, 5))
    assert (stopped.status, stopped.step) == ("interrupted", 5)
    assert not (stopped.folder / "config.json").exists()
    resumed = TrainingRun.resume(tmp_path / "parts").run()
    assert resumed.status == "finished"
    assert tensors(resumed.folder) == tensors(whole.folder)
    assert rows_without_speed(resumed.folder / "loss.csv") == rows_without_speed(whole.folder / "loss.csv")
    assert (resumed.loss, resumed.held_out_loss) == (whole.loss, whole.held_out_loss)


def test_a_stop_before_the_first_step_loses_nothing(start: Start, tmp_path: Path) -> None:
    """A run that is stopped at once has a checkpoint of step 0, from which it goes on."""
    run = start("stopped", steps=2)
    run.stop()
    stopped = run.run()
    assert (stopped.status, stopped.step) == ("interrupted", 0)
    assert tensors(TrainingRun.resume(tmp_path / "stopped").run().folder) == tensors(
        start("whole", steps=2).run().folder
    )


def test_epochs_end_with_the_data_and_go_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    """Two epochs read every document twice; a stop in the middle of one changes nothing."""
    whole = start("whole", epochs=2).run()
    assert whole.epochs == 2.0
    first = start("parts", epochs=2)
    first.run(stop_at(first, 4))
    assert tensors(TrainingRun.resume(tmp_path / "parts").run().folder) == tensors(whole.folder)


def test_a_killed_run_goes_on_from_its_newest_checkpoint(start: Start, tmp_path: Path) -> None:
    """Steps after the checkpoint are done again, and loss.csv has them once."""

    class KilledError(Exception):
        """Stands for the end of the process."""

    def kill(event: RunEvent) -> None:
        if isinstance(event, StepDone) and event.step == 7:
            raise KilledError

    with pytest.raises(KilledError):
        start("killed", checkpoint_interval=4).run(kill)
    (tmp_path / "killed" / "checkpoints" / "step-00000008.partial").mkdir()
    steps: list[RunEvent] = []
    resumed = TrainingRun.resume(tmp_path / "killed").run(steps.append)
    assert isinstance(steps[0], StepDone)
    assert steps[0].step == 5
    whole = start("whole").run()
    assert tensors(resumed.folder) == tensors(whole.folder)
    assert rows_without_speed(resumed.folder / "loss.csv") == rows_without_speed(whole.folder / "loss.csv")
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.partial"))


def test_a_finished_run_can_be_made_longer(start: Start, tmp_path: Path) -> None:
    """With more steps a finished run goes on, and its folder holds the newer model."""
    start(steps=3, schedule="constant").run()
    longer = TrainingRun.resume(tmp_path / "out", {"steps": 10}).run()
    assert longer.step == 10
    assert tensors(longer.folder) == tensors(start("whole", schedule="constant").run().folder)
    assert TrainingRun.resume(tmp_path / "out").run().step == 10


def test_the_best_model_is_kept(start: Start) -> None:
    """When held-out losses get worse the run ends early, with the model of the best evaluation in its folder."""
    events: list[RunEvent] = []
    settings = {"held_out_fraction": 0.2, "eval_interval": 1, "patience": 3, "keep_checkpoints": 1, "steps": 60}
    result = start(schedule="constant", lr=0.1, **settings).run(events.append)
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    best = min(evaluations, key=lambda event: event.loss)
    assert result.status == "stopped_early"
    assert (result.best_step, result.held_out_loss) == (best.step, best.loss)
    assert result.step == best.step + 3
    kept = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert kept == [f"step-{best.step:08d}", f"step-{result.step:08d}"]
    assert tensors(result.folder) == tensors(result.folder / "checkpoints" / kept[0])


def test_the_held_out_loss_weighs_tokens(start: Start) -> None:
    """The held-out loss is the mean over tokens, whatever batches they come in."""
    small, large = (
        start(name, held_out_fraction=0.5, sequence_length=64, batch_tokens=num)
        for name, num in (("small", 64), ("large", 512))
    )
    np.testing.assert_allclose(small.held_out_loss(), large.held_out_loss(), rtol=1e-6)


def test_held_out_files_are_not_trained_on(start: Start, tmp_path: Path) -> None:
    """A held-out file is evaluated and leaves the steps as they are."""
    (tmp_path / "held_out.txt").write_text("The cat saw the mouse.")
    evaluated = start("evaluated", held_out=[tmp_path / "held_out.txt"], eval_interval=3).run()
    plain = start("plain").run()
    assert evaluated.perplexity == pytest.approx(np.exp(evaluated.held_out_loss))
    assert evaluated.loss == plain.loss


def test_old_checkpoints_are_deleted(start: Start) -> None:
    """The newest few stay, and each was announced when it was complete."""
    saved: list[RunEvent] = []
    result = start(checkpoint_interval=2, keep_checkpoints=3).run(
        lambda event: saved.append(event) if isinstance(event, CheckpointSaved) else None
    )
    assert [event.step for event in saved] == [2, 4, 6, 8, 10]
    names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008", "step-00000010"]


def test_frozen_and_rounded(start: Start, tiny_folder: Path) -> None:
    """Settings reach the trainer: frozen tensors stay, and the files have the number type that was asked for."""
    run = start(frozen=["*embed_tokens*"], optimizer="sgd", momentum=0.9, dtype="float64", save_dtype="float32")
    before = run.trainer.parameters()
    result = run.run()
    after = run.trainer.parameters()
    changed = {name for name, array in after.items() if not np.array_equal(array, before[name])}
    assert changed == before.keys() - {"model.embed_tokens.weight"}
    assert json.loads((result.folder / "config.json").read_text())["dtype"] == "float32"


def test_an_adapter_is_trained_and_gone_on_with(start: Start, tmp_path: Path) -> None:
    """With a LoRA rank the folder holds an adapter in PEFT's layout; a stop in between changes no bit of it."""
    settings = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj"], "steps": 4}
    whole = start("whole", **settings).run()
    first = start("parts", **settings)
    first.run(stop_at(first, 2))
    resumed = TrainingRun.resume(tmp_path / "parts").run()
    names = {path.name for path in resumed.folder.iterdir() if path.suffix in (".json", ".safetensors")}
    assert names == {"run.json", "adapter_config.json", "adapter_model.safetensors"}
    assert tensors(resumed.folder, "adapter_model") == tensors(whole.folder, "adapter_model")
    assert json.loads((resumed.folder / "adapter_config.json").read_text())["lora_alpha"] == 4


def test_recomputation_changes_nothing(start: Start) -> None:
    """Less memory gives the same bits."""
    kept, recomputed = start("kept").run(), start("recomputed", recompute=True).run()
    assert tensors(kept.folder) == tensors(recomputed.folder)


def test_a_loss_that_is_not_finite_ends_the_run(start: Start, tmp_path: Path) -> None:
    """The error names the tensor and the newest checkpoint, which still loads."""
    run = start(checkpoint_interval=2)

    def poison(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved):
            run.trainer._decoder.parameters["layers.1.mlp.down.weight"][0, 0] = np.nan
            run.trainer._decoder.refresh()

    with pytest.raises(TrainingError, match=r"after 2 steps: .*layers\.1\.mlp\.down_proj.*step-00000002"):
        run.run(poison)
    assert TrainingRun.resume(tmp_path / "out").run().status == "finished"


def test_a_full_disk_keeps_the_newest_checkpoint(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that cannot be written ends the run; the one before is whole and goes on."""
    run = start(checkpoint_interval=3)

    def fill(event: RunEvent) -> None:
        if isinstance(event, CheckpointSaved):
            monkeypatch.setattr("treadle_server.training.state_files.write_safetensors", full)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"after 6 steps: .*No space left.*newest checkpoint is .*step-00000003"):
        run.run(fill)
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    assert TrainingRun.resume(tmp_path / "out").run().status == "finished"


def test_a_folder_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    """A new run needs a folder of its own, and nothing is written into another."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        start("mine")
    start("used", steps=1).run()
    with pytest.raises(CheckpointError, match="holds a training run; go on with it"):
        start("used")
    with pytest.raises(CheckpointError, match="holds no training run"):
        TrainingRun.resume(tmp_path / "mine")


def test_a_run_that_saved_nothing_is_in_nobodys_way(start: Start) -> None:
    """After a mistake that ended a run at its first step, the same folder can be used again."""
    with pytest.raises(InvalidRequestError, match="momentum: is no option of adamw"):
        start(momentum=0.5).run()
    assert start(steps=2).run().step == 2


def test_other_data_is_not_gone_on_with(start: Start, data: Path, tmp_path: Path) -> None:
    """A run whose data has changed cannot be resumed: its place in the data means nothing."""
    start(steps=1).run()
    data.write_text(data.read_text() + '{"text": "One more."}\n')
    with pytest.raises(ConfigError, match="the data has changed"):
        TrainingRun.resume(tmp_path / "out", {"steps": 2})


def test_what_the_state_does_not_fit_cannot_change(start: Start, tmp_path: Path) -> None:
    """A resumed run may have another rate, but no other seed or optimizer."""
    start(steps=1).run()
    with pytest.raises(ConfigError, match="seed was 0, but is 3; optimizer was 'adamw', but is 'sgd'"):
        TrainingRun.resume(tmp_path / "out", {"optimizer": "sgd", "seed": 3})
    assert TrainingRun.resume(tmp_path / "out", {"steps": 2, "lr": 1.0}).run().step == 2


def test_the_same_settings_may_be_given_again(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever resumes with the file of settings that started the run is not refused for a relative path."""
    (tmp_path / "held_out.txt").write_text("The cat saw the mouse.")
    monkeypatch.chdir(tmp_path)
    settings = {"steps": 1, "batch_tokens": 256, "lr": 3e-3, "held_out": ["held_out.txt"], "no_decay": ["*norm*"]}
    start(**settings).run()
    assert TrainingRun.resume(tmp_path / "out", settings).run().status == "finished"


def test_data_too_short_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Held-out documents without a token to predict are refused before a folder is made."""
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "held_out.txt").write_text("a")
    folder = tmp_path / "no-end"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        text = path.read_text(encoding="utf-8") if path.suffix == ".json" else ""
        kept = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) if path.stem == "tokenizer_config" else text
        (folder / path.name).write_bytes(kept.encode() if path.suffix == ".json" else path.read_bytes())
    config = train_config({"held_out": [tmp_path / "held_out.txt"]})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="held-out data is too short"):
        TrainingRun.start(folder, [tmp_path / "data.jsonl"], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_is_named(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Files of text need a tokenizer, and the error names the file that is missing."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TrainingRun.start(tmp_path, [data], tmp_path / "out")


def test_rows_longer_than_the_context_are_refused(start: Start, golden: Path, data: Path, tmp_path: Path) -> None:
    """A model with a table of positions has no more than it; one with rotary positions may go on."""
    config = train_config({"sequence_length": 4096, "batch_tokens": 4096})
    with pytest.raises(ConfigError, match="sequence_length: must be at most the model's context"):
        TrainingRun.start(golden / "models" / "gpt2", [data], tmp_path / "out", config)
    start(sequence_length=200, steps=1).run()


def test_events_go_to_tensorboard(start: Start) -> None:
    """Event files hold each step's loss and each evaluation."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401 - the same library reads below
    from tensorboardX.proto.event_pb2 import Event

    result = start(tensorboard=True, steps=3, held_out_fraction=0.1).run()
    (file,) = (result.folder / "tensorboard").iterdir()
    content, scalars = file.read_bytes(), []
    while content:  # length in 8 bytes, its checksum in 4, the event, its checksum in 4
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        scalars += [(value.tag, event.step) for value in event.summary.value]
        content = content[16 + length :]
    assert [step for tag, step in scalars if tag == "train/loss"] == [1, 2, 3]
    assert ("held_out/loss", 3) in scalars


def test_a_missing_extra_is_named(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without tensorboardX the error says what to install, before anything starts."""
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"treadle-server\[tensorboard\]"):
        start(tensorboard=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("[]", "Input should be an object"),
        ('{"model": "m", "data": [], "config": {"bogus": 5}}', "config.bogus: Extra inputs are not permitted, got 5"),
    ],
)
def test_a_broken_run_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    """With the file, and what is wrong in it."""
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"run\.json: cannot be read: {message}$"):
        RunFolder(tmp_path).read_spec()
