"""Reading a log while it grows: whole lines only, in bounded memory, however long it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from m1clip.files import open_regular
from m1clip.runlog import NAME, Record, parse

HEAD, TAIL = 1 << 20, 4 << 20  # bytes of a long log that are read whole
SAMPLES, SAMPLE = 512, 8 << 10  # places in between that are looked at first, and bytes at each
AT_ONCE = 16 << 20  # bytes of the rest that one call looks through
NOT_STEP = re.compile(rb'"kind":"(?!step"|layers")')
LONGEST_LINE = 4 << 20  # more without an end is no line of ours


class Follower:
    """Gives the records of a run as they arrive. A long log is sampled first and looked through bit by bit."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._rest = b""
        self._file_id = (0, 0)
        self.problem = ""  # why the log cannot be opened
        self.invalid = 0  # lines that were read and skipped
        self._gap: tuple[int, int] | None = None  # bytes of a long log not yet looked through

    @property
    def complete(self) -> bool:
        """Nothing of the log is left to be looked through."""
        return self._gap is None

    def read(self) -> tuple[bool, list[Record]]:
        """(the log was replaced, new records); never more than a bounded number of bytes at a time."""
        try:
            status = self.path.stat()
        except OSError:
            replaced = self._offset > 0
            self._forget()
            return replaced, []
        file_id = (status.st_dev, status.st_ino)
        replaced = self._offset > 0 and (file_id != self._file_id or status.st_size < self._offset)
        if replaced:
            self._forget()
        read = self._sample if self._is_long(status.st_size) else self._read_on
        try:
            records, self.problem = read(status.st_size), ""
        except OSError as error:  # no regular file inside the run folder, or not ours to read
            self.problem, records = error.strerror or str(error), []
        self._file_id = file_id
        return replaced, records

    def _is_long(self, size: int) -> bool:
        return self._offset == 0 and size > HEAD + TAIL + SAMPLES * SAMPLE

    def look_back(self) -> list[Record]:
        """The next part of a long log's middle: every record but those of steps, which were sampled."""
        if self._gap is None:
            return []
        start, stop = self._gap
        end = min(start + AT_ONCE, stop)
        records = []
        with open_regular(self.path, self.path.parent) as file:
            file.seek(start)
            block = file.read(end - start) + file.readline(LONGEST_LINE)
            for match in NOT_STEP.finditer(block):
                first = block.rfind(b"\n", 0, match.start()) + 1
                last = block.find(b"\n", match.start())
                if first or start == 0:
                    records += self._records([block[first : last if last >= 0 else None]])
            # From the last line's start, so that the line across the edge is found whole next time.
            end = start + block.rfind(b"\n") + 1 if b"\n" in block else end
        self._gap = (max(end - 1, start + 1), stop) if end < stop else None
        return records

    def _read_on(self, size: int) -> list[Record]:
        want = min(size - self._offset, HEAD + TAIL + SAMPLES * SAMPLE)
        if want <= 0:
            return []
        with open_regular(self.path, self.path.parent) as file:
            file.seek(self._offset)
            block = file.read(want)
        self._offset += len(block)
        lines = (self._rest + block).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        return self._records(lines)

    def _sample(self, size: int) -> list[Record]:
        records: list[Record] = []
        with open_regular(self.path, self.path.parent) as file:
            head = file.read(HEAD)
            records += self._records(head.split(b"\n")[:-1])
            gap = (head.rfind(b"\n"), size - TAIL)
            for index in range(SAMPLES):
                file.seek(gap[0] + (gap[1] - gap[0]) * index // SAMPLES)
                records += self._records(file.read(SAMPLE).split(b"\n")[1:-1][:1])
            file.seek(gap[1])
            lines = file.read(size - gap[1]).split(b"\n")
        self._rest = lines.pop()
        self._offset = size
        self._gap = gap
        records += self._records(lines[1:])
        return records

    def _records(self, lines: Iterable[bytes]) -> list[Record]:
        parsed = [parse(line) for line in lines if line]
        records = [record for record in parsed if record is not None]
        self.invalid += len(parsed) - len(records)
        return records
