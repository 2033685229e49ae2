import itertools
import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import (
    AnswerFault,
    BackendFault,
    ErrorClass,
    RequestFault,
    SinkFault,
    SuspectFault,
    WorkError,
)
from app.core.model import (
    LEGAL_CHANGES,
    Claim,
    Counts,
    Done,
    Failed,
    ItemStatus,
    JobState,
    Outcome,
    Release,
    Retry,
    Skipped,
    are_alike,
    backoff,
    bells_wanted,
    check_vectors,
    cosine,
    decide,
    index_note,
    job_state,
    queue_for,
)

LIMIT = 5

FAULTS: list[WorkError] = [
    *(
        kind(error_class, "it broke")
        for kind in (BackendFault, SuspectFault, RequestFault, WorkError)
        for error_class in ErrorClass
    ),
    *(
        RequestFault(ErrorClass.UNCLEAR, "it broke", is_size_limit=big, retry_whole=whole)
        for big in (False, True)
        for whole in (False, True)
    ),
    AnswerFault("1 vectors for 2 texts"),
    SinkFault("23514 a check"),
]

STATUS_AFTER: dict[type[Outcome], ItemStatus] = {
    Done: ItemStatus.DONE,
    Skipped: ItemStatus.DONE,
    Retry: ItemStatus.PENDING,
    Release: ItemStatus.PENDING,
    Failed: ItemStatus.FAILED,
}


def claim(attempts: int) -> Claim:
    return Claim(
        item_id=1,
        lease_token=1,
        target_table="ai_insights",
        target_id="1",
        embedding_version="v1",
        text="text",
        attempts=attempts,
        max_attempts=LIMIT,
        kills=0,
    )


# ---- who pays


def test_every_fault_at_every_attempt_is_one_legal_change() -> None:
    for fault, attempts in itertools.product(FAULTS, range(1, LIMIT + 2)):
        case = f"{type(fault).__name__} {fault.error_class} at attempt {attempts}"

        outcome = decide(claim(attempts), fault)

        assert (ItemStatus.PROCESSING, STATUS_AFTER[type(outcome)]) in LEGAL_CHANGES, case
        if isinstance(outcome, Retry):
            assert attempts < LIMIT, case
        if isinstance(outcome, Failed):
            is_permanent = isinstance(fault, SinkFault) or fault.error_class is ErrorClass.BAD_INPUT
            assert attempts >= LIMIT or is_permanent, case


def test_without_a_fault_an_item_is_done() -> None:
    assert decide(claim(LIMIT), None) == Done()


def test_a_fault_of_the_backend_is_never_charged_whatever_its_class() -> None:
    for error_class in ErrorClass:
        fault = BackendFault(error_class, "away", retry_after_seconds=7.5)

        assert decide(claim(LIMIT), fault) == Release(fault, 7.5)


def test_what_a_backend_went_down_with_is_uncharged_and_under_suspicion() -> None:
    fault = SuspectFault(ErrorClass.UNREACHABLE, "away")

    assert decide(claim(LIMIT), fault) == Release(fault, 0.0, is_suspect=True)


def test_a_text_that_is_refused_alone_fails_at_its_first_attempt() -> None:
    too_long = RequestFault(ErrorClass.BAD_INPUT, "400: too long")
    refused = SinkFault("23514 a check")

    assert decide(claim(1), too_long) == Failed(too_long)
    assert decide(claim(1), refused) == Failed(refused)


@pytest.mark.parametrize(
    "fault",
    [
        RequestFault(ErrorClass.UNCLEAR, "500"),
        RequestFault(ErrorClass.SLOW, "60 s"),
        AnswerFault("zeros"),
        WorkError(ErrorClass.INTERNAL, "KeyError"),
    ],
)
def test_what_is_unclear_is_tried_until_the_attempts_are_used_up(fault: WorkError) -> None:
    outcomes = [type(decide(claim(attempts), fault)) for attempts in range(1, LIMIT + 1)]

    assert outcomes == [Retry] * (LIMIT - 1) + [Failed]


def test_no_status_leads_to_itself_and_a_final_one_only_back_to_pending() -> None:
    for old, new in itertools.product(ItemStatus, ItemStatus):
        if old is new:
            assert (old, new) not in LEGAL_CHANGES
        elif old not in (ItemStatus.PENDING, ItemStatus.PROCESSING):
            assert ((old, new) in LEGAL_CHANGES) == (new is ItemStatus.PENDING)


# ---- how long to wait


@given(
    tries=st.integers(0, 10_000),
    base_seconds=st.floats(0.01, 60),
    cap_seconds=st.floats(0.01, 3600),
)
def test_a_retry_is_always_later_and_never_later_than_the_bound(
    tries: int, base_seconds: float, cap_seconds: float
) -> None:
    seconds = backoff(tries, base_seconds=base_seconds, cap_seconds=cap_seconds)

    bound = min(cap_seconds, base_seconds * 2.0 ** min(tries, 60))
    assert 0 < bound / 10 * 0.999 <= seconds <= bound * 1.001


def test_retries_of_many_items_do_not_come_at_the_same_moment() -> None:
    assert len({backoff(5) for _ in range(100)}) > 90


# ---- what an answer must be

GOOD = [0.1, -0.2, 3.0]
BAD: dict[str, object] = {
    "short": [0.1, 0.2],
    "long": [0.1, 0.2, 0.3, 0.4],
    "empty": [],
    "not a list": (0.1, 0.2, 0.3),
    "a word": "abc",
    "nothing": None,
    "a mapping": {"0": 0.1, "1": 0.2, "2": 0.3},
    "a truth": [0.1, 0.2, True],
    "a string": [0.1, 0.2, "0.3"],
    "a hole": [0.1, None, 0.3],
    "a list inside": [0.1, [0.2], 0.3],
    "nan": [0.1, math.nan, 0.3],
    "infinity": [0.1, math.inf, 0.3],
    "minus infinity": [0.1, -math.inf, 0.3],
    "nan and infinity": [math.nan, math.inf, 0.3],
    "beyond 32 bits": [0.1, 1e39, 0.3],
    "together beyond 32 bits": [3e38, 3e38, 3e38],
    "beyond 64 bits": [0.1, 10**400, 0.3],
    "zeros": [0.0, 0.0, 0.0],
    "whole zeros": [0, 0, 0],
    "minus zeros": [-0.0, -0.0, -0.0],
    "zeros in 32 bits": [1e-60, -1e-60, 1e-60],
}


@pytest.mark.parametrize("vector", BAD.values(), ids=BAD.keys())
def test_a_vector_that_cannot_be_right_is_refused_by_its_place(vector: object) -> None:
    answer = [GOOD, vector]

    with pytest.raises(AnswerFault, match=r"^vector 2 of 2: ") as caught:
        check_vectors(answer, count=2, dimension=3)  # type: ignore[arg-type]

    assert caught.value.error_class is ErrorClass.BAD_ANSWER


@pytest.mark.parametrize("found", [0, 1, 3])
def test_another_number_of_vectors_than_texts_is_refused(found: int) -> None:
    with pytest.raises(AnswerFault, match=f"^{found} vectors for 2 texts$"):
        check_vectors([GOOD] * found, count=2, dimension=3)


def test_a_wrong_dimension_is_named_with_the_right_one() -> None:
    with pytest.raises(AnswerFault, match="2 dimensions where the target has 3"):
        check_vectors([[0.1, 0.2]], count=1, dimension=3)


@pytest.mark.parametrize(
    "vector", [GOOD, [1, 0, 0], [0.0, 0.0, 1e-6], [3.4e38, 0.0, 0.0], [-1.0, -1.0, -1.0]]
)
def test_a_vector_that_can_be_right_is_let_through(vector: list[float]) -> None:
    check_vectors([vector], count=1, dimension=3)


@pytest.mark.parametrize(
    ("dimension", "word"), [(2000, None), (2001, "halfvec"), (4000, "halfvec"), (4001, "no HNSW")]
)
def test_what_index_a_column_can_have_is_said_where_it_is_not_any(
    dimension: int, word: str | None
) -> None:
    note = index_note(dimension)

    assert (note is None) if word is None else word in str(note)


def test_only_one_vector_for_different_texts_is_suspicious() -> None:
    other = [0.1, -0.2, 3.0000001]

    assert are_alike(["a", "b"], [GOOD, [*GOOD]])
    assert are_alike(["a", "a", "b"], [GOOD] * 3)
    assert not are_alike(["a"], [GOOD])
    assert not are_alike(["a", "a"], [GOOD] * 2)
    assert not are_alike(["a", "b", "c"], [GOOD, GOOD, other])


@given(st.lists(st.integers(-1000, 1000), min_size=3, max_size=3).filter(any), st.floats(1e-6, 1e6))
def test_the_cosine_of_a_direction_with_itself_is_one_whatever_its_length(
    vector: list[int], factor: float
) -> None:
    longer = [factor * number for number in vector]

    assert math.isclose(cosine(vector, longer), 1, rel_tol=1e-9)
    assert math.isclose(cosine(vector, [-number for number in longer]), -1, rel_tol=1e-9)


def test_vectors_of_two_dimensions_have_nothing_in_common() -> None:
    assert cosine([1.0, 0.0], [0.0, 1.0]) == 0
    assert cosine([1.0, 0.0], [1.0, 0.0, 0.0]) == 0


@given(st.lists(st.floats(width=32), min_size=3, max_size=3))
def test_what_is_let_through_is_finite_and_has_a_length(vector: list[float]) -> None:
    try:
        check_vectors([vector], count=1, dimension=3)
    except AnswerFault:
        return
    assert 0 < math.hypot(*vector) < math.inf


# ---- jobs

FINAL = st.builds(
    Counts,
    done=st.integers(0, 3),
    skipped=st.integers(0, 3),
    failed=st.integers(0, 3),
    cancelled=st.integers(0, 3),
)


@given(FINAL)
def test_a_final_state_says_what_became_of_the_items(counts: Counts) -> None:
    state = job_state(counts)

    assert state.is_final
    assert (state is JobState.CANCELLED) == (counts.cancelled > 0)
    if state is JobState.COMPLETED:
        assert counts.total == counts.done + counts.skipped
    if state is JobState.FAILED:
        assert counts.failed == counts.total > 0
    if state is JobState.COMPLETED_WITH_ERRORS:
        assert counts.failed
        assert counts.done + counts.skipped


def test_counts_add_up_to_their_total() -> None:
    names = [each.name for each in fields(Counts)]
    counts = Counts(**{name: 10**place for place, name in enumerate(names)})

    assert counts.total == 111111
    assert counts.open == 11
    assert [state for state in JobState if not state.is_final] == [
        JobState.QUEUED,
        JobState.RUNNING,
    ]


@given(due=st.integers(1, 10**7), items_per_bell=st.integers(1, 1000), most=st.integers(1, 100))
def test_due_work_has_at_least_one_bell_and_no_more_than_allowed(
    due: int, items_per_bell: int, most: int
) -> None:
    bells = bells_wanted(due, items_per_bell=items_per_bell, most=most)

    assert 1 <= bells <= most
    assert bells == most or bells * items_per_bell >= due


def test_without_due_work_no_bell_is_wanted() -> None:
    assert bells_wanted(0, items_per_bell=64, most=8) == 0


@pytest.mark.parametrize(
    ("project", "queue"),
    [("", "embeddings"), ("mes", "embeddings-mes"), ("other", "embeddings")],
)
def test_a_project_has_its_own_queue_only_while_a_worker_serves_it(
    project: str, queue: str
) -> None:
    served = frozenset({"embeddings", "embeddings-mes", "embeddings-"})

    assert queue_for(project, served) == queue
    assert queue_for(project, frozenset()) == "embeddings"
