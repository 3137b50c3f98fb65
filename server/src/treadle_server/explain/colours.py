"""One scale of colours for shares between 0 and 1: white over blue to a dark blue, told apart by everyone's eyes."""

from __future__ import annotations

_STOPS = ((247, 251, 255), (158, 202, 225), (49, 130, 189), (8, 48, 107))  # "Blues" of ColorBrewer 2.0, every third
_WHITE_TEXT_FROM = 0.55


def rgb(share: float) -> tuple[int, int, int]:
    """Return the colour of a share, a straight line between the stops; shares outside [0, 1] take the nearest end."""
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    index = min(int(place), len(_STOPS) - 2)
    part = place - index
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(_STOPS[index], _STOPS[index + 1], strict=True))
    return red, green, blue


def text_is_white(share: float) -> bool:
    """Whether white text reads better than black on a share's colour."""
    return share >= _WHITE_TEXT_FROM
