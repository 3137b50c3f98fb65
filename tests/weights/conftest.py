"""Lets tests import `stories`, which lies beside the scripts of `weights/` and belongs to no distribution."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "weights"))
