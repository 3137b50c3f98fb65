"""The cat and the mouse of one story, and every form in which the patterns can name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stories.words import with_article

Forms = Mapping[str, str]  # the form's name in a pattern, "" for the plain one -> text
Pick = Callable[[str], str]  # a list's name -> one of its entries, patterns in it resolved
KINDS = ("cat", "mouse")

_PRONOUNS = {"female": ("she", "her", "her"), "male": ("he", "him", "his")}


def english_character(kind: str, *, named: bool, gender: str, pick: Pick) -> Forms:
    """Return the forms of an English character; unnamed ones are "the cat" or "the mouse", and called by their kind."""
    he, him, his = _PRONOUNS[gender]
    name = pick(f"{kind}_{gender}") if named else f"the {kind}"
    described = with_article(pick(f"{kind}_described"))
    own = {"kind": kind, "a": described, "trait": pick("trait"), "colour": pick(f"{kind}_colour")}
    return {"": name, "call": name if named else kind.capitalize(), "he": he, "him": him, "his": his} | own


def chinese_character(kind: str, *, named: bool, pick: Pick) -> Forms:
    """Return the forms of a Chinese character; the pronoun of an animal is 它, whoever it is."""
    species = pick(f"{kind}_kind")
    name = pick(f"{kind}_name") if named else species
    return {"": name, "call": name, "kind": species, "a": f"一只{pick(f'{kind}_described')}", "trait": pick("trait")}
