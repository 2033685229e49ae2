"""The tables of the HTTP client: what each answer of a backend means."""

import json
from collections.abc import Mapping

import httpx
import orjson
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from app.adapters.http import (
    ECHO_CHARACTERS,
    EXCEPTIONS,
    HTML_PAGE,
    RETRY_AFTER_CAP_SECONDS,
    Http,
    Told,
    exception_fault,
    read_error,
    retry_after,
    status_fault,
)
from app.core.errors import BackendFault, ConfigError, ErrorClass, RequestFault, WorkError

HTTPX = [
    member
    for member in vars(httpx).values()
    if isinstance(member, type) and issubclass(member, Exception)
]
NAN = "failed to encode response: json: unsupported value: NaN"


@pytest.mark.parametrize("kind", HTTPX)
def test_each_exception_of_httpx_has_its_own_row(kind: type[Exception]) -> None:
    assert kind in EXCEPTIONS


def test_an_exception_that_is_no_row_counts_as_its_nearest_parent() -> None:
    class Tomorrow(httpx.ReadTimeout):
        """A class that httpx may grow."""

    assert exception_fault(Tomorrow("late")).error_class is ErrorClass.SLOW


@pytest.mark.parametrize("kind", [each for each in HTTPX if each is not httpx.ConnectError])
def test_no_text_of_an_exception_is_shown_but_why_there_is_no_connection(
    kind: type[Exception],
) -> None:
    secret = kind.__new__(kind)
    secret.args = ("Illegal header value b'Bearer sk-1'",)

    assert "sk-1" not in exception_fault(secret).message
    assert "refused" in exception_fault(httpx.ConnectError("[Errno 111] refused")).message


def test_a_404_is_for_a_person_and_a_503_for_the_clock() -> None:
    assert status_fault(404, {}, b"").error_class is ErrorClass.BAD_CONFIG
    assert status_fault(503, {}, b"").error_class is ErrorClass.BUSY


@given(status=st.integers(100, 599), body=st.binary(max_size=400))
@example(status=500, body=b"[" * 3000)
@example(status=422, body=b'{"detail": [1, {"loc": 1, "msg": 2}, null, {"loc": ["a", 1]}]}')
@example(status=400, body=b'{"error": {"message": "", "code": {"a": 1}}}')
def test_any_answer_that_is_no_success_has_a_short_printable_message(
    status: int, body: bytes
) -> None:
    fault = status_fault(status, {}, body)

    assert isinstance(fault, (BackendFault, RequestFault))
    assert fault.message.startswith(f"{status}: ")
    assert len(fault.message) <= 300
    assert fault.message.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "detail", "code", "type", "loc", "msg", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(body=JSON)
def test_any_json_is_read_as_an_error_body(body: object) -> None:
    sent = json.dumps(body).encode()

    assert isinstance(read_error(sent), Told)


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"error": "invalid input type"}, "invalid input type", ""),
        ({"error": "too many", "error_type": "Overloaded"}, "too many", "Overloaded"),
        (
            {"error": {"message": "no", "type": "invalid_request_error", "code": "a_code"}},
            "no",
            "a_code",
        ),
        ({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, "no", "400"),
        ({"error": {"message": "no", "type": "api_error", "code": None}}, "no", "api_error"),
        ({"message": "no", "code": 422, "type": "Validation"}, "no", "422"),
        ({"object": "error", "message": "no", "type": "x", "param": None}, "no", ""),
        ({"detail": "Not Found"}, "Not Found", ""),
        (
            {"detail": [{"loc": ["body", "input", 0], "msg": "too long", "input": "a text"}]},
            "body.input.0: too long",
            "",
        ),
        ({"something": "else"}, '{"something":"else"}', ""),
        ([], "[]", ""),
    ],
)
def test_the_error_bodies_of_all_servers_are_read(body: object, message: str, code: str) -> None:
    assert read_error(orjson.dumps(body)) == Told(message, code)


@pytest.mark.parametrize(
    "page",
    [
        "<html><head><title>502</title></head></html>",
        "\n <!DOCTYPE html>\n<html>",
        "<?xml version='1.0'?><error/>",
    ],
)
def test_a_page_is_told_as_a_page(page: str) -> None:
    for body in (page.encode(), orjson.dumps({"error": page})):
        assert status_fault(502, {}, body).message == f"502: {HTML_PAGE}"


def test_tags_and_control_characters_are_left_out() -> None:
    body = orjson.dumps({"error": "a\x00b\x1b[31m <b onclick='x'>bold</b>\n 3 < 4 <script>"})

    assert status_fault(500, {}, body).message == "500: a b [31m bold 3 < 4"


@given(
    text=st.text("äbc日 '.9", min_size=ECHO_CHARACTERS, max_size=200),
    before=st.text(max_size=50),
    after=st.text(max_size=50),
)
def test_a_text_that_comes_back_is_blanked(text: str, before: str, after: str) -> None:
    assume(text == " ".join(text.split()))
    body = json.dumps({"error": f"{before}{text}{after}"}).encode()

    message = status_fault(400, {}, body, hidden=[text]).message

    assert text not in message


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (["the secret of the house, all of it"], "400: bad text: '…' in row 3"),
        (["secret"], "400: bad text: 'the … of the house' in row 3"),
        (["text", "nothing like it"], "400: bad …: 'the secret of the house' in row 3"),
        (["a", "in"], "400: bad text: 'the secret of the house' in row 3"),
        ([], "400: bad text: 'the secret of the house' in row 3"),
    ],
)
def test_what_is_blanked_is_what_was_sent_in_part_or_in_whole(
    hidden: list[str], message: str
) -> None:
    body = b"bad text: 'the secret of the house' in row 3"

    assert status_fault(400, {}, body, hidden=hidden).message == message


BAD_INPUT = [
    "the input length exceeds the context length",
    "input exceeds maximum context length and cannot be truncated further",
    "This model's maximum context length is 8192 tokens, however you requested 9000 tokens",
    "Invalid 'input[0]': maximum input length is 8192 tokens.",
    "You passed 9000 input tokens. However, the model's context length is only 8192 tokens",
    "Input validation error: `inputs` must have less than 512 tokens. Given: 513",
    "input (600 tokens) is too large to process. increase the physical batch size (now 512)",
    "the example at index 0 in your batch does not fit into the model's context window",
    "embedding contains NaN or Inf values",
    NAN,
]
TOO_BIG = [
    "batch size 64 > maximum allowed batch size 32",
    "Requested 388052 tokens, max 300000 tokens per request",
    "Invalid 'input': array too long. Expected an array with maximum length 2048",
    "Too many inputs. The max number of inputs is 16.",
    "Batch size too large",
    "Too many tokens overall, split into more batches.",
    "The max allowed tokens per submitted batch is 120000.",
    "input: List should have at most 2048 items after validation, not 3000",
    "http: request body too large",
]


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("message", BAD_INPUT)
def test_what_blames_one_text_is_no_size_limit(status: int, message: str) -> None:
    fault = status_fault(status, {}, orjson.dumps({"error": message}))

    assert is_size_limit(fault) is False
    assert fault.error_class is ErrorClass.BAD_INPUT


@pytest.mark.parametrize("message", BAD_INPUT)
def test_what_blames_one_text_is_not_tried_again_as_it_is_even_with_a_500(message: str) -> None:
    fault = status_fault(500, {}, orjson.dumps({"error": {"message": message}}))

    assert isinstance(fault, RequestFault)
    assert (fault.error_class, fault.retry_whole) == (ErrorClass.BAD_INPUT, False)


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("message", TOO_BIG)
def test_what_names_the_whole_call_is_a_size_limit(status: int, message: str) -> None:
    assert is_size_limit(status_fault(status, {}, orjson.dumps({"error": message})))


@pytest.mark.parametrize("code", ["max_tokens_per_request", "array_above_max_length"])
def test_a_code_that_names_the_whole_call_is_a_size_limit_whatever_the_message(code: str) -> None:
    body = orjson.dumps({"error": {"message": "maximum context length", "code": code}})

    assert is_size_limit(status_fault(400, {}, body))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "invalid input"),
        (422, "an input is empty"),
        (429, "Rate limit reached on tokens per min: used 1, requested 2"),
        (500, "batch size"),
    ],
)
def test_anything_else_is_no_size_limit(status: int, message: str) -> None:
    assert not is_size_limit(status_fault(status, {}, orjson.dumps({"error": message})))


def is_size_limit(fault: WorkError) -> bool:
    return isinstance(fault, RequestFault) and fault.is_size_limit


@pytest.mark.parametrize(
    ("status", "wish", "expected"),
    [
        (400, "true", (ErrorClass.UNCLEAR, True)),
        (400, "false", (ErrorClass.BAD_INPUT, False)),
        (500, "false", (ErrorClass.UNCLEAR, False)),
        (500, "true", (ErrorClass.UNCLEAR, True)),
        (500, "maybe", (ErrorClass.UNCLEAR, True)),
    ],
)
def test_a_backend_that_knows_whether_to_try_again_is_believed(
    status: int, wish: str, expected: tuple[ErrorClass, bool]
) -> None:
    fault = status_fault(status, {"x-should-retry": wish}, b"")

    assert isinstance(fault, RequestFault)
    assert (fault.error_class, fault.retry_whole) == expected


DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "4"}, 4),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-4"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": "٤"}, None),
        ({"retry-after": "9" * 400}, RETRY_AFTER_CAP_SECONDS),
        ({"retry-after": "86400"}, RETRY_AFTER_CAP_SECONDS),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "1"}, 1),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": DATE}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 09:28:30 +0200", "date": DATE}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 -0000", "date": DATE}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT", "date": DATE}, None),
        ({"retry-after": "Thu, 22 Oct 2015 07:28:00 GMT", "date": DATE}, RETRY_AFTER_CAP_SECONDS),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "x"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, RETRY_AFTER_CAP_SECONDS),
    ],
)
def test_each_form_of_retry_after_is_read(
    headers: Mapping[str, str], seconds: float | None
) -> None:
    assert retry_after(headers) == seconds


@given(value=st.text(max_size=40), date=st.sampled_from([DATE, ""]))
@example(value="Wed, 21 Oct 2015 07:28:00 +99999999", date=DATE)
@example(value="Wed, 99 Oct 99999 07:28:00 GMT", date=DATE)
def test_any_retry_after_is_none_or_a_wait_within_the_cap(value: str, date: str) -> None:
    seconds = retry_after({"retry-after": value, "date": date})

    assert seconds is None or 0 < seconds <= RETRY_AFTER_CAP_SECONDS


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:11434",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:port",
        "http://host:99999",
        "http://host/?key=1",
        "http://host/#a",
        f"http://{'a' * 80}/",
        "http://ho\nst/",
    ],
)
def test_a_url_that_can_never_work_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        Http(url)


@pytest.mark.parametrize("key", ["two words", "line\n", "ключ", "\0"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Http("http://127.0.0.1:1", key=key)

    assert key not in str(caught.value)
