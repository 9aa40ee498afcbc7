"""The web server: what it serves, to whom, and what it never serves."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from monitor.made_runs import append, full_run, step

from m1clip.web.server import Handler, Server, Store, key_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    full_run(tmp_path / "runs" / "one")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "runs" / "one" / "snapshots" / "thumbnails" / "9.jpg").symlink_to(tmp_path / "secret.txt")
    made = Server(Store([tmp_path / "runs"]), 0)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(timeout=10)


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def events(server: Server, path: str, count: int, after: Any = None) -> list[tuple[str, Any]]:
    """The first events of a stream; `after` is called once the first has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    found: list[tuple[str, Any]] = []
    while len(found) < count:
        name = answer.readline().decode()
        if name.startswith("event: "):
            found.append((name[7:].strip(), json.loads(answer.readline().decode()[6:])))
            if len(found) == 1 and after is not None:
                after()
    connection.close()
    return found


def test_it_listens_on_loopback_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_every_part_of_the_page_is_there_with_strict_headers(server: Server) -> None:
    status, body, headers = ask(server, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    for name in ("/app.js", "/plots.js", "/views.js", "/uplot.js", "/style.css", "/uplot.css"):
        assert f'"{name}"'.encode() in body
        assert ask(server, name)[0] == 200
    assert "innerHTML" not in ask(server, "/views.js")[1].decode() + ask(server, "/app.js")[1].decode()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_other_host_names_are_refused(server: Server, host: str) -> None:
    assert ask(server, "/", Host=host)[0] == 403
    assert ask(server, "/api/runs", Host=host)[0] == 403


def test_own_host_names_are_accepted_and_other_sites_refused(server: Server) -> None:
    for host in ("localhost", "localhost:1234", "127.0.0.1:80", "[::1]:9"):
        assert ask(server, "/api/runs", Host=host)[0] == 200, host
    assert ask(server, "/api/runs", Origin="https://evil.example")[0] == 403
    assert ask(server, "/api/runs", Origin="null")[0] == 403
    assert ask(server, "/api/runs", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(server, "/api/runs", Origin="http://localhost:1")[0] == 200


def test_no_file_outside_the_run_is_served(server: Server, tmp_path: Path) -> None:
    key = key_of(tmp_path / "runs" / "one")
    status, image, _ = ask(server, f"/thumbnail?run={key}&index=1")
    assert (status, image[:2]) == (200, b"\xff\xd8")
    for path in (
        *(f"/thumbnail?run={key}&index={index}" for index in ("9", "../../config", "-1", "²", "1.0", "")),
        *("/thumbnail?run=..&index=1", f"/thumbnail?run={tmp_path}&index=1", "/thumbnail", "/api/snapshot"),
        *(f"/api/snapshot?run={key}&index=7", "/../secret.txt", "/%2e%2e/secret.txt", "/page/app.js", "/run.jsonl"),
    ):
        status, body, _ = ask(server, path.replace("²", "%C2%B2"))
        assert status == 404, path
        assert b"secret" not in body
    assert ask(server, f"/api/snapshot?run={key}&index=50")[0] == 200


def test_only_get_is_answered(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("POST", "/api/runs", body=b"{}")
    assert connection.getresponse().status == 501
    connection.close()


def test_the_stream_sends_everything_and_then_what_is_new(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    key = key_of(run)
    found = events(server, f"/api/live?runs={key},nonsense", 4, after=lambda: append(run, [step(102, loss=0.125)]))
    assert [kind for kind, _ in found[:2]] == ["rows", "runs"]
    first, later = (value for kind, value in found if kind == "rows")
    assert first["reset"]
    assert [row["step"] for row in first["steps"]] == list(range(2, 101, 2))
    assert [row["step"] for row in first["evaluations"]] == [50, 100]
    assert not later["reset"]
    assert [row["loss"] for row in later["steps"]] == [0.125]
    assert later["evaluations"] == later["layers"] == []
    summary = next(value for kind, value in found if kind == "runs")[0]
    assert (summary["name"], summary["state"], summary["steps"]) == ("one", "finished", 100)


def test_a_run_that_starts_later_appears(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.web.server.SCAN_SECONDS", 0.0)
    assert len(json.loads(ask(server, "/api/runs")[1])) == 1
    full_run(tmp_path / "runs" / "two")
    assert [run["name"] for run in json.loads(ask(server, "/api/runs")[1])] == ["one", "two"]


def test_nan_is_sent_as_valid_json(server: Server, tmp_path: Path) -> None:
    append(tmp_path / "runs" / "one", [step(104, loss="nan")])
    (run,) = json.loads(ask(server, "/api/runs")[1], parse_constant=pytest.fail)
    assert run["last"]["loss"] == "nan"


def idle(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20)


def test_idle_connections_take_no_thread_and_do_not_block_requests(server: Server) -> None:
    before = threading.active_count()
    connections = [idle(server) for _ in range(400)]
    assert ask(server, "/api/runs")[0] == 200
    assert threading.active_count() <= before + 1
    assert connections[0].recv(100).startswith(b"HTTP/1.1 503 ")  # the oldest made room
    for connection in connections:
        connection.close()


def test_an_idle_connection_is_closed_after_a_timeout(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m1clip.web.server.IDLE", 0.1)
    with idle(server) as silent:
        assert silent.recv(100).startswith(b"HTTP/1.1 503 ")
    monkeypatch.setattr(Handler, "timeout", 0.1)
    with idle(server) as half:
        half.sendall(b"GET / HT")
        assert half.recv(100) == b""


def test_each_of_500_parallel_requests_is_answered(server: Server) -> None:
    connections = [http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60) for _ in range(500)]

    def request(connection: http.client.HTTPConnection) -> int:
        connection.request("GET", "/style.css")
        return connection.getresponse().status

    with ThreadPoolExecutor(500) as pool:
        answers = Counter(pool.map(request, connections))
    assert answers.total() == 500
    assert set(answers) <= {200, 503}
    assert answers[200] >= 100


def test_streams_leave_threads_for_requests(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "streams", threading.Semaphore(1))
    with idle(server) as stream:
        stream.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.1 200 ")
        assert ask(server, "/api/live")[0] == 503
        assert ask(server, "/api/runs")[0] == 200
