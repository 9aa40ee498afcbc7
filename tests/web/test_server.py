"""The web server: what it serves, to whom, and what it never serves."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from monitor.made_runs import append, full_run, line, step

from m1clip.analyses import ANALYSES
from m1clip.runlog import FIELDS, LogField
from m1clip.web.server import Handler, Server, Store, key_of
from web.client import ask, connect, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    full_run(tmp_path / "runs" / "one")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "runs" / "one" / "snapshots" / "thumbnails" / "9.jpg").symlink_to(
        tmp_path / "secret.txt"
    )
    with running(Server(Store([tmp_path / "runs"]), 0)) as made:
        yield made


def update(server: Server, query: str = "") -> dict[str, Any]:
    """What the page receives every second."""
    status, body, _ = ask(server, f"/api/update?{query}")
    assert status == 200
    return dict(json.loads(body, parse_constant=pytest.fail))


def test_page_files_are_served_with_strict_headers(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, body, headers = ask(server, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    for part in (
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ):
        assert part in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in (
        "/app.js",
        "/fields.js",
        "/plots.js",
        "/views.js",
        "/uplot.js",
        "/style.css",
        "/uplot.css",
    ):
        assert f'"{name}"'.encode() in body
        assert ask(server, name)[0] == 200
    assert (
        "innerHTML" not in ask(server, "/views.js")[1].decode() + ask(server, "/app.js")[1].decode()
    )


def test_own_host_names_are_accepted_and_other_names_and_sites_rejected(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"):
        assert ask(server, "/", Host=host)[0] == ask(server, "/api/update", Host=host)[0] == 403, (
            host
        )
    for host in ("localhost", "localhost:1234", "127.0.0.1:80", "[::1]:9"):
        assert ask(server, "/api/update", Host=host)[0] == 200, host
    assert ask(server, "/api/update", Origin="https://evil.example")[0] == 403
    assert ask(server, "/api/update", Origin="null")[0] == 403
    assert ask(server, "/api/update", Sec_Fetch_Site="cross-site")[0] == 403
    own = f"localhost:{server.server_address[1]}"
    assert ask(server, "/api/update", Host=own, Origin=f"http://{own}")[0] == 200
    # A tunnel.
    assert (
        ask(server, "/api/update", Host="localhost:1234", Origin="http://localhost:1234")[0] == 200
    )
    for origin in (
        "http://localhost:1",
        "http://localhost",
        f"https://{own}",
        f"http://127.0.0.1:{own[-5:]}",
    ):
        assert ask(server, "/api/update", Host=own, Origin=origin)[0] == 403, origin


def test_no_file_outside_the_run_is_served(server: Server, tmp_path: Path) -> None:
    key = key_of(tmp_path / "runs" / "one")
    status, image, _ = ask(server, f"/thumbnail?run={key}&index=1")
    assert (status, image[:2]) == (200, b"\xff\xd8")
    for path in (
        *(
            f"/thumbnail?run={key}&index={index}"
            for index in ("9", "../../config", "-1", "²", "1.0", "")
        ),
        *(
            "/thumbnail?run=..&index=1",
            f"/thumbnail?run={tmp_path}&index=1",
            "/thumbnail",
            "/api/snapshot",
        ),
        *(
            f"/api/snapshot?run={key}&index=7",
            "/../secret.txt",
            "/%2e%2e/secret.txt",
            "/page/app.js",
            "/run.jsonl",
        ),
    ):
        status, body, _ = ask(server, path.replace("²", "%C2%B2"))
        assert status == 404, path
        assert b"secret" not in body
    assert ask(server, f"/api/snapshot?run={key}&index=50")[0] == 200


@pytest.mark.parametrize(
    "target", ["http://[", "*", "/\xff%", "/thumbnail?run=%zz&&=", "x" * 60_000]
)
def test_malformed_request_is_answered_with_404(server: Server, target: str) -> None:
    with connect(server) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        assert client.recv(100).startswith(b"HTTP/1.1 404 ")


def test_post_is_refused_without_photos(server: Server) -> None:
    assert ask(server, "/api/update", b"{}")[0] == 403


def test_updates_are_incremental(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    key = key_of(run)
    changes = update(server, f"{key}=new&nonsense=1")
    (summary,), (first,) = changes["runs"], changes["rows"]
    assert (summary["id"], summary["name"], summary["state"], summary["steps"]) == (
        key,
        "one",
        "finished",
        100,
    )
    assert first["reset"]
    assert [row["step"] for row in first["steps"]] == list(range(2, 101, 2))
    assert [row["step"] for row in first["evaluations"]] == [50, 100]
    append(run, [step(102, loss=0.125), step(104, loss="nan")])
    changes = update(server, f"{key}={first['cursor']}")
    (later,) = changes["rows"]
    assert changes["runs"][0]["last"]["loss"] == "nan"  # NaN is not valid JSON
    assert not later["reset"]
    assert [row.get("loss") for row in later["steps"]] == [0.125, None]
    assert later["evaluations"] == []
    # Resumed: what came after step 50 is no longer valid.
    append(run, [line("start", step=50, steps=200)])
    (again,) = update(server, f"{key}={later['cursor']}")["rows"]
    assert again["reset"]
    assert [row["step"] for row in again["evaluations"]] == [50]


def test_run_that_starts_later_appears(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m1clip.web.server.SCAN_SECONDS", 0.0)
    assert len(update(server)["runs"]) == 1
    full_run(tmp_path / "runs" / "two")
    assert [run["name"] for run in update(server)["runs"]] == ["one", "two"]


def test_idle_connections_do_not_block_requests(server: Server) -> None:
    before = threading.active_count()
    connections = [connect(server) for _ in range(200)]
    assert ask(server, "/style.css")[0] == 200
    assert threading.active_count() <= before + 130
    assert connections[0].recv(100) == b""  # the oldest was closed
    for connection in connections:
        connection.close()


def test_slow_connection_is_closed_after_a_timeout(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Handler.timeout is not None
    monkeypatch.setattr(Handler, "timeout", 0.1)
    # Closed before the word was sent.
    with connect(server) as slow, contextlib.suppress(ConnectionError):
        slow.sendall(b"GET / HT")
        assert slow.recv(100) == b""


def test_500_parallel_requests_are_answered(server: Server) -> None:
    def request(_: int) -> int:
        return ask(server, "/style.css")[0]

    with ThreadPoolExecutor(500) as pool:
        assert set(pool.map(request, range(500))) == {200}


def test_page_receives_plotted_fields_of_the_steps(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharpness = LogField(name="sharpness", curve="step", title="Sharpness", unit=" °")
    monkeypatch.setitem(FIELDS, sharpness.name, sharpness)
    status, body, headers = ask(server, "/fields.js")
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    _, step_fields, analyses = (line.removesuffix(";") for line in body.decode().splitlines())
    listed = json.loads(step_fields.removeprefix("const STEP_FIELDS = "))
    shown = {
        entry["name"]: entry for entry in json.loads(analyses.removeprefix("const ANALYSES = "))
    }
    assert shown.keys() == ANALYSES.keys()
    assert shown["modality_gap"]["path"] == "analysis/modality_gap"
    assert shown["layer_grad_norms"]["shown_as"] == "heat map"
    assert listed[0]["name"] == "loss"
    assert listed[-1] == {
        "name": "sharpness",
        "title": "Sharpness",
        "factor": 1.0,
        "unit": " °",
        "chance": "",
        "about_machine": False,
    }
    assert "step_seconds" not in {field["name"] for field in listed}
