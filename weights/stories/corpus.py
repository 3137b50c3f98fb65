"""The corpus: stories of both languages, and the held-out ones that a model never saw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from stories.teller import LANGUAGES, tell

TRAINING_SEED = 0
HELD_OUT_SEED = 1
TURNS = ("english", "chinese", "english", "chinese", "english")  # whose story is next: English is the harder one


def training_stories() -> Iterator[str]:
    """Yield the stories to train on, without end, the languages taking their TURNS."""
    tellers = {language: tell(language, TRAINING_SEED) for language in LANGUAGES}
    return (next(tellers[language]) for language in itertools.cycle(TURNS))


def held_out_stories(language: str, num_stories: int, *, num_training: int) -> list[str]:
    """Return stories of another seed, without those that are among the first `num_training` training stories."""
    seen = set(itertools.islice(training_stories(), num_training))
    fresh = (story for story in tell(language, HELD_OUT_SEED) if story not in seen)
    return list(itertools.islice(fresh, num_stories))
