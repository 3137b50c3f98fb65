"""The stories that the bundled model learned from: what every one of them keeps to."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
from stories.corpus import held_out_stories, training_stories
from stories.grammar import load_grammar, parse_grammar
from stories.teller import LANGUAGES, tell
from stories.tokenizer import BEGIN_ID, END_ID, train_tokenizer
from stories.words import capitalised, with_article, without_measure

NUM_STORIES = 3000
SLOT = re.compile(r"\{~?([A-Za-z_]+)\d?(?:\.[a-z]+)?\}")
CAST = {"hero", "pal", "cat", "mouse"}
OPENINGS = {
    "english": ["The cat", "The mouse", "A cat", "A mouse", "Once upon a time", "One day", "My cat", "I ", "There was"],
    "chinese": ["小猫", "猫", "老鼠", "小老鼠", "从前", "有一天", "很久以前", "我", "一只"],
}
ATTRIBUTION = r"(he|she|it|they) |(said|answered|replied|cried|called|asked) |the (cat|mouse) "
HE = re.compile(r"\b(he|him|his|himself)\b", re.IGNORECASE)
SHE = re.compile(r"\b(she|her|hers|herself)\b", re.IGNORECASE)


@functools.cache
def stories(language: str, seed: int = 7) -> list[str]:
    """Return stories of one language."""
    return list(itertools.islice(tell(language, seed), NUM_STORIES))


def patterns(language: str) -> list[str]:
    """Return every pattern of a grammar, those of its lists included."""
    grammar = load_grammar(language)
    beats = [pattern for plot in grammar.plots for beat in plot.beats for pattern in beat]
    return [*itertools.chain.from_iterable(grammar.lists.values()), *beats]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_seed_tells_the_same_stories(language: str) -> None:
    """One seed, one sequence of stories; another seed, another one."""
    first, again, other = (list(itertools.islice(tell(language, seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize("language", LANGUAGES)
def test_stories_differ(language: str) -> None:
    """Hardly any story is told twice."""
    assert len(set(stories(language))) > 0.999 * NUM_STORIES


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_of_a_pattern_is_left(language: str) -> None:
    """No braces, brackets, bars or double spaces, and no character of the other language."""
    foreign = "[一-鿿，。“”]" if language == "english" else "[A-Za-z .,\"!?']"
    for story in stories(language):
        assert not re.search(r"[{}\[\]|~/_@]|  |^ | $|" + foreign, story), story


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_slot_has_a_list(language: str) -> None:
    """Each slot of each pattern names the cast or a list, and each list has a pattern or a character that uses it."""
    used = {name.lower() for pattern in patterns(language) for name in SLOT.findall(pattern)}
    assert used - {"trait", "colour"} <= CAST | load_grammar(language).lists.keys()
    characters = {name for name in load_grammar(language).lists if name.startswith(("cat_", "mouse_"))}
    structure = {"trait", "opening_named", "opening_plain", "closing", "moral"} | characters
    assert load_grammar(language).lists.keys() - used == structure - used


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_grammar_is_rich(language: str) -> None:
    """Twenty plots and more, hundreds of sentence patterns, and nearly as many words."""
    grammar = load_grammar(language)
    assert len(grammar.plots) >= 20
    assert sum(len(beat) for plot in grammar.plots for beat in plot.beats) >= 300
    assert sum(map(len, grammar.lists.values())) >= 250
    assert all(len(set(beat)) == len(beat) >= 2 for plot in grammar.plots for beat in plot.beats)


@pytest.mark.parametrize("language", LANGUAGES)
def test_stories_begin_in_many_ways(language: str) -> None:
    """What people type first is how some of the stories begin, and no beginning is all of them."""
    told = stories(language)
    for opening in OPENINGS[language]:
        assert sum(story.startswith(opening) for story in told) >= 0.004 * NUM_STORIES, opening
    assert len({story[:12] for story in told}) > 100


def test_english_articles() -> None:
    """A before consonants, an before vowels: the lists hold no word that sounds otherwise."""
    for story in stories("english"):
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", story), story


def test_english_sentences_begin_with_a_capital_and_end_with_a_mark() -> None:
    """After a full stop, question or exclamation mark comes a capital, inside quotation marks and outside."""
    for story in stories("english"):
        assert re.match(r"[A-Z\"]", story), story
        assert re.search(r"[.!?]\"?$", story), story
        assert not re.search(r"[.!?] [a-z]|[^,] \"[a-z]", story), story
        assert not re.search(r"[.]\" (?!" + ATTRIBUTION + r")[a-z]", story), story


def names_in(story: str, gender: str) -> set[str]:
    """Return the names of one gender that an English story has."""
    lists = load_grammar("english").lists
    names = [name for kind in ("cat", "mouse") for name in lists[f"{kind}_{gender}"]]
    return {name for name in names if re.search(rf"\b{name}\b", story)}


def test_english_pronouns_agree() -> None:
    """Where the only name is a woman's, nobody is he; where it is a man's, nobody is she."""
    seen = {"he": 0, "she": 0}
    for story in stories("english"):
        women, men = names_in(story, "female"), names_in(story, "male")
        if women and not men:
            assert not HE.search(story), story
            seen["she"] += 1
        if men and not women:
            assert not SHE.search(story), story
            seen["he"] += 1
    assert min(seen.values()) > 20


def test_english_pronouns_tell_who_is_meant() -> None:
    """Of two with names one is she and the other he; of two without, the mouse is she and the cat he."""
    for story in stories("english"):
        assert len(names_in(story, "female")) <= 1, story
        assert len(names_in(story, "male")) <= 1, story
    alone = re.compile(r"There was once a (cat|mouse) who .*?\. (His|Her) friend")
    found = {match.groups() for story in stories("english") if (match := alone.match(story))}
    assert found == {("cat", "His"), ("mouse", "Her")}


def test_a_name_has_one_gender_and_one_kind() -> None:
    """No name is in two lists, and none is a word of a story: agreement could not be learned."""
    for language, endings in (("english", ("_female", "_male")), ("chinese", ("_name",))):
        lists = load_grammar(language).lists
        names = [name for key, values in lists.items() if key.endswith(endings) for name in values]
        assert len(names) == len(set(names)) >= 24
        words = [word for key, values in lists.items() if not key.endswith(endings) for word in values]
        assert [name for name in names if any(name in word for word in words)] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_quotation_marks_pair(language: str) -> None:
    """What is opened is closed, in turn."""
    for story in stories(language):
        marks = re.findall('[“”"]', story)
        assert marks == (["“", "”"] if language == "chinese" else ['"', '"']) * (len(marks) // 2), story


def test_chinese_pronouns_are_those_of_animals() -> None:
    """它 and 它们, never 他 or 她; sentences end with a full stop or a mark."""
    for story in stories("chinese"):
        assert not set("他她") & set(story.replace("吉他", "")), story
        assert re.search(r"[。！？]”?$", story), story
        assert not re.search(r"[，。！？：]{2}|一[个只条]一", story), story


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_story_says_who_acts_in_it(language: str) -> None:
    """Each names its cat or its mouse, by kind or by name, and is a few sentences long."""
    for story in stories(language):
        assert re.search("cat|mouse|[Cc]ats" if language == "english" else "猫|鼠", story), story
        assert 3 <= len(re.findall("[.!?。！？]", story)) <= 40, story


def test_words() -> None:
    """Articles by sound, capitals that leave the rest alone, Chinese nouns without number and measure word."""
    assert [with_article(noun) for noun in ("owl", "red ball")] == ["an owl", "a red ball"]
    assert capitalised("on a Farm") == "On a Farm"
    assert [without_measure(noun) for noun in ("一个红皮球", "一小块面包", "草莓")] == ["红皮球", "面包", "草莓"]


def test_a_line_outside_lists_and_beats_is_refused() -> None:
    """The message has the line's number and text."""
    with pytest.raises(ValueError, match="line 2: stands in no list and no beat: lonely"):
        parse_grammar("# a comment\nlonely\n")


def test_grammar_format() -> None:
    """Lists, plots with a style, beats; lines of a list may hold several entries."""
    grammar = parse_grammar("@toy\nball / kite\ndrum\n\n== play named\n--\nA.\nB.\n--\nC.\n")
    assert grammar.lists == {"toy": ("ball", "kite", "drum")}
    (plot,) = grammar.plots
    assert (plot.name, plot.style, plot.beats) == ("play", "named", (("A.", "B."), ("C.",)))


def test_held_out_stories_are_not_trained_on() -> None:
    """Another seed, and what both seeds tell is left out."""
    seen = set(itertools.islice(training_stories(), 2000))
    for language in LANGUAGES:
        held_out = held_out_stories(language, 100, num_training=2000)
        assert len(held_out) == 100
        assert not seen & set(held_out)


def test_training_stories_take_turns() -> None:
    """Of each five, three are English."""
    told = list(itertools.islice(training_stories(), 40))
    assert [story.isascii() for story in told] == [True, False, True, False, True] * 8


def test_tokenizer_gives_back_every_text() -> None:
    """Whatever the text, ids decode to it; each begins with BEGIN, and each Chinese character ends a token."""
    tokenizer = train_tokenizer(itertools.islice(training_stories(), 400), 1200)
    assert (tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")) == (BEGIN_ID, END_ID)
    for text in ("The cat", "小猫和老鼠", " 12 dinosaurs,\n\tñandú 龘🐈!", ""):
        ids = tokenizer.encode(text).ids
        assert ids[0] == BEGIN_ID
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("小猫住在").ids[: len(tokenizer.encode("小猫").ids)] == tokenizer.encode("小猫").ids
