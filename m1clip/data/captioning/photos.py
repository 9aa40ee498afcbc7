"""Captions for a folder of photos by a model on a local server: `m1clip data caption`."""

from __future__ import annotations

import io
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from PIL import Image

from m1clip import console
from m1clip.data.caption_table import CAPTIONS_FILE, lock_captions, read_captions
from m1clip.data.captioning.answers import Repeats, check_answer
from m1clip.data.captioning.journal import ANSWER_KEPT, Entry, Journal, prompt_key
from m1clip.data.captioning.server import DEFAULT_SERVER, NoServer, Reply, ServerError, VisionServer
from m1clip.data.images import BadImage, FileImage, decode
from m1clip.data.sources.base import DataPath, walk_images
from m1clip.data.sources.columns import GENERATED, is_generated
from m1clip.data.sources.formats import detect_format
from m1clip.data.sources.metadata import PhotoCaptions, find_captions
from m1clip.errors import UserError
from m1clip.formatting import duration, one_line, plural
from m1clip.io import remove_leftovers_of

PROMPT = (
    "Describe this photo in one short sentence: who or what is in it, what they are doing, and "
    "where. Name what can be seen, not what it may mean. Answer with the sentence alone."
)
SAMPLES = 3  # photos of a dry run
MAX_TOKENS = 200  # of an answer; reasoning models need more
MAX_PARALLEL = 32
FIRST_WAIT_SECONDS = 1.0  # before the second try, doubled for each further one
MAX_FAILURES = 8  # photos in a row
SAME_ANSWERS_CHECKED = 12  # answers after which half must differ
TABLE_SECONDS = 60.0  # between two changes of captions.csv
SENT_QUALITY = 88
MAX_PROMPT = 8_000  # characters
_CAPTIONING_LOCK = ".m1clip-captions.lock"


@dataclass(frozen=True, kw_only=True)
class CaptionSettings:
    """How photos are sent, and what is done with the answers."""

    prompt: str = PROMPT
    parallel: int = 2
    timeout: float = 120.0  # seconds for an answer
    tries: int = 4
    max_side: int = 768  # pixels of the longer side of the image that is sent
    max_tokens: int = MAX_TOKENS
    replace: bool = False  # ask again about photos that have a generated caption
    limit: int | None = None  # photos

    def __post_init__(self) -> None:
        if not self.prompt.strip() or len(self.prompt) > MAX_PROMPT:
            raise UserError(f"--prompt: expected 1 to {MAX_PROMPT:,} characters")
        for name, low, high in (
            ("parallel", 1, MAX_PARALLEL),
            ("tries", 1, 20),
            ("timeout", 1, 3600),
            ("max_side", 64, 4096),
            ("max_tokens", 16, 16_384),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} {value:g}: expected {low} to {high:,}")


DEFAULT_SETTINGS = CaptionSettings()


class Outcome(NamedTuple):
    """What became of one photo: an answer, or why there is none."""

    photo: str
    reply: Reply | None
    failure: str = ""
    is_server_failure: bool = False
    seconds: float = 0.0


@dataclass
class CaptionReport:
    """What a captioning run did."""

    table: Path
    model: str
    photos: int = 0
    captioned_before: int = 0
    from_metadata: int = 0
    generated: int = 0  # in this run
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of each fault
    failures: list[str] = field(default_factory=list)
    rejected_before: int = 0  # photos whose answer was not used in an earlier run
    unnamed: int = 0  # photos whose names a table cannot contain

    def __str__(self) -> str:
        lines = [
            f"captions   {plural(self.generated, 'caption')} by {one_line(self.model)} "
            f"in {duration(self.seconds)}, "
            f"{self.captioned_before:,} of {plural(self.photos, 'photo')} had one before"
        ]
        if self.from_metadata:
            lines.append(f"metadata   {plural(self.from_metadata, 'photo')} with captions inside")
        for fault, count in self.faults.most_common():
            example = one_line(self.examples.get(fault, ""))[:100]
            lines.append(f"not used   {plural(count, 'answer')}: {fault}, such as {example!r}")
        if self.rejected_before:
            lines.append(
                f"not asked  {plural(self.rejected_before, 'photo')} whose answer was of no use before; "
                f"another --prompt or --model asks again"
            )
        if self.failures:
            lines.append(
                f"failed     {plural(len(self.failures), 'photo')}, such as {self.failures[0]}; "
                f"the same command tries them again"
            )
        if self.unnamed:
            lines.append(f"skipped    {plural(self.unnamed, 'photo')} with control characters")
        if self.table.exists():
            lines.append(f"table      {one_line(str(self.table))}")
        return "\n".join(lines)


class Sample(NamedTuple):
    """A photo of a dry run, what the model answered, and what would be written."""

    photo: str
    answer: str
    caption: str
    problem: str
    seconds: float


@dataclass(frozen=True)
class DryRun:
    """What a model answers about a few photos."""

    model: str
    prompt: str
    photos: int  # that need a caption
    parallel: int
    samples: tuple[Sample, ...]

    def __str__(self) -> str:
        lines = [f"model      {one_line(self.model)}", f"prompt     {one_line(self.prompt)}"]
        for sample in self.samples:
            lines += ["", f"photo      {one_line(sample.photo)} ({duration(sample.seconds)})"]
            if sample.answer:
                lines.append(f"answer     {one_line(sample.answer)[:ANSWER_KEPT]}")
            lines.append(
                f"caption    {sample.caption}"
                if sample.caption
                else f"not used   {one_line(sample.problem)}"
            )
        lines += ["", f"photos     {self.photos:,} without a caption; nothing was written"]
        answered = [sample.seconds for sample in self.samples if sample.answer]
        if answered:
            # The first answer also loads the model.
            seconds = min(answered) * self.photos / self.parallel
            lines.append(
                f"time       about {duration(seconds)} to {duration(seconds * self.parallel)} for all"
            )
        return "\n".join(lines)


def caption_photos(
    folder: str | Path,
    server: str = DEFAULT_SERVER,
    model: str | None = None,
    *,
    settings: CaptionSettings = DEFAULT_SETTINGS,
    allow_remote: bool = False,
) -> CaptionReport:
    """Ask a vision server for a caption of each photo without one, and write them to captions.csv.

    A killed or interrupted run continues where it stopped. Captions of people are never changed.
    """
    root = _folder(folder)
    client = VisionServer(server, allow_remote=allow_remote, timeout=settings.timeout)
    chosen = client.choose_model(model)
    with _only_run(root):
        run = _Run(root, client, chosen, settings)
        run.begin()
        run.caption_all()
        return run.report


def sample_captions(
    folder: str | Path,
    server: str = DEFAULT_SERVER,
    model: str | None = None,
    *,
    settings: CaptionSettings = DEFAULT_SETTINGS,
    allow_remote: bool = False,
) -> DryRun:
    """Ask a vision server about a few photos, and write nothing."""
    root = _folder(folder)
    client = VisionServer(server, allow_remote=allow_remote, timeout=settings.timeout)
    chosen = client.choose_model(model)
    run = _Run(root, client, chosen, settings)
    photos = run.without_metadata(run.photos_to_ask())
    samples = []
    # In an order like a random one: neighbours are often of the same scene.
    for photo in sorted(photos, key=lambda name: zlib.crc32(name.encode("utf-8")))[:SAMPLES]:
        outcome = run.ask(photo)
        if outcome.reply is None:
            samples.append(Sample(photo, "", "", outcome.failure, outcome.seconds))
            continue
        checked = check_answer(outcome.reply.text, settings.prompt, outcome.reply.is_cut_off)
        problem = checked.fault or ""
        text = outcome.reply.text
        samples.append(Sample(photo, text, checked.caption, problem, outcome.seconds))
    return DryRun(chosen, settings.prompt, len(photos), settings.parallel, tuple(samples))


def _folder(folder: str | Path) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{one_line(str(root))}: not a folder of photos")
    return root


@contextmanager
def _only_run(root: Path) -> Iterator[None]:
    """Hold the lock of a folder: two runs would ask about the same photos."""
    lock = FileLock(root / _CAPTIONING_LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{root}: another m1clip data caption is at work in this folder") from None
    except OSError as error:
        raise UserError(f"{root}: cannot be written to ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


class _Run:
    """One run of the captioner. Only the thread that calls it writes; the workers ask."""

    def __init__(
        self, root: Path, server: VisionServer, model: str, settings: CaptionSettings
    ) -> None:
        self.root = root
        self.server = server
        self.model = model
        self.settings = settings
        self.table = root / CAPTIONS_FILE
        self.source = GENERATED + model
        self.report = CaptionReport(self.table, model)
        self.journal = Journal(root)
        self._prompt_key = prompt_key(settings.prompt)
        self._repeats = Repeats()
        self._unsaved: list[Entry] = []
        self._stopped = threading.Event()
        self._failures_in_a_row = 0

    def begin(self) -> None:
        """Save what an earlier run could not, and captions that the photos contain."""
        for path in (self.table, self.journal.path):
            remove_leftovers_of(path)
        self._check_format()
        answered = [entry for entry in self.journal.entries.values() if entry.caption]
        for entry in answered:
            self._repeats.add(entry.caption)
        self._unsaved = answered
        self.save()
        self._import_metadata()

    def _check_format(self) -> None:
        """UserError if the folder has captions of a format that captions.csv would hide."""
        if self.table.exists():
            return
        try:
            data_format = detect_format(DataPath(self.root))
        except UserError:
            return
        if data_format.hidden_by_table:
            raise UserError(
                f"{self.root}: has captions already, in the format {data_format.name}, which captions.csv"
                " would hide; move them to another folder first"
            )

    def _import_metadata(self) -> None:
        """Write the captions inside photos to the table, which would hide them otherwise."""
        table = read_captions(self.table)
        names = [name for name in self._photos() if not table.of(name)]
        captioned = [
            (name, captions)
            for name, captions in find_captions(self.root, names, follow_links=False)
            if isinstance(captions, PhotoCaptions)
        ]
        if not captioned:
            return
        with lock_captions(self.table):
            table = read_captions(self.table)
            for name, captions in captioned:
                if not table.of(name):
                    table.replace(name, captions.texts, captions.kind)
            table.write()
        self.report.from_metadata = len(captioned)

    def without_metadata(self, photos: Sequence[str]) -> list[str]:
        """Leave out the photos that contain a caption."""
        captioned = find_captions(self.root, photos, follow_links=False)
        return [name for name, captions in captioned if not isinstance(captions, PhotoCaptions)]

    def photos_to_ask(self) -> list[str]:
        """The photos without a caption that this model was not asked about with this prompt."""
        self._check_format()
        table = read_captions(self.table)
        photos = []
        for name in self._photos():
            self.report.photos += 1
            captions = table.of(name)
            is_asked = self.settings.replace and all(is_generated(c.source) for c in captions)
            if captions and not is_asked:
                self.report.captioned_before += 1
                continue
            entry = self.journal.entries.get(name)
            if entry is not None and (entry.model, entry.prompt) == (self.model, self._prompt_key):
                self.report.rejected_before += not entry.caption
                continue
            photos.append(name)
        return photos[: self.settings.limit]

    def _photos(self) -> Iterator[str]:
        self.report.unnamed = 0
        for name in walk_images(self.root):
            # A table cannot contain others.
            if name.isprintable():
                yield name
            else:
                self.report.unnamed += 1

    def caption_all(self) -> None:
        """Ask about all photos, several at a time; what was answered is saved whatever happens."""
        photos = self.photos_to_ask()
        began = time.monotonic()
        saved = began
        pool = ThreadPoolExecutor(self.settings.parallel)
        try:
            with console.progress("captioning") as refresh:
                refresh(0, len(photos))
                for done, outcome in enumerate(self._outcomes(pool, photos), start=1):
                    self._handle(outcome)
                    refresh(done, len(photos))
                    if time.monotonic() - saved > TABLE_SECONDS:
                        self.save()
                        saved = time.monotonic()
        finally:
            self._stopped.set()
            self.server.close()
            pool.shutdown(cancel_futures=True)
            self.report.seconds = time.monotonic() - began
            self.save()
        # Answers that cannot be used are remembered; captions are in the table from now on.
        self.journal.keep([entry for entry in self.journal.entries.values() if not entry.caption])

    def _outcomes(self, pool: ThreadPoolExecutor, photos: Sequence[str]) -> Iterator[Outcome]:
        """Yield what became of the photos as they are done; few wait in memory at a time."""
        running: set[Future[Outcome]] = set()
        for photo in photos:
            running.add(pool.submit(self.ask, photo))
            if len(running) >= 2 * self.settings.parallel:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)

    def ask(self, photo: str) -> Outcome:
        """Send a photo, several times if the server asks for patience."""
        began = time.monotonic()
        try:
            jpeg = _small_jpeg(self.root / photo, self.settings.max_side)
        except BadImage as error:
            return Outcome(photo, None, str(error))
        for number in range(1, self.settings.tries + 1):
            try:
                reply = self.server.describe_image(
                    jpeg, self.model, self.settings.prompt, self.settings.max_tokens
                )
                return Outcome(photo, reply, seconds=time.monotonic() - began)
            except ServerError as error:
                is_last = number == self.settings.tries or not error.is_temporary
                if is_last and isinstance(error, NoServer):
                    raise self.server.no_server(error) from error
                if is_last or self._stopped.is_set():
                    return Outcome(photo, None, f"{photo}: {error}", True)
                delay = FIRST_WAIT_SECONDS * 2 ** (number - 1)
                self._stopped.wait(delay if error.retry_after is None else error.retry_after)
        raise AssertionError("unreachable: the last try returns")

    def _handle(self, outcome: Outcome) -> None:
        """Check an answer and write it to the journal; stop if the server is of no use."""
        if outcome.reply is None:
            self.report.failures.append(one_line(outcome.failure))
            self._failures_in_a_row += outcome.is_server_failure
            if self._failures_in_a_row >= MAX_FAILURES:
                raise UserError(
                    f"stopped after {MAX_FAILURES} failures in a row, the last:"
                    f" {one_line(outcome.failure)}; what was answered is saved, and the same"
                    " command continues"
                )
            return
        self._failures_in_a_row = 0
        text = outcome.reply.text
        checked = check_answer(text, self.settings.prompt, outcome.reply.is_cut_off)
        stored_text = text[:ANSWER_KEPT] if checked.fault else ""
        key = (outcome.photo, self.model, self._prompt_key)
        entry = Entry(*key, checked.caption, checked.fault, stored_text)
        self.journal.add(entry)
        if checked.fault is not None:
            self._count_fault(checked.fault, text)
            return
        self.report.generated += 1
        self._repeats.add(checked.caption)
        self._unsaved.append(entry)
        self._stop_if_blind(checked.caption)

    def _count_fault(self, fault: str, text: str) -> None:
        self.report.faults[fault] += 1
        self.report.examples.setdefault(fault, text)

    def _stop_if_blind(self, caption: str) -> None:
        """UserError if the model gives most photos the same caption: it may not see them."""
        same, total = self._repeats.most_common()
        if total == SAME_ANSWERS_CHECKED and same > total // 2:
            # None of them describes a photo.
            answered = [entry.photo for entry in self._unsaved]
            self._unsaved = []
            self.report.generated = 0
            self.journal.keep(
                entry for name, entry in self.journal.entries.items() if name not in answered
            )
            raise UserError(
                f"{same} of the first {total} photos got the same caption, {caption[:80]!r}: does "
                f"{one_line(self.model)} see images? Choose a vision model with --model, or change "
                f"--prompt"
            )

    def save(self) -> None:
        """Add new captions to captions.csv, beside what others wrote to it meanwhile."""
        repeated = [
            entry
            for entry in self.journal.entries.values()
            if entry.caption and self._repeats.is_repeated(entry.caption)
        ]
        if not self._unsaved and not repeated:
            return
        names = {entry.photo for entry in repeated}
        with lock_captions(self.table):
            table = read_captions(self.table)
            for entry in self._unsaved:
                captions = table.of(entry.photo)
                is_new = all(is_generated(caption.source) for caption in captions)
                if entry.photo in names or not is_new or not (self.root / entry.photo).is_file():
                    continue
                source = GENERATED + entry.model
                for other in {caption.source for caption in captions} - {source}:
                    table.replace(entry.photo, [], other)
                table.replace(entry.photo, [entry.caption], source)
            for entry in repeated:
                table.replace(entry.photo, [], GENERATED + entry.model)
            if table.images() or self.table.exists():
                table.write()
        self._unsaved = []
        self._reject(repeated)

    def _reject(self, repeated: Iterable[Entry]) -> None:
        """Write to the journal that captions of too many photos are not used."""
        for entry in repeated:
            key = (entry.photo, entry.model, entry.prompt)
            self.journal.add(Entry(*key, "", "repeated", entry.caption[:ANSWER_KEPT]))
            self._count_fault("repeated", entry.caption)
            self.report.generated = max(0, self.report.generated - 1)


def _small_jpeg(path: Path, max_side: int) -> bytes:
    """The photo as a JPEG of limited size, upright, without its metadata such as its place."""
    data = FileImage(str(path)).read()
    image = decode(data, max_side, str(path))
    image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=SENT_QUALITY)
    return stream.getvalue()
