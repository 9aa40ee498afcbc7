"""The client of vision servers: where it sends photos, and how long it waits."""

import json
import socket
from typing import Any

import pytest
from small_run import TIMEOUT

from captioning.fake_server import Response, completion, serve
from m1clip.data.captioning import server as server_module
from m1clip.data.captioning.server import KEY_VARIABLE, ServerError, ServerUnavailable, VisionServer
from m1clip.errors import UserError


def ask(url: str, timeout: float = TIMEOUT) -> str:
    return VisionServer(url, timeout=timeout).describe_image(b"jpeg", "vision", "What?", 50).text


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "url", ["http://192.0.2.7:11434/v1", "https://192.0.2.7/v1", "http://[2001:db8::1]/v1"]
)
def test_other_computers_need_permission(url: str) -> None:
    with pytest.raises(UserError, match=r"your photos would leave it.*--allow-remote"):
        VisionServer(url)
    assert not VisionServer(url, allow_remote=True).address.is_loopback


def test_name_is_remote_if_one_of_its_addresses_is(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(2, 1, 6, "", (ip, 80)) for ip in ("127.0.0.1", "192.0.2.7")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(UserError, match="photos would leave"):
        VisionServer("http://localhost.example/v1")


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/v1", "127.0.0.1:11434", "http://", "http://127.0.0.1:99999999/v1", ""]
)
def test_what_is_no_url_is_an_error(url: str) -> None:
    with pytest.raises(UserError, match="--server"):
        VisionServer(url)


def test_credentials_in_a_url_are_rejected_without_showing_them() -> None:
    with pytest.raises(UserError) as caught:
        VisionServer("http://me:secret@127.0.0.1/v1")
    assert KEY_VARIABLE in str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_server_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(ServerUnavailable) as caught:
        VisionServer(f"http://127.0.0.1:{unused_port()}/v1").choose_model(None)
    message = str(caught.value)
    assert "\n" not in message
    for name in ("Ollama", "LM Studio", "llama.cpp"):
        assert name in message


def test_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_port()}")
    with serve(lambda *_: completion("A dog.")) as server:
        assert ask(server.url) == "A dog."


def test_redirects_are_not_followed() -> None:
    with serve(lambda *_: completion("A dog.")) as other:
        redirect = Response(b"", 307, {"Location": f"{other.url}/chat/completions"})
        with (
            serve(lambda *_: redirect) as server,
            pytest.raises(ServerUnavailable, match="redirects are not followed"),
        ):
            ask(server.url)
    assert not other.requests


def test_key_is_sent_only_if_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with serve(lambda *_: completion("A dog.")) as server:
        ask(server.url)
        monkeypatch.setenv(KEY_VARIABLE, "abc")
        ask(server.url)
    assert [headers.get("Authorization") for headers in server.headers] == [None, "Bearer abc"]


@pytest.mark.parametrize("body", [b"", b'{"choices": [', b'{"choices": []}'])
def test_hanging_answer_ends_with_the_timeout(body: bytes) -> None:
    with (
        serve(lambda *_: Response(body, length=100, hang=True)) as server,
        pytest.raises(ServerError, match=r"within 0\.1 s|took more than 0\.1 s") as caught,
    ):
        ask(server.url, timeout=0.1)
    assert caught.value.is_temporary


def test_closing_interrupts_a_hanging_answer() -> None:
    client: list[VisionServer] = []

    def close_then_hang(request: dict[str, Any], number: int) -> Response:
        client[0].close()
        return Response(b"", length=100, hang=True)

    with serve(close_then_hang) as server:
        client.append(VisionServer(server.url, timeout=1000.0))
        with pytest.raises(ServerError):
            client[0].describe_image(b"jpeg", "vision", "What?", 50)
        with pytest.raises(ServerError, match="interrupted"):
            client[0].describe_image(b"jpeg", "vision", "What?", 50)


def test_closing_while_a_request_connects_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at this moment waited for the answer, for up to two minutes."""
    with serve(lambda request, number: Response(b"", hang=True, length=10)) as server:
        client = VisionServer(server.url, timeout=TIMEOUT)
        secure = client._secured

        def close_meanwhile(connection: socket.socket) -> socket.socket:
            client.close()
            return secure(connection)

        monkeypatch.setattr(client, "_secured", close_meanwhile)
        with pytest.raises(ServerError, match="interrupted"):
            client.describe_image(b"jpeg", "vision", "What?", 50)
        assert not server.requests


def test_model_is_chosen_or_listed() -> None:
    with serve(lambda *_: completion("")) as server:
        client = VisionServer(server.url)
        assert client.choose_model(None) == "vision"
        server.models = ["llava:latest", "mistral"]
        assert client.choose_model("mistral") == "mistral"
        assert client.choose_model("llava") == "llava"
        with pytest.raises(UserError, match=r"--model; .* has: llava:latest, mistral"):
            client.choose_model(None)
        with pytest.raises(UserError, match=r"--model gpt: .* has only: llava:latest, mistral"):
            client.choose_model("gpt")
        server.models = []
        with pytest.raises(UserError, match="has no model; load a vision model"):
            client.choose_model(None)


@pytest.mark.parametrize(
    "answer",
    [
        Response(b"<!doctype html>"),
        Response(b"Not Found", 404),
        Response(b'{"data": 5}'),
        Response(b"[]"),
        Response(b"", 302, {"Location": "http://192.0.2.7/"}),
    ],
)
def test_other_servers_are_recognized(answer: Response) -> None:
    with serve(lambda *_: completion("")) as server:
        server.models = answer
        with pytest.raises(ServerUnavailable) as caught:
            VisionServer(server.url).choose_model(None)
        assert server.url in str(caught.value)


def test_names_of_models_that_cannot_be_shown_are_left_out() -> None:
    with serve(lambda *_: completion("")) as server:
        server.models = ["\x1b[31mred", "half \ud83d", "two\nlines", "\u202egpj", "vision"]
        assert VisionServer(server.url).models() == ["vision"]


def test_answer_that_ends_early_is_reported_as_such() -> None:
    with (
        serve(lambda *_: Response(b'{"choices": [', length=100)) as server,
        pytest.raises(ServerError, match="ended early") as caught,
    ):
        ask(server.url)
    assert caught.value.is_temporary


def test_messages_of_a_server_stay_on_one_line() -> None:
    error = json.dumps({"error": {"message": "bad\n\x1b[2Jwords " * 500}}).encode()
    with serve(lambda *_: Response(error, 400)) as server, pytest.raises(ServerError) as caught:
        ask(server.url)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2 * server_module.DETAIL_LENGTH


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("9999", 30.0), ("Wed", None)])
def test_retry_after_is_bounded(header: str, seconds: float | None) -> None:
    with (
        serve(lambda *_: Response(b"", 429, {"Retry-After": header})) as server,
        pytest.raises(ServerError) as caught,
    ):
        ask(server.url)
    assert caught.value.retry_after == seconds
