"""Named sampling settings, one for each kind of task."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "code": {"temperature": 0.2, "top_p": 1.0, "top_k": 1},
        "maths": {"temperature": 0.1, "top_p": 1.0, "top_k": 1},
        "mail": {"temperature": 0.4, "top_p": 0.9, "top_k": 50},
        "qa": {"temperature": 0.6, "top_p": 0.9, "top_k": 40},
        "chat": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        "creative": {"temperature": 1.0, "top_p": 0.95, "top_k": 100},
        "brainstorming": {"temperature": 1.2, "top_p": 0.8, "top_k": 200},
        "role_play": {"temperature": 0.9, "top_p": 0.95, "top_k": 80},
    }
)
