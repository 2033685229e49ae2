"""nginx before the API, by deploy/nginx/holdfast.conf: lines pass, slow clients hold no thread."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    JSON,
    LINES,
    Door,
    Ground,
    Served,
    as_line,
    make_backend,
    make_ground,
    serving,
)
from tests.conftest import free_port
from tests.processes import ROOT, open_folder, wait_for

CONFIG = ROOT / "deploy" / "nginx" / "holdfast.conf"
NGINX, OPENSSL = shutil.which("nginx", path="/usr/sbin:/usr/bin"), shutil.which("openssl")
THREADS = 2

pytestmark = pytest.mark.skipif(
    NGINX is None or OPENSSL is None, reason="nginx or openssl is not installed"
)

MAIN = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/none; uwsgi_temp_path {folder}/none; scgi_temp_path {folder}/none;
    include {folder}/holdfast.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """nginx as its clients see it, with a certificate that they trust."""

    port: int
    trusted: ssl.SSLContext

    @property
    def url(self) -> str:
        """Where it is."""
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        """Open a client."""
        return httpx.Client(base_url=self.url, verify=self.trusted, trust_env=False, timeout=60)

    def connect(self) -> ssl.SSLSocket:
        """Open a bare connection."""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self.trusted.wrap_socket(link, server_hostname="127.0.0.1")


@contextmanager
def proxying(upstream_port: int) -> Generator[Proxy]:
    """Start nginx before a port, by the file of deploy/ with ports and a certificate of its own."""
    port = free_port()
    with open_folder() as folder:
        text = CONFIG.read_text("utf-8")
        for old, new in (
            ("127.0.0.1:8000", f"127.0.0.1:{upstream_port}"),
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("/etc/ssl/", f"{folder}/"),
        ):
            assert old in text
            text = text.replace(old, new)
        (folder / "holdfast.conf").write_text(text, "utf-8")
        (folder / "nginx.conf").write_text(MAIN.format(folder=folder), "utf-8")
        make = [str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test"]
        make += ["-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        make += ["-keyout", f"{folder}/holdfast.key", "-out", f"{folder}/holdfast.pem"]
        subprocess.run(make, check=True, capture_output=True)
        command = [str(NGINX), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
        with subprocess.Popen(command) as running:
            try:
                wait_for(lambda: running.poll() is not None or _listens(port))
                assert running.poll() is None, (folder / "error.log").read_text("utf-8")
                trusted = ssl.create_default_context(cafile=f"{folder}/holdfast.pem")
                yield Proxy(port, trusted)
            finally:
                running.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def narrow(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the ground with two threads, one of which may read a stream."""
    environ = {**ground.environ, "WEB_THREADS": str(THREADS), "MAX_STREAMS": "1"}
    with serving(environ, tmp_path_factory.mktemp("narrow") / "api.log") as served:
        yield served


@pytest.fixture(scope="module")
def proxy(narrow: Served) -> Iterator[Proxy]:
    """Put nginx before it."""
    with proxying(narrow.address[1]) as running:
        yield running


@pytest.fixture
def key(ground: Ground) -> str:
    """Give a key of a client with every scope."""
    return str(ground.door("somebody", "submit", "read", "requeue", "admin").key)


@pytest.fixture
def through(proxy: Proxy, key: str) -> Iterator[Door]:
    """Give the API as a client behind nginx sees it."""
    with proxy.client() as client:
        yield Door(client, key)


def test_a_batch_a_poll_and_a_result_pass(ground: Ground, through: Door) -> None:
    job_id = through.post(ground.new_items("one", "two")).job_id
    ground.work(job_id)

    assert through.get(f"/api/job/{job_id}?wait=1").json["state"] == "completed"
    lines = through.get(f"/api/job/{job_id}/result", {"Accept": LINES}).lines
    assert [line.get("outcome") for line in lines if "index" in line] == ["done", "done"]


def test_the_api_reads_lines_while_the_client_still_sends_them(
    ground: Ground, through: Door, narrow: Served
) -> None:
    items = ground.new_items("first", "second")
    more = threading.Event()

    def sent() -> Iterator[bytes]:
        yield as_line(items[0])
        assert more.wait(60)
        yield as_line(items[1])

    def is_the_only_stream_taken() -> bool:
        other = narrow.door(through.key).post_lines(ground.new_items("another"))
        return other.status == 429 and other.code == "too_many_queued"

    with ThreadPoolExecutor(1) as pool:
        try:
            posted = pool.submit(through.post_raw, sent(), "", {"Content-Type": LINES})
            wait_for(is_the_only_stream_taken)
        finally:
            more.set()

        assert posted.result(60).json["accepted"] == 2


def test_clients_that_send_slowly_hold_no_thread_of_the_api(
    proxy: Proxy, narrow: Served, key: str, ground: Ground
) -> None:
    [item] = ground.new_items("slowly")
    body = b'{"items": [' + as_line(item) + b"]}"
    head = (
        "POST /api/embeddings HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\n"
        f"Content-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with ExitStack() as stack:
        slow = [stack.enter_context(proxy.connect()) for _ in range(THREADS + 2)]
        for link in slow:
            link.sendall(head + body[:20])

        assert narrow.door(key).get("/api/jobs").status == 200

        for link in slow:
            link.sendall(body[20:])
        answers = [link.makefile("rb").readline() for link in slow]
    assert [line.split()[1] for line in answers] == [b"202"] * len(slow)


def test_too_large_a_body_is_refused_as_the_api_would(proxy: Proxy, key: str) -> None:
    with proxy.connect() as link:
        link.sendall(
            f"POST /api/embeddings HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: {JSON}\r\nContent-Length: {2**30}\r\n\r\n".encode()
        )
        said = link.makefile("rb").read().decode()

    assert said.startswith("HTTP/1.1 413 ")
    assert "application/problem+json" in said
    assert '"code":"too_large"' in said


def test_a_person_logs_in_and_the_cookie_is_for_tls_only(proxy: Proxy, key: str) -> None:
    with proxy.client() as client:
        page = client.post("/login", data={"key": key}, headers={"Origin": proxy.url})
        assert page.status_code == 303
        assert "Secure" in page.headers["set-cookie"]
        assert client.get("/rq/").status_code == 200


def test_an_api_that_is_away_is_said_in_its_own_manner() -> None:
    with proxying(free_port()) as proxy, proxy.client() as client:
        answer = client.get("/api/jobs")

        assert (answer.status_code, answer.headers["retry-after"]) == (502, "5")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "bad_gateway"
        streamed = client.post("/api/embeddings", content=b"{}", headers={"Content-Type": LINES})
        assert (streamed.status_code, streamed.json()["status"]) == (502, 502)


@pytest.fixture
def told() -> Iterator[tuple[int, threading.Event]]:
    """Give an upstream that sends one line, and the next only when it is told to."""
    more = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            lines = [b'{"n": 1}\n', b'{"n": 2}\n']
            self.send_response(200)
            self.send_header("Content-Type", LINES)
            self.send_header("Content-Length", str(len(b"".join(lines))))
            self.end_headers()
            self.wfile.write(lines[0])
            assert more.wait(60)
            self.wfile.write(lines[1])

        log_message: Callable[..., None] = lambda *_: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], more
        more.set()
        server.shutdown()
        thread.join()


def test_lines_of_an_answer_are_not_held_back(told: tuple[int, threading.Event]) -> None:
    port, more = told
    with proxying(port) as proxy, proxy.client() as client:
        asked = {"Accept": LINES}
        with client.stream("GET", "/api/job/x/result", headers=asked) as answer:
            lines = answer.iter_lines()
            assert next(lines) == '{"n": 1}'
            more.set()
            assert list(lines) == ['{"n": 2}']
