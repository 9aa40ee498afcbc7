"""Batches by step number: the same for any number of workers, from any step."""

import collections
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_run import TIMEOUT, assert_same_batch

from m1clip.data.array_view import ArrayView
from m1clip.data.augment import Augmentation, box_areas
from m1clip.data.captions import CaptionTable, tokenize_captions
from m1clip.data.decoding import LazyImages
from m1clip.data.failures import Failure
from m1clip.data.images import FileImage, decode
from m1clip.data.loader import Batch, BatchPlan, TrainingSet, batches, pairs_stay_together
from m1clip.data.types import Sample, sample_ids_of
from m1clip.text.base import LENGTH_MULTIPLE
from m1clip.text.tokenizers import CharTokenizer, make_tokenizer

PLANS = st.integers(2, 200).flatmap(
    lambda n: st.builds(BatchPlan, st.just(n), st.integers(2, n), st.integers(0, 2**31 - 1))
)


@given(plan=PLANS, epoch=st.integers(0, 50))
def test_epoch_is_full_batches_without_repeats(plan: BatchPlan, epoch: int) -> None:
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    members = [plan.members(step) for step in steps]
    assert {number for number, _ in members} == {epoch}
    assert all(len(chosen) == plan.batch for _, chosen in members)
    members_seen = np.concatenate([chosen for _, chosen in members])
    assert (
        len(np.unique(members_seen)) == len(members_seen) == plan.images // plan.batch * plan.batch
    )
    assert members_seen.min() >= 0
    assert members_seen.max() < plan.images


def training_set(full_length: bool = False) -> TrainingSet:
    groups = [tuple(f"{'word ' * (1 + (i + j) % 4)}{i} {j}" for j in range(3)) for i in range(37)]
    tokenizer = make_tokenizer("char", [caption for group in groups for caption in group])
    pixels = np.random.default_rng(0).integers(0, 256, (37, 12, 12, 3), np.uint8)
    varied = Augmentation(crop_min=0.5, flip=0.5, color_jitter=0.3)
    captions = tokenize_captions(groups, tokenizer, 64)
    return TrainingSet(
        ArrayView(pixels), captions, BatchPlan(37, 8, 3), varied, full_length=full_length
    )


def mapped(images: ArrayView, folder: Path) -> ArrayView:
    images.array.tofile(folder / "rows.bin")
    return ArrayView.mapped(folder / "rows.bin", images.array.dtype, images.array.shape, None)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "method"), [(2, "fork"), (2, "spawn"), (1, "forkserver")])
def test_batches_are_the_same_with_workers(workers: int, method: str, tmp_path: Path) -> None:
    data = training_set()
    data.images = mapped(data.images, tmp_path)
    alone = list(batches(data, 3, 11, 0, "fork", pin=False))
    helped = list(batches(data, 3, 11, workers, method, pin=False))
    assert len(alone) == len(helped) == 8
    for one, other in zip(alone, helped, strict=True):
        assert_same_batch(one, other)


def test_captions_of_a_batch_belong_to_its_images() -> None:
    data = training_set()
    batch = data[6]
    images = batch.sample_ids.numpy()
    assert (data[6 + 4 * data.plan.steps_per_epoch].sample_ids.numpy() != images).any(), (
        "another epoch, another order"
    )
    assert np.array_equal(batch.images.numpy(), data.images.read(images))
    owner_of_key = dict(
        zip(data.captions.caption_ids.tolist(), data.captions.image_index.tolist(), strict=True)
    )
    image_index = batch.image_index.numpy()
    assert sorted(image_index) == list(range(8))
    assert [owner_of_key[key] for key in batch.caption_ids.tolist()] == images[image_index].tolist()
    assert batch.tokens.dtype == torch.int64


def test_text_groups_contain_every_token_once() -> None:
    data = training_set()
    data.captions_per_image = 3
    data.plan = BatchPlan(37, 24, 3)
    batch = data[0]
    assert len(batch.tokens) == 72
    assert list(batch.lengths) == sorted(batch.lengths)
    groups = [batch.texts(rows) for rows in batch.text_rows()]
    assert len(groups) == 2
    end = (batch.tokens == CharTokenizer.eot_id).int()
    row = 0
    for group in groups:
        longest = max(batch.lengths[row : row + len(group)])
        assert longest <= group.shape[1] < longest + LENGTH_MULTIPLE
        assert torch.equal(group, batch.tokens[row : row + len(group), : group.shape[1]])
        assert end[row : row + len(group), : group.shape[1]].any(dim=1).all()
        row += len(group)
    assert row == 72
    full = training_set(full_length=True)[0]
    assert [full.texts(rows).shape for rows in full.text_rows()] == [(8, 64)]


def test_batch_moves_to_a_device() -> None:
    batch = training_set()[0]
    assert_same_batch(batch.to(torch.device("cpu")), batch)
    moved = batch.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors().values())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_images_in_memory_are_not_copied_to_workers(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.data.loader._Workers", None)  # starting workers would call it
    data = training_set()
    for step, batch in enumerate(batches(data, 0, 3, 2, method, pin=False)):
        assert_same_batch(batch, data[step])


def test_copies_of_an_image_share_an_id() -> None:
    refs = [
        FileImage("a.png"),
        FileImage("b.png"),
        FileImage("a.png"),
        FileImage("c.png"),
        FileImage("b.png"),
    ]
    samples = [Sample(ref, ("x",), str(number)) for number, ref in enumerate(refs)]
    assert sample_ids_of(samples).tolist() == [0, 1, 0, 3, 1]
    data, identity = training_set(), np.arange(37) // 2
    plain = data[4]
    data.identity = identity
    assert data[4].sample_ids.tolist() == identity[plain.sample_ids.numpy()].tolist()


def test_worker_ignores_signals_and_a_stopped_one_can_be_interrupted(tmp_path: Path) -> None:
    data = training_set()
    data.images = mapped(data.images, tmp_path)
    interrupted: list[bool] = []

    @contextlib.contextmanager
    def interruptible() -> Iterator[None]:
        if interrupted:
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        yield

    feed = batches(data, 0, 1000, 2, "fork", False, interruptible=interruptible)
    for _ in range(3):
        next(feed)
        for worker in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(worker.pid, number)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGSTOP)
    interrupted.append(True)
    with pytest.raises(KeyboardInterrupt):
        collections.deque(feed, maxlen=0)
    assert multiprocessing.active_children() == []


def test_error_in_a_worker_is_raised_with_its_traceback(tmp_path: Path) -> None:
    data = training_set()
    data.images = mapped(data.images, tmp_path)
    data.captions = None  # type: ignore[assignment]
    with pytest.raises(AttributeError) as caught:
        next(batches(data, 0, 3, 1, "fork", False))
    assert "in piece" in caught.value.__notes__[0]


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_killed_worker_is_restarted_and_the_batches_are_the_same(
    method: str, workers: int, tmp_path: Path
) -> None:
    data, warnings, batches_seen = training_set(), list[str](), list[Batch]()
    data.images = mapped(data.images, tmp_path)
    others = set(multiprocessing.active_children())  # of earlier tests
    for batch in batches(data, 0, 9, workers, method, False, warnings.append):
        batches_seen.append(batch)
        if len(batches_seen) == 3:
            victim = next(
                process for process in multiprocessing.active_children() if process not in others
            )
            victim.kill()
            victim.join()  # an exception here, outside of the loader, would be torch's handler
    for step in range(9):
        assert_same_batch(batches_seen[step], data[step])
    assert len(warnings) == 1
    assert "was killed (exit code -9)" in warnings[0]
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.filterwarnings("error")  # of torch, if a tensor were allocated in another shape
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("kind", ["sorted", "full length", "features"])
def test_joined_pieces_are_the_batch(count: int, kind: str) -> None:
    data = feature_set() if kind == "features" else training_set(kind == "full length")
    data.captions_per_image = 2
    data.augmentation = replace(data.augmentation, word_dropout=0.3)
    count = min(count, data.plan.batch)
    pieces = [data.piece(2, number, count) for number in range(count)]
    joined = data.join(pieces)
    assert joined.lengths == data[2].lengths
    expected = data[2].tensors()
    assert joined.tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in joined.tensors().items())


@pytest.mark.parametrize(
    ("batch", "ranks", "together"),
    [(7, 1, True), (8, 2, True), (6, 2, False), (12, 3, True), (9, 3, False), (20, 4, False)],
)
def test_pairs_of_cutmix_are_on_one_rank(batch: int, ranks: int, together: bool) -> None:
    """A pair is two images from an even row on: each rank's part must begin at one."""
    parts = [BatchPlan(100, batch, 0, part=(rank, ranks)).members(0)[1] for rank in range(ranks)]
    begins = [sum(map(len, parts[:rank])) for rank in range(ranks)]
    assert all(begin % 2 == 0 for begin in begins) == together
    assert pairs_stay_together(batch, ranks) == together


class RecordedImages(LazyImages):
    """Images that are drawn.

    Each read appends how many images it was asked for to a file of its process.
    """

    in_processes = False

    def try_read(self, indices: np.ndarray) -> tuple[np.ndarray, dict[int, Failure]]:
        with open(self.refs[0].path + str(os.getpid()), "a", encoding="utf-8") as file:
            file.write(f"{len(indices)}\n")
        pixels = np.zeros((len(indices), self.side, self.side, 3), np.uint8)
        pixels[:] = indices[:, None, None, None]
        return pixels, {}


def test_workers_share_each_batch_so_that_the_first_comes_soon(tmp_path: Path) -> None:
    data = training_set()
    data.images = RecordedImages([FileImage(str(tmp_path / "reads-"))] * 37, side=12)
    feed = batches(data, 0, 100, 4, "fork", False)
    first = next(feed)
    feed.close()
    assert_same_batch(first, data[0])
    (tmp_path / f"reads-{os.getpid()}").unlink()
    reads = [list(map(int, file.read_text().split())) for file in tmp_path.iterdir()]
    assert len(reads) == 4, "each of the four workers reads a part of the first batch of 8"
    assert {size for worker in reads for size in worker} == {2}


def photos(folder: Path) -> LazyImages:
    """37 JPEG files, of which the last is broken."""
    draw = np.random.default_rng(0)
    for number in range(37):
        pixels = draw.integers(0, 256, (16, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    (folder / "36.jpg").write_bytes(b"no image")
    return LazyImages([FileImage(str(folder / f"{number}.jpg")) for number in range(37)], 12)


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_batches_are_the_same_with_decoding_processes(
    part: tuple[int, int], tmp_path: Path
) -> None:
    """The batches of two epochs; a process is killed in the middle, and an image is broken."""
    data, warnings, batches_seen = training_set(), list[str](), list[Batch]()
    data.images = photos(tmp_path)
    data.plan = replace(data.plan, part=part)
    others = {process.pid for process in psutil.Process().children()}
    for batch in batches(data, 1, 9, 2, "spawn", False, warnings.append):
        batches_seen.append(batch)
        if len(batches_seen) == 2:
            children = psutil.Process().children()
            victims = [process for process in children if process.pid not in others]
            assert len(victims) == 2
            victims[0].kill()
            victims[0].wait()
    for step, batch in enumerate(batches_seen, start=1):
        assert_same_batch(batch, data[step])
        assert batch.failed == data[step].failed
    assert len(batches_seen) == 8
    assert any(batch.failed for batch in batches_seen)
    assert all("was killed" in warning for warning in warnings)
    assert {process.pid for process in psutil.Process().children()} <= others


def test_decoding_processes_can_be_left_and_interrupted(tmp_path: Path) -> None:
    data = training_set()
    data.images = photos(tmp_path)
    stopped = list[int]()

    @contextlib.contextmanager
    def interruptible() -> Iterator[None]:
        if stopped:
            raise KeyboardInterrupt
        yield

    feed = batches(data, 0, 1000, 2, "spawn", False, interruptible=interruptible)
    assert_same_batch(next(feed), data[0])
    for process in psutil.Process().children():
        if "decode_worker" in " ".join(process.cmdline()):
            process.suspend()
            stopped.append(process.pid)
    with pytest.raises(KeyboardInterrupt):
        collections.deque(feed, maxlen=0)
    assert not any(map(psutil.pid_exists, stopped))


def test_batches_decoded_on_a_gpu_are_the_same_up_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated GPU decodes what processes read; a broken image is replaced, as on the CPU."""
    data, seen, decoded = training_set(), list[Batch](), list[int]()
    data.images = photos(tmp_path)

    def on_host(encoded: list[torch.Tensor]) -> list[torch.Tensor]:
        decoded.append(len(encoded))
        images = [np.array(decode(bytes(each.numpy()))) for each in encoded]
        return [torch.from_numpy(image).permute(2, 0, 1) for image in images]

    monkeypatch.setattr("m1clip.data.read_ahead.gpu_decoder", lambda: on_host)
    monkeypatch.setattr("m1clip.data.read_ahead.GPU_BATCH", 5)
    others = {each.pid for each in psutil.Process().children()}
    on_gpu = replace(data, images=replace(data.images, on_gpu=True))
    for batch in batches(on_gpu, 1, 9, 2, "spawn", False):
        seen.append(batch)
    for step, batch in enumerate(seen, start=1):
        expected = data[step]
        assert torch.equal(batch.sample_ids, expected.sample_ids)
        assert batch.failed == expected.failed
        assert batch.images is not None
        assert expected.images is not None
        assert (batch.images.float() - expected.images.float()).abs().mean() < 1
        assert torch.equal(batch.tokens, expected.tokens)
    assert len(seen) == 8
    assert any(batch.failed for batch in seen)
    assert sum(decoded) == 8 * 8 - sum(len(batch.failed) > 0 for batch in seen)
    assert max(decoded) <= 5
    assert {each.pid for each in psutil.Process().children()} <= others


class MeetingImages(LazyImages):
    """Images that, when a worker unpickles them, wait until two workers do so."""

    in_processes = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        folder = Path(self.refs[0].path)
        (folder / str(os.getpid())).touch()
        end = time.monotonic() + TIMEOUT
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < end, "the other worker was not started"
            time.sleep(0.01)

    def try_read(self, indices: np.ndarray) -> tuple[np.ndarray, dict[int, Failure]]:
        return np.zeros((len(indices), self.side, self.side, 3), np.uint8), {}


def test_workers_start_at_the_same_time(tmp_path: Path) -> None:
    """They import torch for seconds: one after the other, sixteen would take minutes."""
    data = training_set()
    data.images = MeetingImages([FileImage(str(tmp_path))] * 37, side=12)
    data.identity = np.arange(100_000)  # more than fits into a pipe
    feed = batches(data, 0, 3, 2, "forkserver", pin=False)
    first = next(feed)
    feed.close()
    assert_same_batch(first, data[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_word_dropout_depends_on_the_epoch_and_is_reproducible() -> None:
    texts = [(f"a caption of many words for image number {i} of all",) for i in range(12)]
    captions = tokenize_captions(texts, make_tokenizer("char", [t[0] for t in texts]), 64)
    images = ArrayView(np.zeros((12, 4, 4, 3), np.uint8))

    def data(fraction: float) -> TrainingSet:
        return TrainingSet(
            images, captions, BatchPlan(12, 6, 3), Augmentation(word_dropout=fraction)
        )

    full, some, again = data(0.0), data(0.3), data(0.3)
    assert torch.equal(some[0].tokens, again[0].tokens)
    assert list(some[0].lengths) == sorted(some[0].lengths)
    assert some[0].tokens.shape[1] < full[0].tokens.shape[1], "dropped words are not padding"
    kept_fraction = (
        sum(sum(some[step].lengths) - 12 for step in range(40)) / (sum(full[0].lengths) - 12) / 40
    )
    assert abs(kept_fraction - 0.7) < 0.03
    rows = {tuple(row) for step in range(0, 8, 2) for row in some[step].tokens.tolist()}
    assert len(rows) > 12, "another epoch drops other words"


def test_augmentation_is_milder_from_a_step_on() -> None:
    texts = [(f"a caption of many words for image number {i} of all",) for i in range(12)]
    captions = tokenize_captions(texts, make_tokenizer("char", [t[0] for t in texts]), 64)
    images = ArrayView(np.zeros((12, 4, 4, 3), np.uint8))
    strong = Augmentation(crop_min=0.2, flip=0.5, word_dropout=0.3, cutmix=1.0)

    def data(augmentation: Augmentation, mild_after: int) -> TrainingSet:
        plan = BatchPlan(12, 6, 3)
        return TrainingSet(images, captions, plan, augmentation, mild_after=mild_after)

    changed, constant = data(strong, 3), data(strong, 0)
    mild = data(strong.milder(), 0)
    assert strong.milder() == Augmentation(crop_min=0.8, flip=0.5)
    for step in range(6):
        batch, usual, end = changed[step], constant[step], mild[step]
        expected = end if step >= 3 else usual
        assert torch.equal(batch.views, expected.views)
        assert torch.equal(batch.tokens, expected.tokens)
        assert bool(box_areas(batch.boxes).any()) == (step < 3), "no box of another image"
        assert not torch.equal(usual.views, end.views)


FEATURE_IMAGES, FEATURE_CAPTIONS = 12, 2


def feature_set() -> TrainingSet:
    draw = np.random.default_rng(0)
    texts = FEATURE_IMAGES * FEATURE_CAPTIONS
    images = ArrayView(
        draw.standard_normal((FEATURE_IMAGES, 7)).astype(np.float16),
        draw.permutation(FEATURE_IMAGES),
    )
    captions = CaptionTable(
        tokens=np.zeros((texts, 1), np.int32),
        lengths=np.ones(texts, np.int32),
        caption_ids=np.arange(texts, dtype=np.int64),
        first=np.arange(0, texts + 1, FEATURE_CAPTIONS),
        pad_id=0,
        features=ArrayView(
            draw.standard_normal((texts, 5)).astype(np.float16), draw.permutation(texts)
        ),
    )
    plan = BatchPlan(FEATURE_IMAGES, 4, 0)
    return TrainingSet(
        None,
        captions,
        plan,
        Augmentation(flip=0.5),
        image_features=images,
        captions_per_image=FEATURE_CAPTIONS,
    )


def test_batch_of_features_has_the_rows_of_the_file() -> None:
    data = feature_set()
    images, texts = data.image_features, data.captions.features
    for step in (0, 4):
        batch = data[step]
        assert batch.images is batch.tokens is batch.views is None
        assert batch.image_features.dtype == batch.text_features.dtype == torch.float32
        assert np.array_equal(
            batch.image_features.numpy(), images.read(batch.sample_ids.numpy()).astype(np.float32)
        )
        expected = texts.array[texts.rows[batch.caption_ids.numpy()]]
        assert np.array_equal(batch.text_features.numpy(), expected.astype(np.float32))
        assert (batch.caption_ids // FEATURE_CAPTIONS == batch.sample_ids[batch.image_index]).all()
