"""Makes `train/families.npz`: what PyTorch says of every reference model's loss and gradients, wholly in float64.

    pip install torch==2.13.0 transformers==5.24.0  # in an environment of its own
    python tests/golden/make_gradients.py

For each model: `<model>/loss`, and `<model>/grad/<tensor>`, four numbers that a gradient has to have: its dot products
with three random arrays (`directions`) and its norm. transformers works norms, softmax and angles out in float32 even
in a float64 model; here every such request is answered in float64.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._device import _device_constructors

GOLDEN = Path(__file__).parent
# Computed with another attention than eager: see README.md.
ATTENTION = {"falcon_alibi": "sdpa"}
# What transformers 5 calls otherwise than the files.
RENAMED = {
    "gpt_neox": (("lm_head.", "embed_out."),),
    "mixtral": ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
}


def main() -> None:
    """Write the file."""
    answer_in_float64()
    input_ids = np.random.default_rng(3).integers(0, 250, (2, 12))
    found: dict[str, Any] = {"input_ids": input_ids}
    for folder in sorted((GOLDEN / "models").iterdir()):
        for name, value in gradients(folder, torch.tensor(input_ids)).items():
            found[f"{folder.name}/{name}"] = value
    np.savez_compressed(GOLDEN / "train" / "families.npz", **found)


def answer_in_float64() -> None:
    """Let nothing be rounded to float32 on the way."""
    torch.set_default_dtype(torch.float64)
    to = torch.Tensor.to
    torch.Tensor.to = widened(to)
    torch.Tensor.float = lambda tensor, *_: to(tensor, torch.float64)
    torch.nn.functional.softmax = widened(torch.nn.functional.softmax)
    _device_constructors()  # remembers the factories as they are, for loading without memory
    for factory in ("arange", "tensor", "full"):
        setattr(torch, factory, widened(getattr(torch, factory)))


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes float64 wherever it is asked for float32."""

    def call(*args: Any, **options: Any) -> Any:
        wide = (torch.float64 if one is torch.float32 else one for one in args)
        return function(*wide, **{key: torch.float64 if one is torch.float32 else one for key, one in options.items()})

    return call


def gradients(folder: Path, input_ids: torch.Tensor) -> dict[str, Any]:
    """Return the loss and each gradient's numbers, under the checkpoint's own names."""
    attention = ATTENTION.get(folder.name, "eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    loss = model.eval()(input_ids, labels=input_ids).loss
    loss.backward()
    result = {"loss": loss.item()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            for tensor, gradient in parts(name, parameter.grad.numpy()):
                part = tensor
                for old, new in RENAMED.get(model.config.model_type, ()):
                    part = part.replace(old, new)
                result[f"grad/{part}"] = numbers(gradient)
    return result


def parts(name: str, gradient: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the tensors that transformers 5 keeps in one: the experts of a layer."""
    match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if not match:
        return [(name, gradient)]
    prefix, kind = match.groups()
    if kind == "down_proj":
        return [(f"{prefix}.{expert}.down_proj.weight", one) for expert, one in enumerate(gradient)]
    halves = [np.split(one, 2) for one in gradient]
    return [
        (f"{prefix}.{expert}.{half}_proj.weight", one)
        for expert, pair in enumerate(halves)
        for half, one in zip(("gate", "up"), pair, strict=True)
    ]


def numbers(gradient: np.ndarray) -> np.ndarray:
    """Return three dot products with random arrays, and the norm."""
    return np.array([*(directions(gradient.shape) * gradient).reshape(3, -1).sum(1), np.linalg.norm(gradient)])


def directions(shape: tuple[int, ...]) -> np.ndarray:
    """Return the three random arrays of a shape."""
    return np.random.default_rng(zlib.crc32(repr(shape).encode())).standard_normal((3, *shape))


if __name__ == "__main__":
    main()
