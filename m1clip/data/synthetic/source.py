"""The synthetic set as a source of pairs: nothing on disk, pictures drawn when opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from m1clip.data.pair import Pair
from m1clip.data.synthetic.captions import captions
from m1clip.data.synthetic.draw import VERSION, check_size, draw
from m1clip.data.synthetic.randomness import PICTURE, derive
from m1clip.data.synthetic.sample import SPLITS, sample_scenes
from m1clip.data.synthetic.scene import Scene
from m1clip.errors import UserError


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """A picture not yet drawn."""

    scene: Scene
    size: int
    seed: int
    name: str

    def open(self, want: int | None = None) -> Image.Image:
        """Draw it; `want` changes nothing, because a drawn picture has no cheaper small form."""
        return Image.fromarray(draw(self.scene, self.size, self.seed))

    def stamp(self) -> str:
        """All that decides the pixels: the generator's version, the attributes, the size, the seed."""
        things = ";".join(f"{t.kind},{t.colour},{t.count},{t.size},{t.position}" for t in self.scene.things)
        return f"synthetic-{VERSION}|{things}|{self.scene.time}|{self.size}|{self.seed}"

    def __str__(self) -> str:
        return f"synthetic picture {self.name}"


class SyntheticSource:
    """Drawn scenes with captions; val and test show pairs of kind and colour that train never does."""

    def __init__(
        self,
        image_size: int,
        train: int = 8000,
        val: int = 500,
        test: int = 500,
        seed: int = 0,
        captions_per_image: int = 5,
        two_share: float = 0.5,
    ) -> None:
        check_size(image_size)
        if seed < 0:
            raise UserError(f"a seed is a whole number from 0 up, not {seed}")
        if captions_per_image < 1:
            raise UserError(f"a picture needs at least one caption, not {captions_per_image}")
        self.image_size = image_size
        self.seed = seed
        self.captions_per_image = captions_per_image
        self._scenes = {
            split: sample_scenes(split, count, seed, two_share)
            for split, count in zip(SPLITS, (train, val, test), strict=True)
        }
        self._pairs: dict[str, list[Pair]] = {}

    def splits(self) -> tuple[str, ...]:
        """The splits that hold a pair."""
        return tuple(split for split in SPLITS if self._scenes[split])

    def pairs(self, split: str) -> Sequence[Pair]:
        """All pairs of a split; made once, then the same list."""
        if split not in self._scenes:
            raise UserError(f"the synthetic set has no split {split!r}; it has {', '.join(SPLITS)}")
        if split not in self._pairs:
            self._pairs[split] = [self._pair(split, i, s) for i, s in enumerate(self._scenes[split])]
        return self._pairs[split]

    def scene_of(self, pair_id: str) -> Scene:
        """The attributes behind a pair's id."""
        split, _, number = pair_id.rpartition("-")
        try:
            return self._scenes[split][int(number)]
        except (KeyError, ValueError, IndexError):
            raise UserError(f"the synthetic set has no pair {pair_id!r}") from None

    def _pair(self, split: str, index: int, scene: Scene) -> Pair:
        name = f"{split}-{index:06d}"
        seed = derive(PICTURE, self.seed, SPLITS.index(split), index)
        image = SyntheticImage(scene, self.image_size, seed, name)
        return Pair(image, captions(scene, self.captions_per_image, seed), name)
