"""Which answers of a vision model are captions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m1clip.data.captioning.answers import ANSWER_FAULTS, MAX_CHARACTERS, Repeats, check_answer
from m1clip.data.captioning.photos import PROMPT


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("A dog runs on a beach.", "A dog runs on a beach."),
        ('"A dog runs on a beach."', "A dog runs on a beach."),
        ("**Caption:** A dog runs on a beach.", "A dog runs on a beach."),
        ("Here is a short description of the photo: a dog on a beach", "a dog on a beach"),
        ("Sure! Here's a caption: two cats asleep", "two cats asleep"),
        ("The image shows a dog on a beach.", "A dog on a beach."),
        ("In this black photo, a dog sleeps.", "A dog sleeps."),
        ("<think>It may be a dog.\nOr not.</think>\nA dog on a beach.", "A dog on a beach."),
        ("```\nA dog on a beach.\n```", "A dog on a beach."),
        ("A dog\non a\x07 beach\u202e.", "A dog on a beach."),
        ("Zwei Hunde – am Strand, 1987.", "Zwei Hunde – am Strand, 1987."),
    ],
)
def test_caption_is_taken_out_of_the_answer(answer: str, caption: str) -> None:
    assert check_answer(answer, PROMPT) == (caption, None)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "empty"),
        (" \n\x00 ...", "empty"),
        ("<think>a dog, maybe", "empty"),
        ("I'm sorry, but I can't help with that.", "refusal"),
        ("I cannot see any image. Please upload the photo.", "refusal"),
        ("As an AI language model, I have no eyes.", "refusal"),
        ("<html><body>A dog on a beach</body></html>", "markup"),
        ('{"caption": "a dog on a beach"}', "markup"),
        ("dog", "too short"),
        ("this photo", "too short"),
        ("Describe this photo in one short sentence", "too short"),
        ("一只狗在海滩上奔跑。", "other script"),
        ("a word " * 100, "too long"),
    ],
)
def test_what_is_no_caption_is_named(answer: str, fault: str) -> None:
    assert check_answer(answer, PROMPT) == ("", fault)


def test_script_is_that_of_the_prompt() -> None:
    assert check_answer("一只狗在海滩上奔跑。", "用一句话描述这张照片").fault is None
    assert (
        check_answer("犬がビーチを走っている。", "この写真を一文で説明してください").fault is None
    )


def test_complete_sentences_of_a_long_answer_are_used() -> None:
    long = "A dog runs on a beach. " + "It is very happy about the waves and the sun. " * 20
    caption = check_answer(long, PROMPT).caption
    assert caption.startswith("A dog runs on a beach. It is")
    assert caption.endswith(".")
    assert len(caption) <= MAX_CHARACTERS
    assert check_answer("A dog runs. It is ha", PROMPT, is_cut_off=True).caption == "A dog runs."
    assert check_answer("A dog runs over", PROMPT, is_cut_off=True).fault == "cut off"


@given(st.text())
def test_any_answer_is_a_caption_on_one_line_or_has_a_fault(answer: str) -> None:
    caption, fault = check_answer(answer, PROMPT)
    assert (fault is None) == bool(caption)
    assert fault is None or fault in ANSWER_FAULTS
    assert caption.encode().decode().splitlines() in ([], [caption])


def test_caption_of_many_photos_is_repeated() -> None:
    repeats = Repeats()
    for number in range(100):
        repeats.add(f"photo number {number}")
    for _ in range(5):
        repeats.add("A dog.")
    assert not repeats.is_repeated("a dog")
    repeats.add("a DOG!")
    assert repeats.is_repeated("a dog")
    assert repeats.most_common() == (6, 106)
