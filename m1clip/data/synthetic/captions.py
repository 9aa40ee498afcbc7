"""Captions that say everything a scene shows and nothing else, in many wordings.

They use only a-z, space, comma and full stop. Those that fit a character tokenizer of 77 tokens come first.
"""

from __future__ import annotations

from m1clip.data.synthetic.scene import CAPTIONS, KINDS, TABLES, Scene, Thing, generator

FITS = 75  # characters: 77 tokens without start and end


def _phrase(thing: Thing, style: int) -> str:
    words = TABLES["words"]
    noun = thing.kind if thing.count == 1 else KINDS[thing.kind].plural
    return f"{words['counts'][thing.count - 1][style]} {words['sizes'][thing.size][style]} {thing.color} {noun}"


def paraphrases(scene: Scene) -> tuple[str, ...]:
    """All captions of a scene. Caption i has the same wording for every scene with as many things."""
    first, last, time = scene.things[0], scene.things[-1], scene.time
    (at, left), (bt, right) = TABLES["positions"][first.position], TABLES["positions"][last.position]
    a_time = f"an {time}" if time == "evening" else f"a {time}"
    words = {"at": at, "bt": bt, "left": left, "right": right, "time": time, "a_time": a_time}
    return tuple(
        template.format(a=_phrase(first, style), b=_phrase(last, style), when=TABLES["times"][time]["when"], **words)
        for style in (0, 1)
        for template in TABLES["templates"]["one" if len(scene.things) == 1 else "two"]
    )


def captions(scene: Scene, count: int, seed: int) -> tuple[str, ...]:
    """`count` different captions, those of at most `FITS` characters first; fewer if there are no more."""
    choices = paraphrases(scene)
    order = generator(CAPTIONS, seed).permutation(len(choices)).tolist()
    return tuple(sorted((choices[i] for i in order), key=lambda text: len(text) > FITS)[:count])
