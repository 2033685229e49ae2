"""The taxonomy of errors: everything that Holdfast raises on purpose.

HoldfastError
├─ ConfigError                 a setting is wrong; every fault at once; exit 78
├─ RequestError                becomes problem+json
│  ├─ InvalidRequest           422 · KeyReused 422
│  ├─ MalformedJson            400
│  ├─ Unauthenticated          401 · ScopeMissing 403 · Forbidden 403
│  ├─ JobNotFound              404
│  ├─ JobNotFinished           409 · JobFailed 409 · NothingToRequeue 409 · KeyInUse 409
│  ├─ ResultExpired            410
│  ├─ TooLarge                 413
│  ├─ UnsupportedMediaType     415
│  └─ TooManyQueued            429
├─ StoreUnavailable            503: Postgres cannot answer; nothing was promised
├─ BellsUnavailable            Redis is away: counted, never shown
│  └─ RedisFull                Redis has no room for a page: the job waits
├─ WorkError                   something went wrong in a slice; its class decides who pays
│  ├─ BackendFault             the whole backend
│  │  └─ SuspectFault          and it was well until it had these texts: they go alone from now on
│  ├─ RequestFault             these texts
│  ├─ AnswerFault              the vectors are wrong
│  ├─ SinkFault                one row was refused by the store of its target
│  └─ SourceFault              a trace query failed: 502, 503 or 504 where somebody waits for it
├─ LeaseLost                   the items are somebody else's now; nothing was changed
└─ FailedItemsRemain           ends a bell as failed on purpose, so that rq-dashboard shows it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

ERROR_TEXT_CHARACTERS = 300
FAULTS_SHOWN = 1000


class ErrorClass(StrEnum):
    """Why an attempt did not succeed: one closed list for the API, the logs, the metrics."""

    UNREACHABLE = "unreachable"
    SLOW = "slow"
    BUSY = "busy"
    BAD_CONFIG = "bad_config"
    UNCLEAR = "unclear"
    BAD_ANSWER = "bad_answer"
    BAD_INPUT = "bad_input"
    STORE_REJECT = "store_reject"
    OOM_KILLED = "oom_killed"
    TIMEOUT_KILLED = "timeout_killed"
    KILLED = "killed"
    SERVICE_STOP = "service_stop"
    CRASHED = "crashed"
    EXITED = "exited"
    LEASE_EXPIRED = "lease_expired"
    SOURCE_UNAVAILABLE = "source_unavailable"
    SOURCE_TIMEOUT = "source_timeout"
    SOURCE_FAILED = "source_failed"
    COUNT_MISMATCH = "count_mismatch"
    RESULT_TOO_LARGE = "result_too_large"
    RESULT_LOST = "result_lost"
    JOB_TIMEOUT = "job_timeout"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a request, and where it stands."""

    code: str
    message: str
    field: str | None = None
    index: int | None = None
    line: int | None = None


class HoldfastError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").split("\n")[0])

    @property
    def message(self) -> str:
        """What happened, in one short sentence without texts, keys or passwords."""
        return str(self.args[0])[:ERROR_TEXT_CHARACTERS]


class ConfigError(HoldfastError):
    """The settings are wrong."""

    code = "config_error"

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class RequestError(HoldfastError):
    """The request cannot be served as it is."""

    code = "invalid_request"
    status: ClassVar[int] = 422
    title: ClassVar[str] = "Invalid request"

    def __init__(
        self,
        message: str | None = None,
        *,
        faults: Sequence[Fault] = (),
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.faults = tuple(faults[:FAULTS_SHOWN])
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(RequestError):
    """Something in the request is not as the contract has it."""


class KeyReused(RequestError):
    """This Idempotency-Key was used with another request: send a new key."""

    code = "idempotency_key_reused"
    title = "Idempotency key reused"


class MalformedJson(RequestError):
    """The body is not JSON."""

    code = "malformed_json"
    status = 400
    title = "Malformed JSON"


class Unauthenticated(RequestError):
    """Send a valid key: Authorization: Bearer <key>, or the header apikey."""

    code = "unauthenticated"
    status = 401
    title = "Unauthenticated"


class ScopeMissing(RequestError):
    """The key lacks the scope that this call needs."""

    code = "scope_missing"
    status = 403
    title = "Scope missing"


class Forbidden(RequestError):
    """The request came from a place that may not send it."""

    code = "forbidden"
    status = 403
    title = "Forbidden"


class JobNotFound(RequestError):
    """There is no such job."""

    code = "job_not_found"
    status = 404
    title = "Job not found"


class JobNotFinished(RequestError):
    """The job is not finished: poll /api/job/<id> until its state is final."""

    code = "job_not_finished"
    status = 409
    title = "Job not finished"


class JobFailed(RequestError):
    """The job failed, so it has no result: see its errors, then requeue it."""

    code = "job_failed"
    status = 409
    title = "Job failed"


class NothingToRequeue(RequestError):
    """The job has no failed item that could be requeued."""

    code = "nothing_to_requeue"
    status = 409
    title = "Nothing to requeue"


class KeyInUse(RequestError):
    """A request with this Idempotency-Key is being stored: send it again in a moment."""

    code = "idempotency_in_progress"
    status = 409
    title = "Idempotency key in use"


class ResultExpired(RequestError):
    """The result is no longer kept; the job's summary is."""

    code = "result_expired"
    status = 410
    title = "Result expired"


class TooLarge(RequestError):
    """The body is over a limit of /api/limits."""

    code = "too_large"
    status = 413
    title = "Too large"


class UnsupportedMediaType(RequestError):
    """Send application/json or application/x-ndjson, without a Content-Encoding."""

    code = "unsupported_media_type"
    status = 415
    title = "Unsupported media type"


class TooManyQueued(RequestError):
    """Too many items of this client wait already: send the batch again later."""

    code = "too_many_queued"
    status = 429
    title = "Too many queued"


class StoreUnavailable(HoldfastError):
    """Postgres cannot answer now; nothing of this request was stored."""

    code = "store_unavailable"


class BellsUnavailable(HoldfastError):
    """Redis cannot answer now; the sweeper rings later."""

    code = "bells_unavailable"


class RedisFull(BellsUnavailable):
    """Redis has no room now: `maxmemory` is reached."""

    code = "redis_full"


class WorkError(HoldfastError):
    """A slice did not succeed; the class says who pays for it."""

    def __init__(
        self,
        error_class: ErrorClass,
        message: str,
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.retry_after_seconds = retry_after_seconds


class BackendFault(WorkError):
    """The backend as a whole is away, busy or misconfigured: nobody is charged."""


class SuspectFault(BackendFault):
    """The same, and it was well until it had these texts: one of them may be why."""


class RequestFault(WorkError):
    """The backend refused these texts: halve them until one stands alone.

    `is_size_limit`: the call was too big, no text is to blame. `retry_whole`: the cause is
    unclear, so the same call is worth one more try before it is halved.
    """

    def __init__(
        self,
        error_class: ErrorClass,
        message: str,
        *,
        is_size_limit: bool = False,
        retry_whole: bool = False,
    ) -> None:
        super().__init__(error_class, message)
        self.is_size_limit = is_size_limit
        self.retry_whole = retry_whole


class AnswerFault(WorkError):
    """The backend answered 200, but its vectors cannot be right."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorClass.BAD_ANSWER, message)


class SinkFault(WorkError):
    """The store of the target refused this row."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorClass.STORE_REJECT, message)


class SourceFault(WorkError):
    """A trace source could not be read: it is away, too slow, or refuses the query."""


class LeaseLost(HoldfastError):
    """The lease ended before the outcome was written; nothing was changed."""

    code = "lease_lost"


class FailedItemsRemain(HoldfastError):
    """Some items of the job failed: requeue them when the cause is gone."""

    code = "failed_items_remain"

    def __init__(self, failed: int, total: int) -> None:
        super().__init__(f"{failed} of {total} items failed")
