"""How long does the Label page take to answer? Over HTTP, with random vectors.

python benchmarks/label_page.py --images 100000 --labels 300        # general; needs the extra
towers
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from search_page import make_library
from sides import RESULTS, figures, machine, write

from m1clip.web.photos import Photos
from m1clip.web.server import Server, Store

QUEUE = 24  # photos that the page asks for at a time


def main() -> None:
    """Open the page, label photos one by one, and write the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="general")
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--labels", type=int, default=300)
    parser.add_argument("--json", type=Path, default=RESULTS / "label_page.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_library(Path(scratch), options.model, options.images)
        server = Server(Store([]), 0, Photos(folder, runs=Path(scratch) / "runs"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = peak()
        began = time.process_time()  # of the server and of the page's requests
        first = timed(lambda: get(server, f"/api/label/queue?page=a&count={QUEUE}"))[0]
        first_cpu = time.process_time() - began
        token = get(server, "/api/library")["token"]
        saves: list[float] = []
        began = time.process_time()
        queues: list[float] = []
        while len(saves) < options.labels:
            took, queue = timed(lambda: get(server, f"/api/label/queue?page=a&count={QUEUE}"))
            queues.append(1000 * took)
            for photo in queue["photos"]:
                body = {
                    "photos": [{"id": photo["id"], "version": photo["version"]}],
                    "captions": [f"photo {photo['id']}"],
                    "page": "a",
                }
                saves.append(1000 * timed(lambda body=body: post(server, token, body))[0])
        cpu = time.process_time() - began
        result = {
            "machine": machine(),
            "images": options.images,
            "first_page_seconds": round(first, 2),
            "first_page_cpu_seconds": round(first_cpu, 2),
            # With the requests for more photos, and the learning curve of every 20 labels.
            "cpu_milliseconds_per_label": round(1000 * cpu / len(saves), 1),
            "queue_milliseconds": figures(queues),
            "save_milliseconds": figures(saves),
            "memory_added_megabytes": round((peak() - before) / 1e6),
        }
        write(options.json, result)
        print(json.dumps(result, indent=2))
        server.shutdown()


def timed(work: Any) -> tuple[float, Any]:
    """(seconds, result) of a function."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path.lstrip("/")) as answer:
        return json.load(answer)


def post(server: Server, token: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}api/label", json.dumps(body).encode(), {"X-M1clip-Token": token}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def peak() -> int:
    """Bytes of memory that this process has used at most."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


if __name__ == "__main__":
    main()
