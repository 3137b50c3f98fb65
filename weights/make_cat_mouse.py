"""Makes the bundled model `cat-mouse`: six words, one layer, half of its numbers from a document worked by hand.

    python weights/make_cat_mouse.py [--output FOLDER]

The token embedding, the sinusoidal positions, the projections of both attention heads and the output projection are
those of "Transformer Training Computation Matrix by Matrix" (chapters 1 and 6), unchanged. The document leaves the
layer norms, the feed-forward network and the output head open. They are fitted here by gradient descent on `NEXT_WORD`.

As everything up to the first layer norm's division is given, each context is four fixed numbers, and only
    hidden = given * norm1 + bias;  hidden = norm2(hidden + down(relu(up(hidden))));  logits = head(hidden)
is trained. Every run makes the same files to the bit: the training uses only additions, multiplications, divisions and
square roots, element by element, whose results IEEE 754 fixes on every machine (a BLAS product or exp would not do).

Dimension letters: `dim` 4, `hidden` 48, `vocab` 6, `contexts` (beginnings of sentences that the model learns from).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

Array = NDArray[np.float64]
Tensors = dict[str, NDArray[np.float32]]  # by their names in a treadle_classic checkpoint

NAME = "cat-mouse"
FOLDER = Path(__file__).parent / "src" / "treadle_weights" / NAME
DOCUMENT = "Transformer Training Computation Matrix by Matrix (2026-04-29), chapters 1 and 6"

PAD = "<PAD>"
WORDS = (PAD, "老鼠", "猫", "追", "我", "爱")  # ids 0 to 5: padding, mouse, cat, chase(s), I, love(s)

# The document's numbers: chapter 1.3, then chapters 6.4 (both heads) and 6.6, where rows are inputs.
W_EMBED = (
    (0.00, 0.00, 0.00, 0.00),
    (0.60, 0.10, 0.30, 0.90),
    (0.50, 0.20, 0.80, 0.10),
    (0.30, 0.70, 0.20, 0.60),
    (0.70, 0.50, 0.10, 0.40),
    (0.20, 0.90, 0.70, 0.30),
)
W_Q = (
    ((0.1, 0.2), (0.4, 0.5), (0.7, 0.8), (0.15, 0.25)),
    ((0.3, 0.4), (0.5, 0.6), (0.8, 0.9), (0.2, 0.3)),
)
W_K = (
    ((0.05, 0.15), (0.35, 0.45), (0.65, 0.75), (0.1, 0.2)),
    ((0.1, 0.2), (0.4, 0.5), (0.7, 0.8), (0.15, 0.25)),
)
W_V = (
    ((0.2, 0.3), (0.5, 0.6), (0.8, 0.9), (0.1, 0.2)),
    ((0.3, 0.4), (0.6, 0.7), (0.9, 1.0), (0.2, 0.3)),
)
W_O = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8), (0.15, 0.25, 0.35, 0.45), (0.55, 0.65, 0.75, 0.85))

# What follows a first word, and a verb in second place after a given first word or any other ("*"). Everything else
# ends: a noun in second place, the third word, whatever is longer. With the document's attention the second verb hardly
# sees its subject: 爱 cannot tell subjects apart at all, 追 tells the cat from the others. So the objects are shared.
NEXT_WORD: Mapping[tuple[str, ...], Mapping[str, float]] = {
    ("猫",): {"追": 0.7, "爱": 0.3},
    ("老鼠",): {"爱": 1.0},
    ("我",): {"爱": 0.7, "追": 0.3},
    ("追",): {"老鼠": 0.7, "猫": 0.3},
    ("爱",): {"追": 0.7, "我": 0.3},
    ("猫", "追"): {"老鼠": 0.9, "我": 0.1},
    ("*", "追"): {"老鼠": 0.7, "猫": 0.3},
    ("*", "爱"): {"猫": 0.6, "老鼠": 0.4},
}

HIDDEN_DIM = 48
CONTEXT_LENGTH = 64
NORM_EPS = 1e-5
NUM_STEPS = 2000
LEARNING_RATE = 0.03
SEED = 0
DECIMALS = 4  # of the fitted numbers, so that a person can read and copy them


class Examples(NamedTuple):
    """What the fit sees: inputs `[dim, contexts]`, targets `[vocab, contexts]`, weights `[contexts]` that sum to 1."""

    inputs: Array
    targets: Array
    weights: Array


def positions(length: int) -> Array:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i/dim)), PE(pos, 2i+1) = cos(the same), `[length, dim]`."""
    angles = [[pos / 10000 ** (2 * i / 4) for i in range(2)] for pos in range(length)]
    return np.array([[f(angle) for angle in row for f in (math.sin, math.cos)] for row in angles])


def attention_with_residual(ids: Sequence[int]) -> Array:
    """Return x + MultiHead(x) of the last word of a context, `[dim]`, by the document's formulas."""
    x = np.array(W_EMBED)[list(ids)] + positions(len(ids))  # [seq, dim]
    heads = []
    for w_q, w_k, w_v in zip(W_Q, W_K, W_V, strict=True):
        scores = (x @ w_k) @ (x[-1] @ w_q) / math.sqrt(2)  # [seq]
        attention = np.exp(scores - scores.max())
        heads.append(attention @ (x @ w_v) / attention.sum())  # [2]
    result: Array = x[-1] + np.concatenate(heads) @ W_O
    return result


def fixed_features(ids: Sequence[int]) -> Array:
    """Return the first layer norm of a context's last word before its weight and bias, `[dim]`.

    Rounded, so that the last bits of a machine's sine, exponential and matrix product do not reach the fit.
    """
    y = centred(attention_with_residual(ids))
    scale = math.sqrt(float(y @ y) / len(y) + NORM_EPS)
    return np.array([round(value / scale, 9) for value in y.tolist()])


def next_word(context: Sequence[str]) -> Array:
    """Return the probabilities that the model is fitted to after a context, `[vocab]`."""
    wildcard = ("*", *context[1:]) if len(context) == 2 else ()
    wanted = NEXT_WORD.get(tuple(context)) or NEXT_WORD.get(wildcard) or {PAD: 1.0}
    return np.array([wanted.get(word, 0.0) for word in WORDS])


def contexts() -> list[tuple[list[str], float]]:
    """Return beginnings with the weight of each: what people write first, and a sample of all that is longer."""
    ones = [([word], 4.0) for word in WORDS]
    twos = [([first, word], 2.0 if word in ("追", "爱") else 1.0) for first in WORDS for word in WORDS]
    threes = [([filler, filler, word], 0.5) for filler in WORDS for word in WORDS]
    sentences = ["猫", "追", "老鼠", "我", "爱", "猫"] * CONTEXT_LENGTH
    longer = [([*sentences[:n], word], 0.1) for n in range(3, CONTEXT_LENGTH) for word in WORDS]
    ended = [([*sentences[:3], *[PAD] * n], 0.1) for n in range(1, CONTEXT_LENGTH - 2)]
    return ones + twos + threes + longer + ended


def make_examples() -> Examples:
    """Return the contexts as numbers."""
    words, weights = zip(*contexts(), strict=True)
    ids = [[WORDS.index(word) for word in context] for context in words]
    inputs = np.array([fixed_features(context) for context in ids]).T
    targets = np.array([next_word(context) for context in words]).T
    return Examples(np.ascontiguousarray(inputs), np.ascontiguousarray(targets), np.array(weights) / sum(weights))


def product(a: Array, b: Array) -> Array:
    """Return a @ b, `a [rows, inner]`, `b [inner, columns]`, summed one element after the other."""
    if len(a) < len(b):
        return np.stack([np.add.reduce(row[:, None] * b, axis=0) for row in a])
    total = np.zeros((len(a), b.shape[1]))
    for column, row in zip(a.T, b, strict=True):
        total += column[:, None] * row
    return total


def outer_sum(a: Array, b: Array) -> Array:
    """Return a @ b.T, `a [rows, contexts]`, `b [columns, contexts]`: the gradient of a weight matrix."""
    if len(a) > len(b):
        return outer_sum(b, a).T
    return np.stack([np.add.reduce(row * b, axis=1) for row in a])


def exponential(x: Array) -> Array:
    """Return exp(x) for x <= 0 to 8 digits: a Taylor polynomial of x / 1024, squared ten times."""
    y = np.maximum(x, -700.0) / 1024
    result = 1 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4)))
    for _ in range(10):
        result = result * result
    return result


def centred(x: Array) -> Array:
    """Return x minus its mean along the first axis."""
    mean: Array = np.add.reduce(x, axis=0) / len(x)
    return x - mean


def loss_gradients(params: Mapping[str, Array], examples: Examples) -> dict[str, Array]:
    """Return the gradient of the mean cross-entropy for every parameter (biases and norms are columns)."""
    x, targets, weights = examples
    hidden = x * params["norm1"] + params["norm1_bias"]  # [dim, contexts]
    active = np.maximum(product(params["up"], hidden) + params["up_bias"], 0)  # [hidden, contexts]
    y = centred(hidden + product(params["down"], active) + params["down_bias"])
    scale = np.sqrt(np.add.reduce(y * y, axis=0) / len(y) + NORM_EPS)  # [contexts]
    normed = y / scale
    output = normed * params["norm2"] + params["norm2_bias"]
    logits = product(params["head"], output) + params["head_bias"]  # [vocab, contexts]
    odds = exponential(logits - np.maximum.reduce(logits, axis=0))

    dlogits = (odds / np.add.reduce(odds, axis=0) - targets) * weights
    doutput = product(params["head"].T, dlogits)
    dnormed = doutput * params["norm2"]
    along = np.add.reduce(dnormed * normed, axis=0) / len(y)
    dy = (centred(dnormed) - normed * along) / scale
    dactive = product(params["down"].T, dy) * (active > 0)
    dhidden = dy + product(params["up"].T, dactive)
    return {
        "norm1": row_sum(dhidden * x),
        "norm1_bias": row_sum(dhidden),
        "up": outer_sum(dactive, hidden),
        "up_bias": row_sum(dactive),
        "down": outer_sum(dy, active),
        "down_bias": row_sum(dy),
        "norm2": row_sum(doutput * normed),
        "norm2_bias": row_sum(doutput),
        "head": outer_sum(dlogits, output),
        "head_bias": row_sum(dlogits),
    }


def row_sum(x: Array) -> Array:
    """Return the sum of each row as a column."""
    total: Array = np.add.reduce(x, axis=1, keepdims=True)
    return total


def initial_params() -> dict[str, Array]:
    """Return where the fit starts: norms that do nothing, everything else uniform, with the variance of its fan-in."""
    rng = np.random.default_rng(SEED)
    dim, vocab = len(W_O), len(WORDS)

    def uniform(rows: int, columns: int, deviation: float) -> Array:
        return (2 * rng.random((rows, columns)) - 1) * math.sqrt(3) * deviation

    return {
        "norm1": np.ones((dim, 1)),
        "norm1_bias": np.zeros((dim, 1)),
        "up": uniform(HIDDEN_DIM, dim, 1.0),
        "up_bias": uniform(HIDDEN_DIM, 1, 1.0),
        "down": uniform(dim, HIDDEN_DIM, HIDDEN_DIM**-0.5),
        "down_bias": np.zeros((dim, 1)),
        "norm2": np.ones((dim, 1)),
        "norm2_bias": np.zeros((dim, 1)),
        "head": uniform(vocab, dim, 1.0),
        "head_bias": np.zeros((vocab, 1)),
    }


def fit(examples: Examples) -> dict[str, Array]:
    """Return the parameters after NUM_STEPS of Adam (Kingma and Ba 2014), the learning rate falling to 0."""
    params = initial_params()
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    decay1, decay2 = 1.0, 1.0
    for step in range(NUM_STEPS):
        decay1, decay2 = decay1 * 0.9, decay2 * 0.99
        rate = LEARNING_RATE * (1 - step / NUM_STEPS)
        for name, gradient in loss_gradients(params, examples).items():
            first[name] += 0.1 * (gradient - first[name])
            second[name] += 0.01 * (gradient * gradient - second[name])
            scale = np.sqrt(second[name] / (1 - decay2)) + 1e-9
            params[name] -= rate * (first[name] / (1 - decay1)) / scale
    return {name: np.round(value, DECIMALS) for name, value in params.items()}


def make_tensors(fitted: Mapping[str, Array]) -> Tensors:
    """Return the checkpoint's tensors; matrices are `[out, in]`, so the document's are turned."""
    names = {"norm1": "attention_norm.weight", "norm1_bias": "attention_norm.bias", "norm2": "mlp_norm.weight"}
    names |= {"norm2_bias": "mlp_norm.bias", "up": "mlp.up.weight", "up_bias": "mlp.up.bias"}
    names |= {"down": "mlp.down.weight", "down_bias": "mlp.down.bias"}
    tensors = {"embedding.weight": np.array(W_EMBED)}
    for name, heads in (("q", W_Q), ("k", W_K), ("v", W_V)):
        tensors[f"layers.0.attention.{name}.weight"] = np.hstack(heads).T  # head 1's two rows, then head 2's
    tensors["layers.0.attention.o.weight"] = np.array(W_O).T
    tensors |= {f"layers.0.{file_name}": fitted[name] for name, file_name in names.items()}
    tensors |= {"head.weight": fitted["head"], "head.bias": fitted["head_bias"]}
    columns = {name for name, value in tensors.items() if value.shape[1] == 1}
    tensors |= {name: tensors[name][:, 0] for name in columns}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


def origin(name: str) -> str:
    """Return how a tensor was made, for the manifest."""
    if name == "embedding.weight":
        return "document, chapter 1.3: W_embed"
    if name.endswith("attention.o.weight"):
        return "document, chapter 6.6: W_o, transposed"
    if ".attention." in name:
        letter = name.split(".")[-2]
        return f"document, chapter 6.4: W_{letter}1 and W_{letter}2 side by side, transposed"
    return f"fitted: Adam, {NUM_STEPS} steps, seed {SEED}, rounded to {DECIMALS} decimals"


def config() -> dict[str, object]:
    """Return config.json."""
    return {
        "model_type": "treadle_classic",
        "vocab_size": len(WORDS),
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 2,
        "intermediate_size": HIDDEN_DIM,
        "hidden_act": "relu",
        "layer_norm_eps": NORM_EPS,
        "max_position_embeddings": CONTEXT_LENGTH,
        "attention_bias": False,
        "mlp_bias": True,
        "head_bias": True,
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def generation_config() -> dict[str, object]:
    """Return generation_config.json: greedy, so that the model says the same each time unless a request samples."""
    return {"temperature": 0.0, "eos_token_id": 0, "pad_token_id": 0}


def tokenizer() -> dict[str, object]:
    """Return tokenizer.json: words between spaces, or written together as Chinese is.

    The vocabulary has no word for unknown words, so a text with one is refused instead of quietly changed.
    """
    pad = {"id": 0, "content": PAD, "single_word": False, "lstrip": False, "rstrip": False}
    known_words = {"Regex": "|".join(WORDS[1:])}
    split = {"type": "Split", "pattern": known_words, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [pad | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, split]},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }


def tokenizer_config() -> dict[str, object]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": PAD,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }


def manifest(tensors: Tensors, folder: Path) -> dict[str, object]:
    """Return manifest.json for the model's files in the folder."""
    files = sorted(path for path in folder.iterdir() if path.name not in ("manifest.json", "README.md"))
    return {
        "name": NAME,
        "source": f"{DOCUMENT}; the rest fitted by weights/make_cat_mouse.py",
        "licence": "Apache-2.0",
        "tensor_dtype": "F32",
        "num_parameters": sum(tensor.size for tensor in tensors.values()),
        "num_bytes": sum(path.stat().st_size for path in files),
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "tensors": {name: {"shape": list(t.shape), "made": origin(name)} for name, t in tensors.items()},
        "fitted_to": {" ".join(context): dict(words) for context, words in NEXT_WORD.items()},
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that a person can read."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_folder(folder: Path, tensors: Tensors) -> None:
    """Write the model as a Hugging Face folder, the manifest last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    write_json(folder / "config.json", config())
    write_json(folder / "generation_config.json", generation_config())
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "manifest.json", manifest(tensors, folder))


def main() -> None:
    """Fit the model and write its files."""
    parser = argparse.ArgumentParser(description="Make the bundled model cat-mouse.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to (default: the bundled one)")
    folder = parser.parse_args().output
    write_folder(folder, make_tensors(fit(make_examples())))
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
