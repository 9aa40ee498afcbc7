"""The same tests with open_clip's command and with Hugging Face Trainer, in a Python that has them.

    .venv/bin/python tests/reliability/peers.py PYTHON     (benchmarks/README.md says how to make one)

Kill and resume, a rotten newest checkpoint, SIGTERM, NaN in one step's images, a broken image. Tiny models on the
CPU. What happened is written into docs/results/reliability_peers.json: figures and exit codes, no opinions.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
RESULTS = ROOT / "docs" / "results" / "reliability_peers.json"
IMAGES, EPOCHS = 64, 6  # open_clip: 8 steps an epoch
COMPARE = """
import json, sys, torch
def tensors(path):
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
found = [tensors(path) for path in sys.argv[1:]]
one, other = found[0], found[-1]
worst = max((one[k].float() - other[k].float()).abs().nan_to_num(1e9).max().item() for k in one)
nan = sum(not bool(t.float().isfinite().all()) for t in other.values())
print(json.dumps({"same bits": all(torch.equal(one[k], other[k]) for k in one), "largest difference": worst,
                  "tensors that are not finite": nan, "tensors": len(other)}))
"""


class Peer:
    """One trainer of others: how it is started, where it saves, how its progress is seen."""

    def __init__(self, python: str, place: Path, broken: int = 0) -> None:
        self.python, self.place = python, place
        self.table = make_table(place / "set", broken)

    def words(self, name: str, nan_at: int = 0, resume: bool = False) -> list[str]:
        raise NotImplementedError

    def checkpoints(self, name: str) -> list[Path]:
        """Files of weights, the newest last."""
        raise NotImplementedError

    def start(self, name: str, **how: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(PEERS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (self.place / f"{name}.out").open("a") as file:
            return subprocess.Popen(
                [self.python, *self.words(name, **how)],
                cwd=self.place,
                env=environment,
                stdout=file,
                stderr=file,
                text=True,
            )

    def run(self, name: str, **how: Any) -> int:
        return self.start(name, **how).wait(timeout=300)

    def said(self, name: str) -> str:
        """Its last words that name an error, or else its last line."""
        lines = (self.place / f"{name}.out").read_text().strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1].replace(str(self.place), "...")[:200]

    def compare(self, *paths: Path) -> dict[str, Any]:
        told = subprocess.run(
            [self.python, "-c", COMPARE, *map(str, paths)], capture_output=True, text=True, check=True, timeout=120
        )
        return dict(json.loads(told.stdout.strip().splitlines()[-1]))


class OpenClip(Peer):
    """open_clip_train: a checkpoint at each epoch's end."""

    def words(self, name: str, nan_at: int = 0, resume: bool = False) -> list[str]:
        shape = {"width": 32, "layers": 2}
        config = {"embed_dim": 32, "vision_cfg": {**shape, "image_size": 32, "head_width": 16, "patch_size": 8},
                  "text_cfg": {**shape, "context_length": 16, "vocab_size": 49408, "heads": 2}}  # fmt: skip
        (self.place / "configs").mkdir(exist_ok=True)
        (self.place / "configs" / "tiny-test.json").write_text(json.dumps(config))
        return [
            str(PEERS / "reliability_open_clip.py"), str(self.place / "configs"), str(nan_at), "--model", "tiny-test",
            "--train-data", str(self.table), "--dataset-type", "csv", "--csv-separator", ",", "--csv-img-key", "image",
            "--csv-caption-key", "caption", "--epochs", str(EPOCHS), "--batch-size", "8", "--workers", "0",
            "--lr", "1e-3",
            "--warmup", "2", "--logs", str(self.place / "logs"), "--name", name, "--save-frequency", "1", "--seed", "0",
            "--device", "cpu", "--precision", "fp32", "--log-every-n-steps", "1",
            *(["--resume", "latest"] if resume else []),
        ]  # fmt: skip

    def checkpoints(self, name: str) -> list[Path]:
        return sorted((self.place / "logs" / name / "checkpoints").glob("epoch_*.pt"), key=lambda p: int(p.stem[6:]))


class HuggingFace(Peer):
    """transformers.Trainer: a checkpoint every 10 of 60 steps."""

    def words(self, name: str, nan_at: int = 0, resume: bool = False) -> list[str]:
        more = ["resume"] if resume else []
        return [str(PEERS / "reliability_hf.py"), str(self.table), str(self.place / name), str(nan_at), *more]

    def checkpoints(self, name: str) -> list[Path]:
        return sorted((self.place / name).glob("checkpoint-*/model.safetensors"), key=lambda p: int(p.parent.name[11:]))


def make_table(folder: Path, broken: int) -> Path:
    """A table of small images, some of which are none."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image,caption"]
    for number in range(IMAGES):
        path = folder / f"{number}.jpg"
        Image.new("RGB", (40, 40), (number * 3 % 256, number * 7 % 256, number * 11 % 256)).save(path)
        if number < broken:
            path.write_bytes(b"not an image")
        lines.append(f"{path},image {number}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def when(peer: Peer, name: str, process: subprocess.Popen[str], saves: int) -> None:
    """Wait until so many checkpoints are written to their end: the middle of the steps that follow, not of a save."""
    deadline = time.monotonic() + 200
    before: list[int] = []
    while process.poll() is None and time.monotonic() < deadline:
        found = peer.checkpoints(name)
        sizes = [file.stat().st_size for path in found for file in sorted(path.parent.glob("*")) if file.is_file()]
        if len(found) >= saves and sizes == before:
            return
        before = sizes
        time.sleep(0.08)


def test_kill_and_resume(peer: Peer) -> dict[str, Any]:
    """Three kills, each continued; the end compared with a run that was not killed."""
    whole = peer.run("whole")
    for saves in (1, 2, 3):
        process = peer.start("killed", resume=saves > 1)
        when(peer, "killed", process, saves)
        process.kill()
        process.wait()
    code = peer.run("killed", resume=True)
    again = peer.run("again")  # is it the same at all from run to run?
    found = peer.compare(peer.checkpoints("whole")[-1], peer.checkpoints("killed")[-1]) if code == whole == 0 else {}
    repeat = peer.compare(peer.checkpoints("whole")[-1], peer.checkpoints("again")[-1]) if again == 0 else {}
    return {"kills": 3, "exit code": code, "a repeat without kills has the same bits": repeat.get("same bits"), **found,
            "words": peer.said("killed") if code else ""}  # fmt: skip


def test_damaged_newest(peer: Peer) -> dict[str, Any]:
    """The newest file of weights cut in half, then a bit flipped; continued."""
    answers: dict[str, Any] = {}
    for damage in ("cut in half", "bit flipped"):
        name = f"rotten-{damage.split()[0]}"
        process = peer.start(name)
        when(peer, name, process, 3)
        process.kill()
        process.wait()
        newest = peer.checkpoints(name)[-1]
        data = bytearray(newest.read_bytes())
        if damage == "cut in half":
            data = data[: len(data) // 2]
        else:
            data[len(data) // 2] ^= 64
        newest.write_bytes(data)
        code = peer.run(name, resume=True)
        answers[damage] = {"exit code": code, "words": peer.said(name) if code else "went on without a word"}
    return answers


def test_sigterm(peer: Peer) -> dict[str, Any]:
    """SIGTERM in the middle: is what was trained since the last checkpoint saved?"""
    process = peer.start("terminated")
    when(peer, "terminated", process, 2)
    before = len(peer.checkpoints("terminated"))
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    code = process.wait(timeout=60)
    return {"exit code": code, "seconds": round(time.monotonic() - begin, 2),
            "saved on the way out": len(peer.checkpoints("terminated")) > before}  # fmt: skip


def test_nan(peer: Peer) -> dict[str, Any]:
    """The images of one step are NaN: are the weights at the end?"""
    code = peer.run("nan", nan_at=12)
    found = peer.checkpoints("nan")
    last = peer.compare(found[-1]) if found else {}
    return {"exit code": code, **{name: last[name] for name in ("tensors that are not finite", "tensors") if last}}


def test_broken_image(peer: Peer) -> dict[str, Any]:
    """Three of 64 images are not images."""
    code = peer.run("broken")
    return {"broken": 3, "exit code": code, "words": peer.said("broken") if code else "went on"}


TESTS: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "kill and resume": test_kill_and_resume,
    "damaged checkpoint": test_damaged_newest,
    "signals": test_sigterm,
    "nan in the data": test_nan,
    "bad data": test_broken_image,
}


def main() -> None:
    """Every test with every peer."""
    python = sys.argv[1]
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    versions = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(*(m.version(n) for n in "
         "('open_clip_torch', 'transformers', 'accelerate', 'torch')))"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    found["versions"] = dict(zip(("open_clip", "transformers", "accelerate", "torch"), versions, strict=True))
    found["machine"] = f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores"
    for label, kind in (("open_clip", OpenClip), ("hugging face trainer", HuggingFace)):
        for name, test in TESTS.items():
            if sys.argv[2:] and label not in sys.argv[2:] and name not in sys.argv[2:]:
                continue
            place = Path(tempfile.mkdtemp(prefix="m1clip-peers-"))
            try:
                found.setdefault(name, {})[label] = test(kind(python, place, broken=3 if name == "bad data" else 0))
            finally:
                shutil.rmtree(place, ignore_errors=True)
            print(f"{name:18} {label:22} {json.dumps(found[name][label])}", flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
