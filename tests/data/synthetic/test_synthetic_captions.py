"""A caption describes the complete scene, a negative differs from it in exactly the attributes it names."""

import re
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from random_scenes import is_valid, scenes

from m1clip.data.synthetic.captions import ATTRIBUTES, FITS, captions, negatives, paraphrases
from m1clip.data.synthetic.scene import COLORS, KINDS, VALUES, Scene, Thing
from m1clip.data.synthetic.source import sample_scenes

_NUMBERS = {"a": 1, "one": 1, "two": 2, "three": 3, "four": 4}
_SIZES = {"small": "small", "little": "small", "large": "large", "big": "large"}
_PLACES = {
    "left": "left",
    "right": "right",
    "top": "top",
    "above": "top",
    "bottom": "bottom",
    "below": "bottom",
}
_NOUNS = {(name, True): name for name in KINDS} | {
    (kind.plural, False): name for name, kind in KINDS.items()
}
_PHRASE = re.compile(
    rf"\b({'|'.join(_NUMBERS)}) ({'|'.join(_SIZES)}) ({'|'.join(COLORS)}) "
    rf"({'|'.join(sorted({noun for noun, _ in _NOUNS}, key=len, reverse=True))})\b"
)


def _parse(text: str) -> Scene:
    """Number, size, color and noun are adjacent; positions come in the order of the things."""
    phrases = _PHRASE.findall(text)
    rest = re.findall("[a-z]+", _PHRASE.sub(" ", text))
    positions = [_PLACES[word] for word in rest if word in _PLACES]
    (time,) = [word for word in rest if word in VALUES["time"]]
    things = [
        Thing(_NOUNS[noun, _NUMBERS[number] == 1], color, _NUMBERS[number], _SIZES[size], position)
        for (number, size, color, noun), position in zip(phrases, positions, strict=True)
    ]
    return Scene(
        tuple(sorted(things, key=lambda thing: VALUES["position"].index(thing.position))), time
    )


@given(scene=scenes())
@settings(max_examples=40)
def test_every_paraphrase_describes_the_complete_scene(scene: Scene) -> None:
    """The scene can be recovered from a caption, so two scenes never share one."""
    for text in paraphrases(scene):
        assert _parse(text) == scene


@given(scene=scenes(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_captions_use_only_allowed_characters(scene: Scene, seed: int) -> None:
    texts = captions(scene, 8, seed)
    assert len(set(texts)) == 8
    for text in texts:
        assert re.fullmatch(r"[a-z ,.]+", text)
        assert not re.search(r"  | [,.]|\ba [aeiou]|\ban [^aeiou]", text)
        assert len(text.split()) <= 24


def test_captions_that_fit_77_characters_come_first() -> None:
    sampled = sample_scenes("train", 1000, seed=3)
    texts = [text for number, scene in enumerate(sampled) for text in captions(scene, 5, number)]
    assert sum(len(text) <= FITS for text in texts) > 0.99 * len(texts)
    scene = next(scene for scene in sampled if len(scene.things) == 2)
    every = captions(scene, 1000, seed=0)
    assert set(every) == set(paraphrases(scene))
    assert [len(text) > FITS for text in every] == sorted(len(text) > FITS for text in every)
    assert captions(scene, 5, seed=1) == captions(scene, 5, seed=1)
    assert len({captions(scene, 5, seed) for seed in range(10)}) > 1


OF_THINGS = [name for name in ATTRIBUTES if name != "time"]


def _differences(one: Scene, other: Scene) -> list[set[str]]:
    """Names of the attributes that differ, for each way to match the things of both scenes."""
    time = {"time"} if one.time != other.time else set()
    return [
        time
        | {
            n
            for a, b in zip(one.things, order, strict=True)
            for n in OF_THINGS
            if getattr(a, n) != getattr(b, n)
        }
        for order in permutations(other.things)
    ]


@given(scene=scenes(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_negatives_change_exactly_the_named_attribute(scene: Scene, seed: int) -> None:
    hard_negatives = negatives(scene, seed)
    assert [negative.changed for negative in hard_negatives] == list(ATTRIBUTES)
    for negative in hard_negatives:
        assert is_valid(negative.scene)
        assert {negative.changed} in _differences(scene, negative.scene)
        assert negative.caption not in paraphrases(scene)
        assert negative.caption in paraphrases(negative.scene)
        assert negative.truth in paraphrases(scene)
        if negative.changed == "kind":
            assert sorted(t.category for t in negative.scene.things) == sorted(
                t.category for t in scene.things
            )


def test_negatives_change_either_thing_of_a_scene() -> None:
    scene = next(scene for scene in sample_scenes("val", 20, seed=0) if len(scene.things) == 2)
    changed = [
        n.scene for seed in range(40) for n in negatives(scene, seed) if n.changed == "color"
    ]
    assert {
        scene.things.index(t) for scene_ in changed for t in scene_.things if t in scene.things
    } == {0, 1}


def test_negative_captions_fit_and_depend_on_seed() -> None:
    sampled = sample_scenes("val", 200, seed=0)
    every = [n for seed, scene in enumerate(sampled) for n in negatives(scene, seed)]
    assert sum(len(n.caption) <= FITS for n in every) > 0.97 * len(every)
    assert negatives(sampled[0], 5) == negatives(sampled[0], 5)
    assert negatives(sampled[0], 5) != negatives(sampled[0], 6)
