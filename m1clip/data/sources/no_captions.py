"""The error for images without captions, which lists the ways to get some."""

import shlex
from pathlib import Path

from m1clip.data.sources.base import user_error
from m1clip.errors import UserError
from m1clip.formatting import one_line

LABEL_OR_ASK = """
  label some, then Train      m1clip index {path}
                              m1clip serve {path}
                              (page Label: a key or a few words for each photo; 30 are enough to begin)
  ask a vision model          m1clip data caption {path}
                              (of Ollama, LM Studio or llama.cpp, on your computer)"""
READ_METADATA = """
  use what is in the photos   m1clip train metadata:{path}
                              (XMP, IPTC, EXIF, sidecars, and JSON of Google Takeout and osxphotos;
                              m1clip data lint metadata:{path} counts them)"""
WRITE_OR_SORT = """
  write a table               m1clip data template {path}
                              (makes captions.csv, to fill in)
  sort them                   one folder for each class"""
USE_FILE_NAMES = """
  use the file names          m1clip train filenames:{path}"""


def no_captions(path: Path, *, metadata: bool, file_names: bool) -> UserError:
    """The error, with the ways as a note; of two ways, whether they are possible here."""
    ways = (
        LABEL_OR_ASK
        + (READ_METADATA if metadata else "")
        + WRITE_OR_SORT
        + (USE_FILE_NAMES if file_names else "")
    )
    error = user_error(f"{path}: images but no captions; label some on the page of m1clip serve")
    error.add_note(ways.format(path=one_line(shlex.quote(str(path)))))
    return error
