"""One suite for the shelf of embedders: whatever stands on it keeps the same contract."""

import os
import pkgutil
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import pytest

from app.adapters import embedders, http
from app.adapters.embedders.local import Local, preload
from app.core.errors import (
    AnswerFault,
    BackendFault,
    ConfigError,
    ErrorClass,
    RequestFault,
    WorkError,
)
from app.core.model import check_vectors
from app.core.ports import Embedder, EmbedderOptions, find
from tests import fakes
from tests.fakes import NEVER, Fake, Reply, vector_of

SHELF = sorted(module.name for module in pkgutil.iter_modules(embedders.__path__))
IN_PROCESS = {"local": EmbedderOptions("", "", "multilingual-e5-small", 384)}
OVER_HTTP = [name for name in SHELF if name not in IN_PROCESS]
DIMENSION = 8
SECONDS = 20.0
SHORT = 0.4
"""Seconds: for calls that can only end by their deadline."""
KEY = "sk-0123456789abcdef"
TEXTS = ["first text", "second text", "第三の文", "the fourth, a little longer than the others"]


@pytest.fixture
def backend() -> Iterator[Fake]:
    with Fake(dimension=DIMENSION) as fake:
        yield fake


@pytest.fixture(params=OVER_HTTP)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def embedder(name: str, backend: Fake) -> Iterator[Embedder]:
    made = make(name, backend.url)
    yield made
    made.close()


@pytest.fixture(params=SHELF)
def anyone(request: pytest.FixtureRequest, backend: Fake) -> Iterator[Embedder]:
    made = make(request.param, backend.url)
    yield made
    made.close()


def make(name: str, url: str) -> Embedder:
    options = IN_PROCESS.get(name, EmbedderOptions(url, KEY, "m", DIMENSION))
    embedder: Embedder = find("embedders", name)(options)
    return embedder


def model_of(embedder: Embedder) -> str:
    return IN_PROCESS[embedder.name].model if embedder.name in IN_PROCESS else "m"


def embed(
    embedder: Embedder, texts: Sequence[str] = TEXTS, *, seconds: float = SECONDS
) -> list[list[float]]:
    """Embed and prove the answer, as a worker does."""
    vectors = embedder.embed(texts, model=model_of(embedder), seconds=seconds)
    dimension = 384 if embedder.name in IN_PROCESS else DIMENSION
    check_vectors(vectors, count=len(texts), dimension=dimension)
    return vectors


def fault_of(
    embedder: Embedder, texts: Sequence[str] = TEXTS, *, seconds: float = SECONDS
) -> WorkError:
    with pytest.raises(WorkError) as caught:
        embed(embedder, texts, seconds=seconds)
    return caught.value


def right(texts: Sequence[str]) -> list[list[float]]:
    return [vector_of("m", text, DIMENSION) for text in texts]


def test_each_embedder_carries_the_name_by_which_it_is_found(anyone: Embedder) -> None:
    assert anyone.name in SHELF


def test_no_text_is_no_call_and_no_vector(anyone: Embedder, backend: Fake) -> None:
    assert anyone.embed([], model=model_of(anyone), seconds=SECONDS) == []
    assert backend.calls == []


def test_one_text_has_one_vector(anyone: Embedder) -> None:
    assert len(embed(anyone, TEXTS[:1])) == 1


def test_each_text_gets_its_own_vector_whatever_its_neighbours(anyone: Embedder) -> None:
    forwards = embed(anyone, TEXTS)
    backwards = embed(anyone, TEXTS[::-1])

    assert forwards == backwards[::-1]
    assert forwards == [embed(anyone, [text])[0] for text in TEXTS]
    assert len({tuple(vector) for vector in forwards}) == len(TEXTS)


def test_a_text_that_is_not_unicode_is_its_own_fault_and_never_sent(
    anyone: Embedder, backend: Fake
) -> None:
    fault = fault_of(anyone, ["good", "half a pair \ud800"])

    assert isinstance(fault, RequestFault)
    assert (fault.error_class, fault.retry_whole) == (ErrorClass.BAD_INPUT, False)
    assert backend.calls == []


def test_vectors_are_those_that_the_backend_made(embedder: Embedder) -> None:
    assert embed(embedder) == right(TEXTS)


def test_a_long_list_goes_out_as_one_call_on_one_connection(
    embedder: Embedder, backend: Fake
) -> None:
    texts = [f"text {number}" for number in range(500)]

    assert embed(embedder, texts) == right(texts)
    assert embed(embedder, texts) == right(texts)

    assert [call.items for call in backend.calls] == [500, 500]
    assert backend.connections == 1


def test_the_key_is_sent_as_a_bearer_token(embedder: Embedder, backend: Fake) -> None:
    embed(embedder)

    assert backend.requests[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_user_in_the_url_is_sent_as_basic_where_there_is_no_key(name: str, backend: Fake) -> None:
    url = backend.url.replace("//", "//aladdin:opensesame@")
    embedder = find("embedders", name)(EmbedderOptions(url, "", "m", DIMENSION))

    embed(embedder)

    embedder.close()
    assert backend.requests[0].headers["authorization"] == "Basic YWxhZGRpbjpvcGVuc2VzYW1l"


def test_no_proxy_of_the_environment_is_used(
    name: str, backend: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    embedder = make(name, backend.url)

    assert embed(embedder) == right(TEXTS)

    embedder.close()


AWAY = (BackendFault, ErrorClass.UNREACHABLE, False, False)
BUSY = (BackendFault, ErrorClass.BUSY, False, False)
MISCONFIGURED = (BackendFault, ErrorClass.BAD_CONFIG, False, False)
BROKEN = (RequestFault, ErrorClass.UNREACHABLE, False, True)
SLOW = (RequestFault, ErrorClass.SLOW, False, False)
UNCLEAR = (RequestFault, ErrorClass.UNCLEAR, False, True)
BAD_INPUT = (RequestFault, ErrorClass.BAD_INPUT, False, False)
TOO_BIG = (RequestFault, ErrorClass.BAD_INPUT, True, False)
BAD_ANSWER = (AnswerFault, ErrorClass.BAD_ANSWER, False, False)

Verdict = tuple[type[WorkError], ErrorClass, bool, bool]


def verdict(fault: WorkError) -> Verdict:
    """Return kind, class, is_size_limit, retry_whole."""
    is_size_limit = isinstance(fault, RequestFault) and fault.is_size_limit
    retry_whole = isinstance(fault, RequestFault) and fault.retry_whole
    return type(fault), fault.error_class, is_size_limit, retry_whole


ANSWERS: list[tuple[Reply, Verdict]] = [
    (Reply(status=502, error="bad gateway"), AWAY),
    (Reply(status=504, error="gateway timeout"), AWAY),
    (Reply(status=429, error="rate limit", code="rate_limit_exceeded"), BUSY),
    (Reply(status=503, error="server busy, please try again"), BUSY),
    (Reply(status=424, error="the batch failed in the backend"), BUSY),
    (Reply(status=401, error="no such key"), MISCONFIGURED),
    (Reply(status=403, error="not for you"), MISCONFIGURED),
    (Reply(status=404, error="model 'm' not found, try pulling it first"), MISCONFIGURED),
    (Reply(status=405, error="method not allowed"), MISCONFIGURED),
    (Reply(status=301, headers={"Location": "/elsewhere"}), MISCONFIGURED),
    (Reply(status=408, error="request timeout"), UNCLEAR),
    (Reply(status=409, error="conflict"), UNCLEAR),
    (Reply(status=500, error="out of memory"), UNCLEAR),
    (Reply(status=418, error="a teapot"), UNCLEAR),
    (Reply(status=599, error="what is this"), UNCLEAR),
    (Reply(status=500, error="failed to encode response: json: unsupported value: NaN"), BAD_INPUT),
    (Reply(status=400, error="embedding contains NaN or Inf values"), BAD_INPUT),
    (Reply(status=400, error="the input length exceeds the context length"), BAD_INPUT),
    (Reply(status=422, error="`inputs` must have less than 512 tokens. Given: 513"), BAD_INPUT),
    (Reply(status=413, error="`inputs` must have less than 512 tokens. Given: 513"), BAD_INPUT),
    (Reply(status=400, error="invalid input"), BAD_INPUT),
    (Reply(status=422, error="batch size 64 > maximum allowed batch size 32"), TOO_BIG),
    (Reply(status=400, error="Requested 9 tokens, max 5 tokens per request"), TOO_BIG),
    (Reply(status=413, error="Payload Too Large"), TOO_BIG),
    (Reply(body=b"<!doctype html><html><body>Sign in</body></html>"), BROKEN),
    (Reply(body=b""), BROKEN),
    (Reply(body=b'{"embeddings": [[0.1, 0.2'), BROKEN),
    (Reply(body=b"\xff\xfe"), BROKEN),
    (Reply(headers={"Content-Encoding": "gzip"}), BROKEN),
    (Reply(cut=0.5), BROKEN),
    (Reply(cut=0.0), BROKEN),
    (Reply(reset=0.5), BROKEN),
    (Reply(hang_up=True), BROKEN),
    (Reply(body=b'{"error": "x"}'), BAD_ANSWER),
    (Reply(body=b"null"), BAD_ANSWER),
    (Reply(body=b"[]"), BAD_ANSWER),
    (Reply(body=b'{"embeddings": 4, "data": 4}'), BAD_ANSWER),
    (Reply(body=b'{"embeddings": [1, 2, 3, 4], "data": [1, 2, 3, 4]}'), BAD_ANSWER),
    (Reply(bend=fakes.missing), BAD_ANSWER),
    (Reply(bend=lambda entries: [*entries, *entries[:1]]), BAD_ANSWER),
    (Reply(bend=lambda _: []), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.nans)), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.nans, "fourth")), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.nulls, "fourth")), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.strings, "fourth")), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.empty, "fourth")), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.zeros, "fourth")), BAD_ANSWER),
    (Reply(bend=fakes.embedding(fakes.of_dimension(7))), BAD_ANSWER),
    (Reply(bend=fakes.embedding(lambda _: "AACAPwAAAAA=")), BAD_ANSWER),
]


@pytest.mark.parametrize(("reply", "expected"), ANSWERS)
def test_each_answer_has_its_class_and_the_next_call_is_served(
    reply: Reply, expected: Verdict, embedder: Embedder, backend: Fake
) -> None:
    backend.when(reply, times=1)

    fault = fault_of(embedder)

    assert verdict(fault) == expected
    assert len(fault.message) <= 300
    assert "<" not in fault.message
    assert embed(embedder) == right(TEXTS)
    assert len(backend.calls) == 2


@pytest.mark.parametrize(
    ("route", "expected"),
    [("max_items", TOO_BIG), ("max_tokens", TOO_BIG), ("max_characters", BAD_INPUT)],
)
def test_limits_are_told_apart_from_texts_in_the_words_of_each_server(
    route: str, expected: Verdict, embedder: Embedder, backend: Fake
) -> None:
    setattr(backend.limits, route, 1)

    assert verdict(fault_of(embedder)) == expected


def test_a_refused_connection_is_the_backends_fault(embedder: Embedder, backend: Fake) -> None:
    embed(embedder)

    with backend.refused():
        assert verdict(fault_of(embedder)) == AWAY
    assert embed(embedder) == right(TEXTS)


def test_a_host_without_an_address_is_the_backends_fault(name: str) -> None:
    embedder = make(name, "http://nowhere.invalid:1")

    assert verdict(fault_of(embedder)) == AWAY

    embedder.close()


def test_a_host_that_does_not_take_connections_is_the_backends_fault(name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with socket.create_connection(address):  # the queue is full now: the next one waits
            embedder = make(name, f"http://127.0.0.1:{address[1]}")

            assert verdict(fault_of(embedder, seconds=SHORT)) == AWAY

            embedder.close()


def test_a_server_without_tls_is_the_backends_fault(name: str, backend: Fake) -> None:
    embedder = make(name, backend.url.replace("http:", "https:"))

    assert verdict(fault_of(embedder)) == AWAY

    embedder.close()


def test_a_handshake_that_never_ends_is_the_backends_fault(name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        embedder = make(name, f"https://127.0.0.1:{listener.getsockname()[1]}")

        assert verdict(fault_of(embedder, seconds=SHORT)) == AWAY

        embedder.close()


@pytest.mark.parametrize(
    "reply",
    [
        Reply(delay_seconds=NEVER),
        Reply(stall=0.0),
        Reply(stall=0.5),
        Reply(drip_seconds=0.02, headers={"X-Padding": "-" * 400}, drip_headers=True),
        Reply(drip_seconds=0.02, body=b" " * 10**6),
    ],
    ids=["silent", "headers only", "half", "drip of headers", "drip of body"],
)
def test_a_call_ends_at_its_deadline_whatever_still_arrives(
    reply: Reply, embedder: Embedder, backend: Fake
) -> None:
    embed(embedder)  # connects, so that all of the short time is the call's
    backend.when(reply, times=1)

    assert verdict(fault_of(embedder, seconds=SHORT)) == SLOW
    assert embed(embedder) == right(TEXTS)


def test_a_call_ends_at_its_deadline_while_it_is_sent(name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        embedder = make(name, f"http://127.0.0.1:{listener.getsockname()[1]}")

        assert verdict(fault_of(embedder, ["x" * 2**25], seconds=SHORT)) == SLOW

        embedder.close()


def test_a_call_ends_at_its_deadline_while_it_is_taken_a_little_at_a_time(name: str) -> None:
    size, taken, is_over = 2**26, 0, threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        embedder = make(name, f"http://127.0.0.1:{listener.getsockname()[1]}")

        def take() -> None:
            nonlocal taken
            with listener.accept()[0] as connection:
                while not is_over.wait(0.005):
                    taken += len(connection.recv(2**18))

        taker = threading.Thread(target=take)
        taker.start()
        assert verdict(fault_of(embedder, ["x" * size], seconds=SHORT)) == SLOW
        is_over.set()
        taker.join()

        embedder.close()
    assert 0 < taken < size / 2


def test_an_error_counts_by_its_status_even_where_its_text_never_comes(
    embedder: Embedder, backend: Fake
) -> None:
    backend.when(Reply(status=503, error="busy, and slow to say so", stall=0.5))

    assert verdict(fault_of(embedder, seconds=1.5)) == BUSY


def test_of_an_error_only_the_beginning_is_awaited(embedder: Embedder, backend: Fake) -> None:
    backend.when(Reply(status=503, body=b"x" * 400_000, stall=0.5))

    assert verdict(fault_of(embedder, seconds=NEVER)) == BUSY


def test_an_answer_over_the_cap_is_not_read_to_its_end(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES", 100)

    assert verdict(fault_of(embedder)) == BAD_ANSWER


def test_a_redirect_is_not_followed(embedder: Embedder, backend: Fake) -> None:
    with Fake(dimension=DIMENSION) as other:
        for status in (301, 302, 303, 307, 308):
            backend.when(Reply(status=status, headers={"Location": other.url}), times=1)

            assert verdict(fault_of(embedder)) == MISCONFIGURED
        assert other.connections == 0


@pytest.mark.parametrize("status", [429, 503, 424, 502])
def test_the_wait_that_a_backend_asks_for_is_passed_on(
    status: int, embedder: Embedder, backend: Fake
) -> None:
    reply = Reply(status=status, error="later", headers={"Retry-After": "4"})
    backend.when(reply, times=1)
    backend.when(Reply(status=status, error="later"), times=1)

    assert fault_of(embedder).retry_after_seconds == 4
    assert fault_of(embedder).retry_after_seconds is None


SECRETS = [*TEXTS, KEY, "opensesame", "aladdin"]


@pytest.mark.parametrize("status", [400, 401, 422, 429, 500, 503])
@pytest.mark.parametrize("shape", ["JSON", "plain text"])
def test_no_message_repeats_a_text_or_a_key(
    status: int, shape: str, name: str, backend: Fake
) -> None:
    url = backend.url.replace("//", "//aladdin:opensesame@")
    echo = "refused: " + " | ".join(SECRETS)
    body = echo.encode() if shape == "plain text" else None
    backend.when(Reply(status=status, error=echo, body=body))
    embedder = make(name, url)

    fault = fault_of(embedder)

    embedder.close()
    assert fault.message.startswith(f"{status}: refused")
    assert not [secret for secret in SECRETS if secret in f"{fault.message} {fault!r}"]


def test_one_embedder_serves_several_threads(embedder: Embedder, backend: Fake) -> None:
    gate = threading.Event()
    backend.when(Reply(until=gate))
    answers: dict[str, list[list[float]]] = {}

    def work(text: str) -> None:
        answers[text] = embed(embedder, [text])

    threads = [threading.Thread(target=work, args=(text,)) for text in TEXTS]
    for thread in threads:
        thread.start()
    backend.wait_for(lambda fake: fake.at_once == len(TEXTS))
    gate.set()
    for thread in threads:
        thread.join()

    assert answers == {text: right([text]) for text in TEXTS}


def test_ollama_is_told_never_to_cut(backend: Fake) -> None:
    embedder = make("ollama", backend.url)

    embed(embedder)

    embedder.close()
    assert backend.requests[0].route == "/api/embed"
    assert backend.requests[0].body == {"model": "m", "input": TEXTS, "truncate": False}


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_openai_takes_a_url_with_or_without_its_version(tail: str, backend: Fake) -> None:
    embedder = make("openai", backend.url + tail)

    embed(embedder)

    embedder.close()
    assert backend.requests[0].route == "/v1/embeddings"
    assert backend.requests[0].body == {"model": "m", "input": TEXTS, "encoding_format": "float"}


@pytest.fixture
def openai(backend: Fake) -> Iterator[Embedder]:
    made = make("openai", backend.url)
    yield made
    made.close()


def test_openai_places_vectors_by_index(openai: Embedder, backend: Fake) -> None:
    backend.when(Reply(bend=fakes.backwards))

    assert embed(openai) == right(TEXTS)


@pytest.mark.parametrize("bend", [fakes.without_index, fakes.same_index])
def test_openai_believes_entries_that_name_no_text_one_by_one_only(
    bend: fakes.Bend, openai: Embedder, backend: Fake
) -> None:
    backend.when(Reply(bend=bend))

    assert verdict(fault_of(openai)) == BAD_ANSWER
    assert [embed(openai, [text])[0] for text in TEXTS] == right(TEXTS)


@pytest.mark.parametrize("index", [-1, 4, 1.0, "1", None])
def test_openai_refuses_an_index_that_is_none(
    index: object, openai: Embedder, backend: Fake
) -> None:
    data = [{"index": place, "embedding": [1.0] * DIMENSION} for place in range(4)]
    body = orjson.dumps({"data": [*data[:3], {**data[3], "index": index}]})
    backend.when(Reply(body=body))

    assert verdict(fault_of(openai)) == BAD_ANSWER


@pytest.fixture
def local() -> Local:
    embedder = find("embedders", "local")(IN_PROCESS["local"])
    assert isinstance(embedder, Local)
    return embedder


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_local_vectors_have_norm_one(local: Local) -> None:
    for vector in embed(local):
        assert dot(vector, vector) == pytest.approx(1, abs=1e-5)


def test_local_finds_the_text_of_the_same_meaning_in_another_language(local: Local) -> None:
    documents = embed(
        local,
        [
            "Die Pumpe im Kesselhaus verliert Öl und muss abgedichtet werden.",
            "Der Speiseplan der Kantine für nächste Woche hängt am Eingang.",
            "Neue Mitarbeiter bekommen ihren Ausweis am ersten Tag.",
        ],
    )

    question = local.embed_query(
        "Which machine has an oil leak?", model=model_of(local), seconds=SECONDS
    )

    scores = [dot(question, document) for document in documents]
    assert max(scores) == scores[0]


def test_local_gives_up_between_two_texts(local: Local) -> None:
    assert verdict(fault_of(local, seconds=0.0)) == SLOW


def test_local_refuses_what_its_engine_would_cut_in_silence(local: Local) -> None:
    assert verdict(fault_of(local, ["good", "half\0of this"])) == BAD_INPUT


def test_local_serves_its_one_model_only(local: Local) -> None:
    with pytest.raises(BackendFault) as caught:
        local.embed(TEXTS, model="bge-m3:latest", seconds=SECONDS)

    assert verdict(caught.value) == MISCONFIGURED


def test_local_names_all_that_is_wrong_with_its_options() -> None:
    with pytest.raises(ConfigError) as caught:
        find("embedders", "local")(EmbedderOptions("", "", "bge-m3:latest", 1024))

    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "EMBEDDING_MODEL",
        "EMBEDDING_DIM",
    ]


def test_local_works_in_a_fork_of_a_process_that_has_used_it(local: Local) -> None:
    preload()
    expected = embed(local)
    reading, writing = os.pipe()

    child = os.fork()
    if not child:
        os.write(writing, orjson.dumps(embed(local)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        has_answered = select.select([answer], [], [], 60)[0]
        if not has_answered:
            os.kill(child, 9)
        sent = answer.read()
    os.waitpid(child, 0)

    assert orjson.loads(sent) == expected


def test_to_import_the_shelf_loads_no_model() -> None:
    code = "import sys, app.adapters.embedders.local as l; l.build; print('numpy' in sys.modules)"

    ran = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(http.__file__).parents[2],
    )

    assert ran.stdout.strip() == "False"
