import inspect
import re

import pytest

from app.core import errors
from app.core.errors import (
    ERROR_TEXT_CHARACTERS,
    FAULTS_SHOWN,
    ErrorClass,
    Fault,
    HoldfastError,
    InvalidRequest,
    JobNotFound,
    RequestError,
    WorkError,
)

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, HoldfastError)
]
LEAVES = [each for each in CLASSES if not each.__subclasses__()]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_has_a_code_and_a_sentence(error: type[HoldfastError]) -> None:
    sentence = (error.__doc__ or "").split("\n")[0]

    assert re.fullmatch(r"[a-z_]+", error.code)
    assert sentence.endswith(".")
    assert len(sentence) <= ERROR_TEXT_CHARACTERS


def test_every_code_is_one_errors_own() -> None:
    shown = [each for each in LEAVES if not issubclass(each, WorkError)]

    assert len({each.code for each in shown}) == len(shown)


def test_every_error_stands_in_the_tree_that_the_module_draws() -> None:
    drawn = set(re.findall(r"[A-Z]\w+", errors.__doc__ or ""))

    assert {each.__name__ for each in CLASSES} <= drawn


def test_every_answer_to_a_request_is_a_fault_of_the_request() -> None:
    for each in CLASSES:
        if issubclass(each, RequestError):
            assert 400 <= each.status < 500
            assert each.title
            drawn = re.search(rf"\b{each.__name__} +(\d+)", errors.__doc__ or "")
            assert drawn is None or int(drawn[1]) == each.status


def test_the_message_is_the_sentence_of_the_class_unless_one_is_given() -> None:
    assert JobNotFound().message == "There is no such job."
    assert JobNotFound("gone").message == "gone"


def test_what_is_shown_is_cut() -> None:
    faults = [Fault("missing", "is required", index=index) for index in range(FAULTS_SHOWN + 1)]

    assert len(InvalidRequest("x" * 9999).message) == ERROR_TEXT_CHARACTERS
    assert len(InvalidRequest(faults=faults).faults) == FAULTS_SHOWN


def test_the_words_for_why_an_attempt_failed_are_their_own_names() -> None:
    for each in ErrorClass:
        assert each.value == each.name.lower()
