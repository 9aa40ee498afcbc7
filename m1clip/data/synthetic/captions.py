"""The grammar: many captions that say everything a scene shows, and nothing else.

Captions use only a-z, space, comma and full stop. Those that fit a character tokenizer of 77 tokens come first.
"""

from __future__ import annotations

from m1clip.data.synthetic.scene import CAPTIONS, KINDS, Scene, Thing, generator

FITS = 75  # characters: 77 tokens without start and end

NUMBERS = {1: ("one", "a"), 2: ("two", "two"), 3: ("three", "three"), 4: ("four", "four")}
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
LONG_PLACES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
SHORT_PLACES = {"left": "left", "right": "right", "top": "above", "bottom": "below"}
LONG_TIMES = {"morning": "in the morning", "day": "by day", "evening": "in the evening", "night": "at night"}

ONE_THING = (
    "{a} {at} {when}",
    "{when}, {a} {at}",
    "{at} {a} {when}",
    "{when} {at}, {a}",
    "{a} {at}, {time}",
    "a picture of {a} {at} {when}",
    "{a_time} scene with {a} {at}",
    "{time}. {a} {at}.",
)

TWO_THINGS = (
    "{a} {left} and {b} {right} {when}",
    "{when}, {a} {left} and {b} {right}",
    "{b} {right} and {a} {left} {when}",
    "{a} {left}, {b} {right}, {time}",
    "{time}, {b} {right}, {a} {left}",
    "{time}. {a} {left}. {b} {right}.",
    "{a} {left} with {b} {right}, {time}",
    "{left} {a}, {right} {b}, {time}",
    "{time}, {left} {a}, {right} {b}",
    "{a} {at} and {b} {bt} {when}",
    "{when}, {a} {at} and {b} {bt}",
    "{a_time} scene with {a} {at} and {b} {bt}",
)


def _phrase(thing: Thing, style: int) -> str:
    noun = thing.kind if thing.count == 1 else KINDS[thing.kind].plural
    return f"{NUMBERS[thing.count][style]} {SIZE_WORDS[thing.size][style]} {thing.colour} {noun}"


def paraphrases(scene: Scene) -> tuple[str, ...]:
    """All captions of a scene. Caption i has the same wording for every scene with as many things."""
    first, last = scene.things[0], scene.things[-1]
    templates = ONE_THING if len(scene.things) == 1 else TWO_THINGS
    words = {
        "at": LONG_PLACES[first.position],
        "bt": LONG_PLACES[last.position],
        "left": SHORT_PLACES[first.position],
        "right": SHORT_PLACES[last.position],
        "time": scene.time,
        "a_time": f"an {scene.time}" if scene.time == "evening" else f"a {scene.time}",
        "when": LONG_TIMES[scene.time],
    }
    return tuple(
        template.format(a=_phrase(first, style), b=_phrase(last, style), **words)
        for style in (0, 1)
        for template in templates
    )


def captions(scene: Scene, count: int, seed: int) -> tuple[str, ...]:
    """`count` different captions, those of at most `FITS` characters first; fewer if there are no more."""
    choices = paraphrases(scene)
    order = generator(CAPTIONS, seed).permutation(len(choices)).tolist()
    return tuple(sorted((choices[i] for i in order), key=lambda text: len(text) > FITS)[:count])
