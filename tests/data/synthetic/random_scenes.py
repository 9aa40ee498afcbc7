"""Random scenes for the tests."""

from typing import Any

from hypothesis import strategies as st

from m1clip.data.synthetic.scene import AXES, VALUES, Scene, Thing


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Any scene, of any split or none."""

    def value(name: str) -> Any:
        return draw(st.sampled_from(VALUES[name]))

    def different(name: str) -> list[str]:
        return draw(
            st.lists(
                st.sampled_from(VALUES[name]),
                min_size=len(position_axes),
                max_size=len(position_axes),
                unique=True,
            )
        )

    position_axes = draw(st.sampled_from(AXES)) if draw(st.booleans()) else (value("position"),)
    things = zip(different("kind"), different("color"), position_axes, strict=True)
    return Scene(
        tuple(Thing(kind, color, value("count"), value("size"), at) for kind, color, at in things),
        value("time"),
    )


def is_valid(scene: Scene) -> bool:
    """Whether all values exist, and two things face each other and differ in kind and color."""
    values = [
        *((n, getattr(t, n)) for t in scene.things for n in VALUES if n != "time"),
        ("time", scene.time),
    ]
    if not all(value in VALUES[name] for name, value in values):
        return False
    if len(scene.things) == 1:
        return True
    a, b = scene.things
    return (a.position, b.position) in AXES and a.kind != b.kind and a.color != b.color
