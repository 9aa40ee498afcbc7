"""What a picture shows: the attributes, and nothing that a caption does not say."""

from __future__ import annotations

from dataclasses import dataclass

from m1clip.data.synthetic.kinds import KINDS
from m1clip.data.synthetic.palette import COLOURS, SKIES

COUNTS = (1, 2, 3, 4)
SIZES = ("small", "large")
POSITIONS = ("left", "right", "top", "bottom")
# two things always face each other, in reading order
AXES = (("left", "right"), ("top", "bottom"))
TIMES: tuple[str, ...] = tuple(SKIES)
COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)


@dataclass(frozen=True, slots=True)
class Thing:
    """One to four equal objects in one half of the picture."""

    kind: str
    colour: str
    count: int
    size: str
    position: str

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("colour", self.colour, COLOURS),
            ("count", self.count, COUNTS),
            ("size", self.size, SIZES),
            ("position", self.position, POSITIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, allowed))}")

    @property
    def category(self) -> str:
        """nature, animals, urban or food."""
        return KINDS[self.kind].category


@dataclass(frozen=True, slots=True)
class Scene:
    """One thing, or two that face each other (left and right, or top and bottom), at a time of day.

    Two things stand in reading order, so that equal facts are equal scenes.
    """

    things: tuple[Thing, ...]
    time: str

    def __post_init__(self) -> None:
        if self.time not in TIMES:
            raise ValueError(f"time {self.time!r} is not one of {', '.join(TIMES)}")
        if len(self.things) == 2:
            first, second = self.things
            if (first.position, second.position) not in AXES:
                raise ValueError("two things must stand at (left, right) or (top, bottom), in that order")
            if first.kind == second.kind or first.colour == second.colour:
                raise ValueError("two things must differ in kind and in colour")
        elif len(self.things) != 1:
            raise ValueError(f"a scene has one or two things, not {len(self.things)}")

    @property
    def category(self) -> str:
        """The category of the first thing, which the ground shows."""
        return self.things[0].category
