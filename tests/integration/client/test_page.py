"""The page's gateway with a real server: files, calls, the server's own answers, and who is refused."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import noise
from tests.support.servers.grpc_web import CONTENT_TYPE, TIMEOUT_S, framed, get, post, web_call
from tests.support.servers.serving import Serve, custom
from tests.support.servers.waiting import no_thread_left, wait_until
from trocar._page import gateway, serving
from trocar_api.v1 import extraction_pb2, model_pb2, server_pb2, tensor_pb2
from trocar_server.auth import Scope, TokenFile

INFO = "trocar_api.v1.ServerService/GetServerInfo"
LIST = "trocar_api.v1.ModelService/ListModels"
EXTRACT = "trocar_api.v1.ExtractionService/Extract"
INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED = 3, 5, 8, 14, 16
CHUNK = 1 << 20


def extract_request(model_id: str, values: np.ndarray, selector: str) -> list[bytes]:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=values.shape)
    head = extraction_pb2.ExtractRequest(model_id=model_id, inputs=[extraction_pb2.Input(tensor=spec)])
    head.taps.add(selector=selector, values=True)
    content = values.tobytes()
    chunks = [
        tensor_pb2.TensorChunk(offset_bytes=at, data=content[at : at + CHUNK])
        for at in range(0, len(content), CHUNK)
    ]
    rest = [extraction_pb2.ExtractRequest(chunks=[chunk]) for chunk in chunks]
    return [message.SerializeToString() for message in (head, *rest)]


def collected(messages: list[bytes]) -> bytes:
    replies = [extraction_pb2.ExtractResponse.FromString(message) for message in messages]
    return b"".join(chunk.data for reply in replies for chunk in reply.chunks)


class TestFiles:
    def test_the_page_asks_for_nothing_elsewhere(self, url: str) -> None:
        status, headers, body = get(url)
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert b"http" not in body
        assert "set-cookie" not in headers
        assert not any(name.startswith("access-control") for name in headers)

    @pytest.mark.parametrize("path", ["/page.js", "/style.css", "/icon.svg", "/cat.jpg"])
    def test_its_files_are_there(self, url: str, path: str) -> None:
        status, headers, body = get(url, path)
        assert status == 200
        assert body
        assert headers["x-content-type-options"] == "nosniff"
        status, again, empty = get(url, path, **{"If-None-Match": headers["etag"]})
        assert (status, empty) == (304, b"")
        assert get(url, path, "HEAD")[2] == b""
        assert again["etag"] == headers["etag"]

    def test_ranges_are_ignored(self, url: str) -> None:
        status, headers, body = get(url, "/page.js", Range="bytes=0-0,1-1,2-2,-1")
        assert status == 200
        assert len(body) == int(headers["content-length"]) > 10_000

    @pytest.mark.parametrize("path", ["/../gateway.py", "/%2e%2e/gateway.py", "/static/page.js", "/x", "//"])
    def test_there_is_nothing_else(self, url: str, path: str) -> None:
        assert get(url, path)[0] == 404

    @pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
    def test_other_methods_are_refused(self, url: str, method: str) -> None:
        assert get(url, "/", method)[0] == 405


class TestCalls:
    def test_a_reply_is_the_servers(self, url: str, client: trocar.Client) -> None:
        reply = web_call(url, LIST, b"")
        assert reply.code == 0
        (message,) = reply.messages
        listed = model_pb2.ListModelsResponse.FromString(message)
        assert [model.model_id for model in listed.models] == [model.model_id for model in client.models()]

    def test_a_failure_has_the_servers_code_and_words(self, url: str, client: trocar.Client) -> None:
        request = model_pb2.GetModelRequest(model_id="nönsense")
        reply = web_call(url, "trocar_api.v1.ModelService/GetModel", request.SerializeToString())
        with pytest.raises(trocar.NotFoundError) as failure:
            client.model("nönsense")
        assert (reply.messages, reply.code) == ([], NOT_FOUND)
        assert reply.details
        assert reply.details in str(failure.value)

    def test_large_tensors_travel_both_ways(self, serve: Serve) -> None:
        values = noise(4, 3, 512, 512)  # 12 MiB
        server = serve(models={"identity": custom(Identity)})
        with trocar.connect(server.address) as client, client.page() as page:
            reply = web_call(page.url, EXTRACT, *extract_request("identity", values, "identity"))
        assert reply.code == 0
        assert collected(reply.messages) == values.tobytes()

    def test_a_server_that_has_gone_is_told(self, serve: Serve) -> None:
        with trocar.connect("127.0.0.1:1", retries=0) as client, client.page() as page:
            reply = web_call(page.url, INFO, b"")
        assert reply.code == UNAVAILABLE

    @pytest.mark.parametrize(
        "path", ["grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "x", "a/b/c"]
    )
    def test_other_services_are_not_passed_on(self, url: str, path: str) -> None:
        content_type = {"content-type": "application/grpc-web+proto"}
        assert get(url, f"/{path}", "POST", **content_type)[0] == 404

    @pytest.mark.parametrize("content_type", ["", "application/json", "application/grpc", "text/plain"])
    def test_a_form_of_another_page_is_no_call(self, url: str, content_type: str) -> None:
        assert get(url, f"/{LIST}", "POST", **{"content-type": content_type})[0] == 415

    @pytest.mark.parametrize("body", [b"\x00\x00\x00\x00\x05ab", b"\x07\x00\x00\x00\x00", b"nonsense"])
    def test_a_body_that_is_no_frames_is_refused(self, url: str, body: bytes) -> None:
        reply = post(url, EXTRACT, body)
        assert (reply.messages, reply.code) == ([], INVALID_ARGUMENT)
        assert reply.details

    def test_a_body_that_is_announced_too_large_is_not_read(self, url: str) -> None:
        headers = {"content-type": CONTENT_TYPE, "content-length": str(1 << 40)}
        assert get(url, f"/{EXTRACT}", "POST", **headers)[0] == 413

    def test_a_call_ends_when_its_browser_goes(self, serve: Serve, gate: Gate) -> None:
        server = serve(models={"gated": custom(Gated, input_shape=(3,))})
        gate.hold()
        with trocar.connect(server.address) as client, client.page() as page:
            body = framed(*extract_request("gated", noise(1, 3), "last"))
            with connection_to(page.url) as caller:
                caller.sendall(head_of(page.url, len(body)) + body)
                assert gate.entered.wait(WAIT_S)
            assert gate.left.wait(WAIT_S)  # without `release`
        assert gate.was_aborted


class TestRefusals:
    def test_a_link_on_another_site_opens_the_page(self, url: str) -> None:
        clicked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert get(url, **clicked)[0] == 200
        call = {"content-type": CONTENT_TYPE, **clicked}
        assert get(url, f"/{LIST}", "POST", **call)[0] == 403

    @pytest.mark.parametrize(
        "headers",
        [
            {"host": "attacker.example"},
            {"origin": "http://attacker.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
    def test_other_pages_may_not_call(self, url: str, method: str, headers: dict[str, str]) -> None:
        status, sent, _ = get(
            url, f"/{LIST}", method, **{"content-type": "application/grpc-web+proto"}, **headers
        )
        assert status == 403
        assert not any(name.startswith("access-control") for name in sent)

    @pytest.mark.parametrize("name", ["origin", "host", "authorization", "content-type", "sec-fetch-site"])
    def test_a_header_that_is_given_twice_is_refused(self, url: str, name: str) -> None:
        netloc = urlsplit(url).netloc
        own = {
            "host": netloc,
            "content-type": CONTENT_TYPE,
            "origin": f"http://{netloc}",
            "sec-fetch-site": "same-origin",
            "authorization": "Bearer a",
        }
        twice = [*own.items(), (name, own[name])]
        head = "".join(f"{key}: {value}\r\n" for key, value in twice)
        with connection_to(url) as caller:
            caller.sendall(f"POST /{INFO} HTTP/1.1\r\n{head}content-length: 5\r\n\r\n".encode() + b"\0" * 5)
            assert caller.recv(1 << 16)[:12] == b"HTTP/1.1 400"

    @pytest.mark.parametrize("name", ["authorization", "x-request-id"])
    @pytest.mark.parametrize("value", ["Bearer t\xf6ken", "\xa0", "\xc3\xa9"])
    def test_a_header_that_grpc_does_not_take_is_refused_in_words(
        self, url: str, name: str, value: str
    ) -> None:
        head = head_of(url, 5).replace(b"\r\n\r\n", f"\r\n{name}: {value}\r\n\r\n".encode("latin-1"))
        with connection_to(url) as caller:
            caller.sendall(head + b"\0" * 5)
            reply = b""
            while name.encode() not in reply:
                part = caller.recv(1 << 16)
                assert part, reply
                reply += part
        assert reply[:12] == b"HTTP/1.1 400"

    def test_http_2_in_plain_text_is_refused(self, url: str) -> None:
        from h2.connection import H2Connection
        from h2.events import ResponseReceived

        connection = H2Connection()
        connection.initiate_connection()
        netloc = urlsplit(url).netloc
        connection.send_headers(
            1,
            [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", netloc)],
            end_stream=True,
        )
        with connection_to(url) as caller:
            caller.sendall(connection.data_to_send())
            events: list[object] = []
            while not any(isinstance(event, ResponseReceived) for event in events):
                part = caller.recv(1 << 16)
                if not part:
                    return  # ended, as good
                events += connection.receive_data(part)
                caller.sendall(connection.data_to_send())
        (reply,) = [event for event in events if isinstance(event, ResponseReceived)]
        assert dict(reply.headers or ())[b":status"] == b"505"

    def test_an_upgrade_to_http_2_is_not_taken(self, url: str) -> None:
        netloc = urlsplit(url).netloc
        head = f"GET / HTTP/1.1\r\nhost: {netloc}\r\nconnection: upgrade, http2-settings\r\n"
        with connection_to(url) as caller:
            caller.sendall(f"{head}upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n".encode())
            received = b""
            while b"505" not in received and b"200" not in received:
                part = caller.recv(1 << 16)
                if not part:
                    break
                received += part
        assert b"<html" not in received

    def test_only_the_browsers_own_token_counts(self, serve: Serve, tmp_path: Path) -> None:
        now_s = time.time()
        _, token = TokenFile(tmp_path).add("full", Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)
        server = serve(models={"identity": custom(Identity)}, tokens=True, data_dir=tmp_path)
        with trocar.connect(server.address, token=token) as client, client.page() as page:
            assert client.models()
            assert web_call(page.url, LIST, b"").code == UNAUTHENTICATED
            assert web_call(page.url, LIST, b"", authorization="Bearer trocar_no").code == UNAUTHENTICATED
            assert web_call(page.url, LIST, b"", authorization=f"Bearer {token}").code == 0
            assert (
                web_call(page.url, LIST, b"", cookie=f"authorization=Bearer {token}").code == UNAUTHENTICATED
            )


class TestSlowCallers:
    def test_headers_that_do_not_come_end_the_connection(
        self, client: trocar.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "HEADER_TIMEOUT_S", 0.05)
        with client.page() as page, connection_to(page.url) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nhost: ")
            assert caller.recv(1 << 16) == b""

    def test_a_body_that_does_not_come_ends_the_call(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gateway, "BODY_TIMEOUT_S", 0.05)
        with connection_to(url) as caller:
            caller.sendall(head_of(url, 100) + b"\x00")
            received = b""
            while b"grpc-status" not in received:
                part = caller.recv(1 << 16)
                assert part, received
                received += part
        assert b"grpc-status: 3" in received

    def test_a_body_that_comes_byte_by_byte_ends_the_call(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gateway, "BODY_TIMEOUT_S", 0.3)
        with connection_to(url) as caller:
            caller.sendall(head_of(url, 100_000) + b"\0\0\1\0\0")
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(drip, caller)
                received = b""
                while b"grpc-status" not in received:
                    part = caller.recv(1 << 16)
                    assert part, received
                    received += part
                caller.close()
                assert sent.exception(WAIT_S) is not None
        assert b"grpc-status: 3" in received
        assert b"bytes a second" in received

    def test_headers_that_come_byte_by_byte_end_the_connection(
        self, client: trocar.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serving, "HEADER_TIMEOUT_S", 0.3)
        with client.page() as page, connection_to(page.url) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nx: ")
            with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
                drip(caller)

    def test_a_reply_that_is_not_read_ends_the_call(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gateway, "REPLY_TIMEOUT_S", 0.05)
        monkeypatch.setattr(gateway, "MAX_CALLS", 1)
        server = serve(models={"identity": custom(Identity)})
        body = framed(*extract_request("identity", noise(16, 3, 512, 512), "identity"))  # 48 MiB
        with trocar.connect(server.address) as client, client.page() as page:
            with connection_to(page.url) as caller:
                caller.sendall(head_of(page.url, len(body)) + body)
                assert caller.recv(16)
                wait_until(lambda: web_call(page.url, INFO, b"").code == 0)
            assert web_call(page.url, INFO, b"").code == 0

    @pytest.mark.parametrize("length", ["-1", "ten", "0x10", "1, 2"])
    def test_a_length_that_is_no_number_is_refused(self, url: str, length: str) -> None:
        with connection_to(url) as caller:
            caller.sendall(head_of(url, length))
            assert caller.recv(1 << 16)[:12] == b"HTTP/1.1 400"

    def test_a_body_of_unknown_length_ends_at_the_limit(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gateway, "MAX_BODY_BYTES", 1000)
        with connection_to(url) as caller:
            head = head_of(url, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
            caller.sendall(head + b"3e8\r\n" + b"\0\0\1\0\0" * 200 + b"\r\n1\r\n\0\r\n")
            received = b""
            while b"grpc-status" not in received:
                part = caller.recv(1 << 16)
                assert part, received
                received += part
        assert b"at most 1000 bytes" in received

    def test_a_message_over_the_limit_is_refused_by_its_head(self, url: str) -> None:
        reply = post(url, EXTRACT, b"\0\xff\xff\xff\xff")
        assert reply.code == INVALID_ARGUMENT
        assert "more than the" in reply.details

    def test_headers_that_are_too_long_are_refused(self, url: str) -> None:
        with connection_to(url) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * (64 << 10))
            assert caller.recv(1 << 16)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")


def test_more_calls_than_the_page_takes_are_refused(
    serve: Serve, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(models={"gated": custom(Gated, input_shape=(3,))})
    monkeypatch.setattr(gateway, "MAX_CALLS", 1)
    gate.hold()
    with trocar.connect(server.address) as client, client.page() as page, ThreadPoolExecutor(1) as pool:
        first = pool.submit(web_call, page.url, EXTRACT, *extract_request("gated", noise(1, 3), "last"))
        assert gate.entered.wait(WAIT_S)
        assert web_call(page.url, INFO, b"").code == RESOURCE_EXHAUSTED
        gate.release()
        assert first.result(WAIT_S).code == 0
        assert web_call(page.url, INFO, b"").code == 0


def drip(caller: socket.socket) -> None:
    """Send a byte every 50 ms."""
    never = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        caller.sendall(b"a")
        never.wait(0.05)


def head_of(url: str, length: int | str) -> bytes:
    """Head of an HTTP request that is a call."""
    head = f"POST /{EXTRACT} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
    return f"{head}content-type: {CONTENT_TYPE}\r\ncontent-length: {length}\r\n\r\n".encode()


def connection_to(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), TIMEOUT_S)


def test_a_page_ends_with_its_threads(client: trocar.Client) -> None:
    with no_thread_left("trocar-page"):
        page = client.page()
        assert get(page.url)[0] == 200
        page.close()
        page.close()
    with pytest.raises(ConnectionRefusedError):
        get(page.url)


def test_a_page_with_a_call_under_way_closes_in_order(
    serve: Serve, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(models={"gated": custom(Gated, input_shape=(3,))})
    gate.hold()
    with trocar.connect(server.address) as client, client.page() as page, connection_to(page.url) as caller:
        body = framed(*extract_request("gated", noise(1, 3), "last"))
        caller.sendall(head_of(page.url, len(body)) + body)
        assert gate.entered.wait(WAIT_S)
        page.close()
        received = b""
        while part := caller.recv(1 << 16):
            received += part
    assert b"grpc-status: 14\r\ngrpc-message: the page was closed" in received
    assert "Traceback" not in capsys.readouterr().err


def test_a_port_in_use_is_told(client: trocar.Client) -> None:
    with client.page() as page, pytest.raises(OSError, match="in use"):
        client.page(port=urlsplit(page.url).port or 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_every_address_at_once_is_refused(client: trocar.Client, host: str) -> None:
    with pytest.raises(ValueError, match="the one address under which it is opened"):
        client.page(host=host)


def test_a_page_in_a_notebook_is_a_link(client: trocar.Client) -> None:
    with client.page() as page:
        assert page._repr_html_() == f'<a href="{page.url}" target="_blank" rel="noopener">{page.url}</a>'
        assert repr(page) == f"Page('{page.url}')"


def test_the_server_info_is_readable(url: str) -> None:
    (message,) = web_call(url, INFO, b"").messages
    assert server_pb2.GetServerInfoResponse.FromString(message).version == trocar.__version__
