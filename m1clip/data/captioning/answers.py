"""What a vision model answered: the caption in it, or why it is not one."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from m1clip.data.sources.splits import clean_text

# Why an answer is not used.
AnswerFault = Literal[
    "empty", "refusal", "markup", "too short", "too long", "cut off", "other script", "repeated"
]
ANSWER_FAULTS: tuple[AnswerFault, ...] = get_args(AnswerFault)

MIN_WORDS = 2
MAX_CHARACTERS = 300  # about 70 tokens: text towers read at most 77
MAX_ANSWER = 20_000  # characters that are looked at
MIN_LETTERS = 0.6  # of the letters of a caption that must be in the script of the prompt
# A caption of more photos than this, and of more than this fraction, describes none of them.
MAX_REPEATS = 5
MAX_REPEATED_FRACTION = 0.02

_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"^```\w*\s*(.*?)\s*```$", re.DOTALL)
_MARKUP = re.compile(r"</?[a-z!][^<>]*>|&(?:lt|gt|amp|quot|nbsp);|```|\{\s*\"", re.IGNORECASE)
_LABEL = re.compile(
    r"^(?:(?:sure|certainly|of course)[,!.]?\s*)?"
    r"(?:here(?:'s| is) (?:a|the|one|my|your)[^:.]{0,60}:|(?:alt[ -]?text|caption|description)\s*:)"
    r"\s*",
    re.IGNORECASE,
)
# "The image shows a dog" begins like every other answer of the same model: "a dog" says as much.
_LEAD = re.compile(
    r"^(?:in )?(?:the|this)(?: \w+)? (?:image|photo|photograph|picture|scene)"
    r"(?: (?:shows|depicts|features|captures|displays|presents|portrays|contains)| is of|,)\s+",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am) (?:sorry|unable|not able)|i (?:can(?:'|no)t|cannot|do not|don't) "
    r"(?:see|view|process|assist|help|describe|identify|access|provide|have)|as an ai\b|"
    r"(?:no|without an?) image (?:was |is )?(?:provided|attached|available|visible)|"
    r"(?:please )?(?:provide|upload|attach|share) (?:an?|the|your) (?:image|photo|picture)|"
    r"(?:cannot|can't|unable to) (?:see|view|process|describe|assist|help)|language model)",
    re.IGNORECASE,
)
_QUOTES = "\"'`“”‘’«»„*_ "
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)")
_EAST_ASIAN = {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "KATAKANA-HIRAGANA"}
_NO_WORD = re.compile(r"[\W_]+")


class Answer(NamedTuple):
    """A caption; or "" and the reason why the answer is not used."""

    caption: str
    fault: AnswerFault | None


def check_answer(text: str, prompt: str, is_cut_off: bool = False) -> Answer:
    """Return the caption in a model's answer, or what is wrong with it.

    Reasoning, quotes, Markdown and phrases such as "The image shows" are removed.
    """
    text = _THINKING.sub(" ", text[:MAX_ANSWER].replace("’", "'")).strip()
    if fenced := _FENCE.match(text):
        text = fenced[1]
    text = _printable(text)
    if not any(char.isalpha() for char in text):
        return Answer("", "empty")
    if _REFUSAL.search(text):
        return Answer("", "refusal")
    text = _LABEL.sub("", text.strip(_QUOTES)).strip(_QUOTES)
    if _MARKUP.search(text):
        return Answer("", "markup")
    caption = _without_lead(text)
    if is_cut_off or len(caption) > MAX_CHARACTERS:
        caption = _complete_sentences(caption)
        if not caption:
            return Answer("", "cut off" if is_cut_off else "too long")
    if _is_too_short(caption) or _key(caption) in _key(prompt):
        return Answer("", "too short")
    if not _has_script_of(caption, prompt):
        return Answer("", "other script")
    return Answer(caption, None)


def _printable(text: str) -> str:
    """Remove control and invisible characters, and extra spaces."""
    printable = (
        " " if unicodedata.category(char) == "Cc" else char
        for char in text
        if unicodedata.category(char) not in ("Cf", "Co", "Cn", "Cs")
    )
    return clean_text("".join(printable))


def _without_lead(text: str) -> str:
    rest = _LEAD.sub("", text)
    return rest[:1].upper() + rest[1:] if rest != text and text[:1].isupper() else rest


def _complete_sentences(text: str) -> str:
    """Return as many complete sentences as fit; "" if the first does not."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text[: MAX_CHARACTERS + 1])]
    return text[: ends[-1]] if ends else ""


def _is_too_short(caption: str) -> bool:
    # Scripts such as Chinese have no spaces between words.
    letters = sum(char.isalpha() for char in caption)
    has_words = len(caption.split()) >= MIN_WORDS or not caption.isascii()
    return letters < 2 * MIN_WORDS or not has_words


def _has_script_of(caption: str, prompt: str) -> bool:
    """Whether most letters of a caption are in the script of most letters of the prompt."""
    scripts = _scripts(caption)
    expected = _scripts(prompt)
    if not expected:
        return True
    most_common = expected.most_common(1)[0][0]
    return scripts[most_common] >= MIN_LETTERS * scripts.total()


def _scripts(text: str) -> Counter[str]:
    """Count letters by script, which is the first word of a letter's name, such as LATIN."""
    first_words = (unicodedata.name(char, "").partition(" ")[0] for char in text if char.isalpha())
    # Japanese mixes three scripts.
    return Counter("CJK" if word in _EAST_ASIAN else word for word in first_words)


def _key(caption: str) -> str:
    """Equal for captions that differ in case and punctuation alone."""
    return _NO_WORD.sub(" ", caption).strip().casefold()


@dataclass
class Repeats:
    """Counts captions, to find those that a model gives to many photos."""

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, caption: str) -> None:
        """Count the caption of one more photo."""
        self._counts[_key(caption)] += 1

    def is_repeated(self, caption: str) -> bool:
        """Whether a caption is that of too many photos to describe any of them."""
        limit = max(MAX_REPEATS, MAX_REPEATED_FRACTION * self._counts.total())
        return self._counts[_key(caption)] > limit

    def most_common(self) -> tuple[int, int]:
        """Return how many photos have the most frequent caption, and how many have any."""
        repeated = self._counts.most_common(1)
        return (repeated[0][1] if repeated else 0), self._counts.total()
