"""Duplicates and near-duplicates in an index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from m1clip.data.lint import ImageFacts, near_duplicates


def look_groups(looks: Sequence[tuple[bytes, bytes]]) -> list[list[int]]:
    """Groups of images that look alike, from their (hash, thumbnail); each image is in one group, in order."""
    facts = [
        ImageFacts(look=look, thumb=thumb, contrast=float(np.frombuffer(thumb, np.uint8).std()))
        for look, thumb in looks
    ]
    leader, first = list(range(len(facts))), dict[tuple[bytes, bytes], int]()
    for place, look in enumerate(looks):  # equal ones also where they have too little contrast to be compared
        leader[place] = first.setdefault(look, place)
    for i, j in near_duplicates(facts):
        low, high = sorted((_find(leader, i), _find(leader, j)))
        leader[high] = low
    groups: dict[int, list[int]] = {}
    for place in range(len(facts)):
        groups.setdefault(_find(leader, place), []).append(place)
    return list(groups.values())


def _find(leader: list[int], place: int) -> int:
    while leader[place] != place:
        place = leader[place]
    return place
