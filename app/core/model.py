"""The words of Holdfast and the decisions that need nothing but their arguments."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, assert_never

from app.core.errors import (
    AnswerFault,
    BackendFault,
    ErrorClass,
    RequestFault,
    SinkFault,
    SuspectFault,
    WorkError,
)

BACKOFF_BASE_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 300.0
PAUSE_CAP_SECONDS = 60.0
INDEXED_DIMENSIONS, INDEXED_HALF_DIMENSIONS = 2000, 4000
"""The most that pgvector's HNSW takes of a vector, and of a halfvec."""

FLOAT32_MAX, FLOAT32_MIN = 3.4028234e38, 1.1754944e-38

EMBEDDINGS = "embeddings"
"""The queue of embedding bells; a project's own is `embeddings-<project>`."""

NO_TARGET = ""
"""What stands for the target_table of an item whose vector goes to the job's result alone."""

MEMORY_TARGET = "holdfast.memory_chunks"
"""The product's own target; its rows are written by ingests and by nobody else."""

EMBEDDING_PREFIX, TRACE_PREFIX = "emb-", "trace-evt-"
"""What the id of a job begins with tells its kind."""


class ItemStatus(StrEnum):
    """Where an item stands (ADR-009's words, and cancelled)."""

    PENDING = "pending"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


LEGAL_CHANGES: frozenset[tuple[ItemStatus, ItemStatus]] = frozenset(
    {
        (ItemStatus.PENDING, ItemStatus.PROCESSING),
        (ItemStatus.PENDING, ItemStatus.CANCELLED),
        (ItemStatus.PROCESSING, ItemStatus.DONE),
        (ItemStatus.PROCESSING, ItemStatus.PENDING),
        (ItemStatus.PROCESSING, ItemStatus.FAILED),
        (ItemStatus.PROCESSING, ItemStatus.CANCELLED),
        (ItemStatus.FAILED, ItemStatus.PENDING),
        (ItemStatus.DONE, ItemStatus.PENDING),
        (ItemStatus.CANCELLED, ItemStatus.PENDING),
    }
)
"""Every change of an item's status that exists; the trigger in the schema holds the same list."""


class JobState(StrEnum):
    """Where a job stands; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens to the job by itself."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many items of a job stand where; they add up to `total`."""

    pending: int = 0
    processing: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        """All items of the job."""
        return self.open + self.done + self.skipped + self.failed + self.cancelled

    @property
    def open(self) -> int:
        """Items that are not final."""
        return self.pending + self.processing


@dataclass(frozen=True, slots=True)
class Target:
    """A table and column that vectors are for, as registered in `embedding_targets`."""

    target_table: str
    embedding_version: str
    table_schema: str
    table_name: str
    id_column: str
    id_type: str
    vector_column: str
    dimension: int
    model: str
    client: str | None = None
    prefix: str = ""
    """Sent before each text, where the model wants one for what is to be found (E5)."""
    text_column: str | None = None
    """Where the text of a row can be read again."""
    is_current: bool = True

    @property
    def label(self) -> str:
        """How it is named where it is left alone for a time: table and version."""
        return f"{self.target_table} {self.embedding_version}"


def untargeted(model: str, dimension: int, version: str) -> Target:
    """Return what stands for the target of items that have none: the job's own result."""
    return Target(
        target_table=NO_TARGET,
        embedding_version=version,
        table_schema="",
        table_name="",
        id_column="",
        id_type="text",
        vector_column="",
        dimension=dimension,
        model=model,
    )


def place_of(target_id: str) -> tuple[str, int]:
    """Return the job and the position that the key of an item without a target is made of."""
    job_id, _, position = target_id.rpartition("/")
    return job_id, int(position)


@dataclass(frozen=True, slots=True)
class NewItem:
    """One accepted line of a batch."""

    position: int
    target_table: str
    target_id: str
    embedding_version: str
    model: str
    text: str
    content_hash: bytes
    custom_id: str | None
    metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Claim:
    """An item that this process may work on until its lease ends."""

    item_id: int
    lease_token: int
    target_table: str
    target_id: str
    embedding_version: str
    text: str
    attempts: int
    max_attempts: int
    kills: int


class Page(NamedTuple):
    """What is known of one stored page of a trace result; bytes and hash are of it compressed.

    A hash that nobody can aim at: whoever can write to Redis must not be able to change a result.
    """

    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of a segment, by domain: rows, seconds, pages; and what went wrong where."""

    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    pages: Mapping[str, Sequence[Page]]
    failures: Mapping[str, ErrorClass]
    error: WorkError | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The vector is stored."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """There is nothing to store the vector in."""

    reason: str


@dataclass(frozen=True, slots=True)
class Retry:
    """This attempt is spent; another comes."""

    error: WorkError
    after_seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """Given back uncharged: the fault was not the item's, or nobody knows yet."""

    error: WorkError
    after_seconds: float
    is_suspect: bool = False
    """Whether it is to be claimed alone next time."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No further attempt; a person decides."""

    error: WorkError


Outcome = Done | Skipped | Retry | Release | Failed


@dataclass(frozen=True, slots=True)
class Settlement:
    """An outcome for a claimed item, as one fenced statement writes it."""

    claim: Claim
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a client with the scopes of its key."""

    client: str
    scopes: frozenset[str]

    @property
    def is_admin(self) -> bool:
        """Whether every client's jobs are this caller's too."""
        return "admin" in self.scopes


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted POST."""

    id: str
    kind: str
    client: str
    state: JobState
    project: str
    priority: int
    run: int
    rings: int
    return_vectors: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    cancelled_at: datetime | None
    is_expired: bool
    read_at: float
    """When this was read, by Postgres' clock in seconds: never later than what was seen."""
    counts: Counts
    errors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rings:
    """Numbers for new bells of a job: the last of them, and how many."""

    job_id: str
    last: int
    bells: int
    run: int
    project: str
    priority: int


def decide(claim: Claim, error: WorkError | None) -> Outcome:
    """Turn what happened to one item, alone, into its outcome.

    The table is that of error classes: a backend's fault is never the item's, a text that was
    refused alone fails at once, and whatever is unclear is tried until the attempts are used up.
    """
    match error:
        case None:
            return Done()
        case BackendFault():
            is_suspect = isinstance(error, SuspectFault)
            return Release(error, error.retry_after_seconds or 0.0, is_suspect)
        case RequestFault(error_class=ErrorClass.BAD_INPUT):
            return Failed(error)
        case SinkFault():
            return Failed(error)
        case RequestFault() | AnswerFault() | WorkError():
            if claim.attempts >= claim.max_attempts:
                return Failed(error)
            return Retry(error, backoff(claim.attempts))
        case _:
            assert_never(error)


def backoff(
    tries: int,
    *,
    base_seconds: float = BACKOFF_BASE_SECONDS,
    cap_seconds: float = BACKOFF_CAP_SECONDS,
) -> float:
    """Return how long to wait after the n-th try: full jitter under a doubling bound.

    Never less than a tenth of the bound, so that a retry is always a later moment.
    """
    bound = min(cap_seconds, base_seconds * 2 ** min(tries, 30))
    return random.uniform(bound / 10, bound)  # noqa: S311 - jitter, not a secret


def check_vectors(vectors: Sequence[Sequence[float]], *, count: int, dimension: int) -> None:
    """Refuse an answer that cannot be right: count, dimension, numbers, finiteness, norm.

    Raises AnswerFault naming what was found and what was expected (P7).
    """
    if len(vectors) != count:
        raise AnswerFault(f"{len(vectors)} vectors for {count} texts")
    for position, vector in enumerate(vectors):
        problem = _vector_problem(vector, dimension)
        if problem:
            raise AnswerFault(f"vector {position + 1} of {count}: {problem}")


def index_note(dimension: int) -> str | None:
    """Say how a column of so many dimensions can be searched by index; None where as any other."""
    if dimension <= INDEXED_DIMENSIONS:
        return None
    if dimension <= INDEXED_HALF_DIMENSIONS:
        return f"{dimension} dimensions: an HNSW index only as halfvec({dimension})"
    return f"{dimension} dimensions: stored, but no HNSW index is possible"


def are_alike(texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> bool:
    """Whether different texts were all given the very same vector.

    That may be right: a model need not tell upper case from lower, or one space from two.
    """
    return all(vector == vectors[0] for vector in vectors) and len(set(texts)) > 1


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors that check_vectors let through; 0 where they differ in size.

    1 is the same direction.
    """
    if len(one) != len(other):
        return 0.0
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


def _vector_problem(vector: Sequence[float], dimension: int) -> str | None:
    if not isinstance(vector, list):
        return "not a list of numbers"
    if len(vector) != dimension:
        return f"{len(vector)} dimensions where the target has {dimension}"
    if not set(map(type, vector)) <= {float, int}:
        return "an element is not a number"
    try:
        norm = math.hypot(*vector)  # inf or nan as soon as one element is
    except OverflowError:  # a whole number beyond any float
        norm = math.inf
    if not norm < FLOAT32_MAX:
        return "an element is not finite"
    # Vectors are stored in 32 bits, where less than this is nothing.
    if norm < FLOAT32_MIN:
        return "all elements are zero"
    return None


def job_state(counts: Counts) -> JobState:
    """Return the final state of a job whose items are all final."""
    if counts.cancelled:
        return JobState.CANCELLED
    if not counts.failed:
        return JobState.COMPLETED
    if counts.done + counts.skipped:
        return JobState.COMPLETED_WITH_ERRORS
    return JobState.FAILED


def trace_state(counts: Counts, *, is_cancelled: bool, has_rows: bool) -> JobState:
    """Return the final state of a trace job whose segments have all ended.

    `has_rows`: something may be read of it, because all of it is there or because a partial result
    was asked for and something of it is.
    """
    if is_cancelled:
        return JobState.CANCELLED
    if not counts.failed:
        return JobState.COMPLETED
    return JobState.COMPLETED_WITH_ERRORS if has_rows else JobState.FAILED


def is_trace(job_id: str) -> bool:
    """Whether an id is that of a trace job."""
    return job_id.startswith(TRACE_PREFIX)


def bells_wanted(due: int, *, items_per_bell: int, most: int) -> int:
    """Return how many bells should ring for so many due items."""
    return min(most, math.ceil(due / items_per_bell))


def place_in_line(waiting: Sequence[str], mine: str) -> int | None:
    """Return behind which of the bells that wait a new one goes, by their clients; None: the last.

    Clients take turns: the n-th bell of one goes behind everybody's n-th and before any next one.
    """
    nth = waiting.count(mine) + 1
    seen: Counter[str] = Counter()
    behind: int | None = None
    for place, client in enumerate(waiting):
        seen[client] += 1
        if seen[client] <= nth:
            behind = place
    return None if behind == len(waiting) - 1 else behind


def queue_for(project: str, served: frozenset[str]) -> str:
    """Return the queue of a project: its own where a worker serves it, else the common one."""
    own = f"{EMBEDDINGS}-{project}"
    return own if project and own in served else EMBEDDINGS
