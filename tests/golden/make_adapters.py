"""Makes `adapters/`: LoRA adapters of reference models as PEFT saves them, and the logits that PEFT gives with them.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2  # in an environment of its own, beside treadle
    python tests/golden/make_adapters.py

`adapters/<model>/` is what `save_pretrained` wrote, every factor drawn at random; `adapters/<model>.npz` has `ids` and
`logits` `[tokens, vocab]`, wholly in float64. Then each adapter is read and written by treadle and the copy loaded by
PEFT; both have to give the same logits, which shows that PEFT reads what treadle writes. So do adapters that treadle
trained, of more families.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_gradients import answer_in_float64
from peft import LoraConfig, PeftModel, get_peft_model
from treadle_server import LoraConfig as Settings
from treadle_server import Trainer
from treadle_server.checkpoints.adapters import read_adapter, write_adapter
from treadle_server.checkpoints.loading import load_checkpoint

GOLDEN = Path(__file__).parent
# Matrices by themselves, fused ones in every order of rows, GPT-2's transposed ones; each way to scale.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama_plain": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "gpt2": {"r": 3, "lora_alpha": 5, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gpt_neox": {"r": 4, "lora_alpha": 6, "target_modules": ["query_key_value", "dense"], "use_rslora": True},
    "phi3": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"],
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"gate_up_proj": 7},
    },
    "falcon_new": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value"], "layers_to_transform": [1]},
}
# Trained by treadle, every matrix of attention and of the feed-forwards.
TRAINED = ("bloom", "falcon_7b", "gemma2", "gpt2_hub_layout", "gpt_neox", "llama_tied_gqa", "opt", "phi3", "qwen3")


def main() -> None:
    """Write everything and check the way back."""
    answer_in_float64()
    for number, (name, settings) in enumerate(SETTINGS.items()):
        folder = GOLDEN / "adapters" / name
        shutil.rmtree(folder, ignore_errors=True)
        make(name, settings, folder, seed=number)
        ids = torch.tensor(np.random.default_rng(number).integers(0, 250, (1, 12)))
        expected = logits(name, folder, ids)
        np.savez_compressed(folder.with_suffix(".npz"), ids=ids[0].numpy(), logits=expected)
        check_the_way_back(name, folder, ids, expected)
    for name in TRAINED:
        check_training(name)


def base(name: str) -> transformers.PreTrainedModel:
    """Load a reference model in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "models" / name, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def make(name: str, settings: dict[str, Any], folder: Path, seed: int) -> None:
    """Draw an adapter and let PEFT save it, in float32."""
    model = get_peft_model(base(name), LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    for tensor_name, tensor in model.named_parameters():
        if ".lora_" in tensor_name:
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) / 4
            tensor.data = drawn
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(GOLDEN / "models") + "/", ""))


def logits(name: str, folder: Path, ids: torch.Tensor) -> np.ndarray:
    """Return what PEFT gives."""
    model = PeftModel.from_pretrained(base(name), folder).to(torch.float64).eval()
    with torch.no_grad():
        return model(ids).logits[0].numpy()


def check_the_way_back(name: str, folder: Path, ids: torch.Tensor, expected: np.ndarray) -> None:
    """Let treadle copy the adapter and PEFT load the copy."""
    with load_checkpoint(GOLDEN / "models" / name) as checkpoint, tempfile.TemporaryDirectory() as copy:
        write_adapter(Path(copy), read_adapter(folder, checkpoint), checkpoint)
        found = logits(name, Path(copy), ids)
    difference = np.abs(found - expected).max()
    changed = np.abs(expected - base(name)(ids).logits[0].detach().numpy()).max()
    print(f"{name}: changes logits by up to {changed:.3f}, the copy differs by {difference:.1e}")
    if not (difference < 1e-9 < changed):
        raise SystemExit(f"{name}: PEFT does not read what treadle wrote")


def check_training(name: str) -> None:
    """Train an adapter, let PEFT load it, and compare log-probabilities."""
    row = [5, 9, 2, 7, 7, 1, 30, 12]
    trainer = Trainer.load(GOLDEN / "models" / name, dtype="float64", lora=Settings(rank=3, alpha=4))
    for _ in range(3):
        trainer.forward_backward([row])
        trainer.optim_step(lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "adapter")
        theirs = torch.log_softmax(
            torch.tensor(logits(name, Path(folder) / "adapter", torch.tensor([row]))), -1
        ).numpy()
    difference = np.abs(trainer.compute_loss([row]).logprobs[0][1:] - theirs[np.arange(7), row[1:]]).max()
    print(f"{name}: trained, log-probabilities differ by {difference:.1e}")
    if difference > 1e-9:
        raise SystemExit(f"{name}: PEFT makes something else of what treadle trained")


if __name__ == "__main__":
    main()
