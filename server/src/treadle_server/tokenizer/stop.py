"""Stop strings, found across tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of the stop strings appears in it, however the text is cut into pieces.

    The match that ends first counts; of two that end together, the longer one. So the result never depends on how the
    text was split. Held back is only the longest end of the text that is a true start of some stop string.
    To ignore stop strings until a minimum of tokens, keep the text of those tokens out of the matcher: a match then
    lies wholly in the text after them.

    Args:
        stop: the stop strings, none of them empty.
        include_stop: leave the matched stop string at the end of the text.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        if not all(stop):
            raise ValueError(f"stop: expected strings of at least one character, got {list(stop)!r}")
        self.matched: str | None = None
        self._include_stop = include_stop
        self._root = self._node = _build_automaton(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; return what can go out. Once `matched` is set, nothing more does."""
        if self.matched is not None:
            return ""
        if not self._root.children:
            return text
        start = len(self._held)
        text = self._held + text
        for index in range(start, len(text)):
            self._node = self._node.step(text[index])
            if self._node.stop is not None:
                return self._finish(text[: index + 1], self._node.stop)
        keep = len(text) - self._node.depth
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the held text at the end of the stream: it was no stop string."""
        held, self._held = self._held, ""
        self._node = self._root
        return held

    def _finish(self, text: str, stop: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include_stop else text[: -len(stop)]


class _Node:
    """A start of some stop strings, and where to go on from it.

    Attributes:
        depth: its length in characters.
        stop: the longest stop string that ends here.
        fall: the node of its longest proper end that is also a start of a stop string; None for the root.
    """

    __slots__ = ("children", "depth", "fall", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.stop: str | None = None
        self.fall: _Node | None = None

    def step(self, char: str) -> _Node:
        """Return the node of the longest end of the text so far, `char` included."""
        node = self
        while char not in node.children:
            if node.fall is None:
                return node
            node = node.fall
        return node.children[char]


def _build_automaton(stop: Sequence[str]) -> _Node:
    """Return the root of the automaton (Aho and Corasick, 1975, "Efficient string matching")."""
    root = _Node(0)
    for string in stop:
        node = root
        for char in string:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.stop = string
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Give each node under the root its `fall`, shallow ones first."""
    queue = [root]
    for node in queue:
        for char, child in node.children.items():
            child.fall = node.fall.step(char) if node.fall else root
            child.stop = child.stop or child.fall.stop
            queue.append(child)
