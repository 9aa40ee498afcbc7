"""Duplicates and near-duplicates in an index."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from m1clip.data.looks import near_duplicates


def look_groups(looks: Sequence[tuple[bytes, bytes]]) -> list[list[int]]:
    """Groups of images that look alike, from their (hash, thumbnail); each image is in one group, in order."""
    leader, first = list(range(len(looks))), dict[tuple[bytes, bytes], int]()
    for place, look in enumerate(looks):  # equal ones also where they have too little contrast to be compared
        leader[place] = first.setdefault(look, place)
    for i, j in near_duplicates(looks):
        low, high = sorted((_find(leader, i), _find(leader, j)))
        leader[high] = low
    groups: dict[int, list[int]] = {}
    for place in range(len(looks)):
        groups.setdefault(_find(leader, place), []).append(place)
    return list(groups.values())


def _find(leader: list[int], place: int) -> int:
    while leader[place] != place:
        place = leader[place]
    return place


@dataclass(frozen=True)
class Copy:
    """One image of a group of duplicates."""

    id: int  # of the file
    path: str  # relative to the folder of photos
    width: int
    height: int
    bytes: int
    equal: bool  # the same content as the best, byte for byte


def duplicates(db: sqlite3.Connection) -> list[list[Copy]]:
    """Groups of equal and near-equal images: the best of each first, the group with the most bytes to save first.

    The best has the most pixels, then the most bytes, then the shortest path.
    """
    files = db.execute(
        "SELECT files.id, path, width, height, bytes, sha256, look, thumb "
        "FROM files JOIN images ON images.id = image ORDER BY path"
    ).fetchall()
    groups = []
    for members in look_groups([file[-2:] for file in files]):
        ranked = sorted((files[at] for at in members), key=lambda file: (-file[2] * file[3], -file[4], len(file[1])))
        best = ranked[0][5]
        groups.append([Copy(f[0], os.fsdecode(f[1]), f[2], f[3], f[4], f[5] == best) for f in ranked])
    return sorted((g for g in groups if len(g) > 1), key=lambda g: -sum(copy.bytes for copy in g[1:]))
