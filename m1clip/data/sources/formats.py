"""The data formats, and which of them the data at a path has."""

from collections.abc import Sequence
from pathlib import Path

from m1clip.data.sources import splits
from m1clip.data.sources.base import DataFormat, DataPath, Options, user_error, walk_images
from m1clip.data.sources.folders import CLASS_FOLDERS, FILE_NAMES, TEXT_FILES, has_words_as_names
from m1clip.data.sources.hugging_face import HUGGING_FACE
from m1clip.data.sources.metadata import METADATA
from m1clip.data.sources.no_captions import no_captions
from m1clip.data.sources.plain_text import binary_kind, check_is_text, spreadsheets
from m1clip.data.sources.stream import WEBDATASET
from m1clip.data.sources.tables import (
    NO_CAPTIONS_IN_JSON,
    TABLE_FORMATS,
    explain_columns,
    text_tables,
    without_captions,
)
from m1clip.errors import UserError

# One entry per format; its module has its name, help, detection and reader. They are tried in this
# order, and the first that matches is used.
FORMATS: dict[str, DataFormat] = {
    data_format.name: data_format
    for data_format in (
        HUGGING_FACE,  # has a file that no other format has
        WEBDATASET,  # before tables: img2dataset writes a table next to each shard
        *TABLE_FORMATS,
        TEXT_FILES,  # after tables: a table next to images with .txt files is made on purpose
        CLASS_FOLDERS,  # after a check for a folder of datasets; see DataFormat.class_captions
        METADATA,  # after class folders: most photos in them have some metadata too
        FILE_NAMES,  # only if named
    )
}
FOLDERS_CHECKED = 100  # a folder of datasets has few, one of classes may have thousands


def detect_format(data: DataPath) -> DataFormat:
    """Return the format of the data at a path; UserError if there is none."""
    if data_format := _first_match(data):
        return data_format
    path = data.path
    if not path.exists():
        is_hub_name = str(path).count("/") == 1 and not str(path).startswith((".", "/"))
        hint = f"; for a dataset on the Hugging Face hub, use hf:{path}" if is_hub_name else ""
        raise user_error(f"{path}: no such file or folder{hint}")
    if datasets := _datasets_below(path, data.options):
        how = " ".join(f"--data {folder}" for folder in datasets[:2])
        raise user_error(
            f"{path}: a folder of datasets ({_listing(datasets)}); choose the ones to train on, "
            f"as in {how}, or classes:{path} if its folders are classes"
        )
    if data_format := _first_match(data, class_captions=True):
        return data_format
    if data_format := _first_match(data, after_classes=True):
        return data_format
    raise _unknown_format(path, data.options)


def _first_match(
    data: DataPath, *, class_captions: bool = False, after_classes: bool = False
) -> DataFormat | None:
    """Return the first format that matches, of those that are tried at the same stage."""
    stage = (class_captions, after_classes)
    for data_format in FORMATS.values():
        if (data_format.class_captions, data_format.after_classes) != stage:
            continue
        if data_format.matches is not None and data_format.matches(data):
            return data_format
    return None


def _datasets_below(path: Path, options: Options) -> list[Path]:
    """Return the folders in a folder that are datasets themselves: with captions, or with
    splits.
    """
    folders = [folder for folder in sorted(path.glob("*")) if folder.is_dir()]
    visible = [folder for folder in folders if not folder.name.startswith(".")]
    return [
        folder
        for folder in visible[:FOLDERS_CHECKED]
        if not splits.from_folder(folder.name)
        and (
            _first_match(DataPath(folder, options))
            or any(splits.from_folder(part.name) and part.is_dir() for part in folder.iterdir())
        )
    ]


def _unknown_format(path: Path, options: Options) -> UserError:
    """Return the error that explains what was found at a path, and what to do."""
    if path.is_file():
        check_is_text(path)
    elif error := _unclear_folder(path, options):
        return error
    elif all(entry.name.startswith(".") for entry in path.iterdir()):
        return user_error(f"{path}: the folder is empty: it has no images and no captions")
    names = ", ".join(FORMATS)
    return user_error(f"{path}: unknown format; specify it, as in csv:PATH (formats: {names})")


def _unclear_folder(path: Path, options: Options) -> UserError | None:
    """Return the error for a folder with tables of unknown columns, or with images alone."""
    tables = text_tables(path)
    if len(tables) == 1:
        explain_columns(tables[0], options)
    if tables:
        contents = f"{len(tables)} tables ({_listing(tables)})"
        return user_error(
            f"{path}: contains {contents}; choose the one with captions: --data {tables[0]}"
        )
    if next(walk_images(path), None) is None:
        return None
    if files := without_captions(path):
        return user_error(f"{files[0]}: {NO_CAPTIONS_IN_JSON}")
    if workbooks := spreadsheets(path):
        contents = f"images, but no table of captions that m1clip reads; {workbooks[0].name} is "
        return user_error(f"{path}: {contents}{binary_kind(workbooks[0])}")
    return no_captions(path, metadata=True, file_names=has_words_as_names(path))


def _listing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths[:5]) + (", ..." if len(paths) > 5 else "")
