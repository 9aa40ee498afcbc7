"""The splits of a run, which its evaluations and the runs that start from it keep.

When a folder grows, the split of an image can change: small data is divided into exact numbers, and
class folders into exact fractions of each class. Without a record, an image that a model was
trained on could become one of its test images.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from m1clip.config import load_config
from m1clip.data.sources.base import DataSource, MixedSource
from m1clip.data.types import SPLITS, Sample, Source
from m1clip.errors import UserError
from m1clip.io import SPLITS_FILE, read_small, write_text

SPLITS_FORMAT = 1
MAX_RECORDED = 1_000_000  # images; in larger folders, a hash alone chooses the split
MAX_RECORD_BYTES = 64 * 2**20
Record = dict[str, str]  # hash of the id of an image -> its split


def write_splits(folder: Path, source: Source) -> None:
    """Record the split of each image of a run, unless its images are synthetic or streamed."""
    samples_of = {split: source.samples(split) for split in source.splits() if split in SPLITS}
    if not _has_record(source) or sum(map(len, samples_of.values())) > MAX_RECORDED:
        return
    hashes = {split: [_id_hash(s.id) for s in samples] for split, samples in samples_of.items()}
    write_text(folder / SPLITS_FILE, json.dumps({"format": SPLITS_FORMAT, "images": hashes}))


def read_splits(folder: Path) -> Record:
    """The split of each image of a run; empty if it has no record."""
    path = folder / SPLITS_FILE
    try:
        images = json.loads(read_small(path, MAX_RECORD_BYTES))["images"]
        return {str(key): split for split in SPLITS for key in images.get(split, ())}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{path}: damaged; if you delete it, images that the run was trained on may be"
            " evaluated"
        ) from None


def keep_splits(source: Source, record: Record) -> Counter[str]:
    """Give each recorded image the split that it had; new ones stay where the data has them.

    Returns how many images were taken out of each split.
    """
    if not record or not _has_record(source):
        return Counter()
    removed: Counter[str] = Counter()
    moved: dict[str, list[Sample]] = {}
    for split in [name for name in source.splits() if name in SPLITS]:
        staying: list[Sample] = []
        for sample in source.samples(split):
            recorded = record.get(_id_hash(sample.id), split)
            (staying if recorded == split else moved.setdefault(recorded, [])).append(sample)
        removed[split] = len(source.samples(split)) - len(staying)
        source.by_split[split] = staying
    for split, samples in moved.items():
        source.by_split[split] = [*source.by_split.get(split, []), *samples]
    source.by_split = {split: samples for split, samples in source.by_split.items() if samples}
    return +removed


def run_of(model: str | Path) -> Path | None:
    """The run that a path names, or that has the model folder which it names."""
    path = Path(model)
    folders = (path, path.parent) if path.is_dir() else (path,)  # a name is in no folder
    return next((folder for folder in folders if (folder / "config.toml").is_file()), None)


def recorded_splits(model: str | Path, names: Sequence[str]) -> Record:
    """The split of each image of the run that a model is of; empty if it had other data."""
    run = run_of(model)
    if run is None:
        return {}
    trained_on = load_config(run / "config.toml").data.source
    is_same = list(map(os.path.abspath, names)) == list(map(os.path.abspath, trained_on))
    return read_splits(run) if is_same else {}


def _has_record(source: Source) -> bool:
    return isinstance(source, DataSource | MixedSource)


def _id_hash(id_: str) -> str:
    """Names of files are not part of the record, which may be published with a run."""
    return blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
