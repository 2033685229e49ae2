"""Bells: RQ jobs as wake-ups. A lost or doubled one changes nothing but time."""

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from rq import Queue
from rq.exceptions import (
    DeserializationError,
    DuplicateJobError,
    InvalidJobOperation,
    NoSuchJobError,
)
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.registry import FailedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from app.core.errors import HoldfastError
from app.core.link import Link, translated
from app.core.model import Rings, is_trace

TASK, TRACE_TASK = "worker.tasks.embed", "worker.tasks.trace"
"""The functions that bells call, by the kind of their job; named, so that nothing is imported."""

FINISHED_TTL_SECONDS = 3600
FAILED_TTL_SECONDS = 7 * 86400


BELL = re.compile(r"((?:emb|trace-evt)-[A-Za-z0-9]{8,64})-[0-9]{1,19}")
"""The id of a bell: its job's id, and the number that it was rung with."""

BELL_BYTES = 1024
"""More than the data of any bell, packed or not."""

MOVE = """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 1
   and redis.call('LINSERT', KEYS[1], ARGV[3], ARGV[2], ARGV[1]) < 1 then
    redis.call('RPUSH', KEYS[1], ARGV[1])
end
"""
"""Nothing where a worker has taken the bell meanwhile."""

DAY_SECONDS = 86400
HIGHEST_RUN = 2**31

READ_FIELDS = frozenset(
    {
        *(b"data", b"status", b"origin", b"timeout", b"description", b"worker_name"),
        *(b"created_at", b"enqueued_at", b"started_at", b"ended_at", b"last_heartbeat"),
    }
)
"""All that is read of what is stored for a bell: no callback, webhook, dependency, retry, rate
limit or metadata, and no packed error that could burst."""


class BellRefused(HoldfastError):
    """What is stored under a bell's id is not a bell of ours."""

    code = "bell_refused"


class BellJob(RqJob):
    """An RQ job that can be nothing but a bell: one of our tasks, a job id and a run.

    RQ imports and calls whatever name is stored, so whoever can write to Redis could run code
    here. What is no bell has a `refusal` instead, whatever is wrong with it: to raise while it is
    read would end the worker that took it from the queue.
    """

    TASKS: ClassVar[frozenset[str]] = frozenset({TASK, TRACE_TASK})

    def __init__(
        self,
        id: str | None = None,  # noqa: A002 - RQ's word
        connection: Link | None = None,
        serializer: object = None,  # noqa: ARG002 - nothing else than JSON, whoever asks
    ) -> None:
        super().__init__(id, connection, JSONSerializer)
        self.refusal: str | None = None

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Take over what is stored, or note why it is no bell.

        Raises NoSuchJobError where only a trace of it is left, such as a late heartbeat.
        """
        if b"data" not in raw_data:
            raise NoSuchJobError(self.id)
        known = {name: value for name, value in raw_data.items() if name in READ_FIELDS}
        self.refusal = _storage_fault(known)
        if self.refusal is None:
            try:
                super().restore(known)
                self.refusal = self._fault()
            except (ValueError, DeserializationError):
                self.refusal = "it cannot be read"
        if self.refusal is not None:
            self._empty()
        self.result_ttl, self.failure_ttl = FINISHED_TTL_SECONDS, FAILED_TTL_SECONDS

    def _empty(self) -> None:
        # It is stored again as failed, for people to see: then without what was in it.
        self._status = JobStatus.CREATED
        self.timeout = None
        self.func_name, self.instance, self.args, self.kwargs = "refused", None, [], {}

    def _fault(self) -> str | None:
        match = BELL.fullmatch(self.id)
        if match is None:
            return "its id is not that of a bell"
        if self.func_name not in [*self.TASKS] or self.instance is not None:
            return "it calls something else than a task of ours"
        if self.func_name != _task_of(match[1]):
            return "it calls the task of another kind of job"
        if self.kwargs != {} or not _are_arguments(cast("object", self.args), match[1]):
            return "its arguments are not its job and a run"
        return None

    @property
    def func(self) -> Callable[..., Any]:
        """The task to call. Raises BellRefused; nothing is imported then."""
        fault = self.refusal or self._fault()
        if fault is not None:
            raise BellRefused(f"refused: {fault}")
        return cast("Callable[..., Any]", super().func)

    def _fetch_status(self) -> JobStatus:
        # A status that is gone or unknown says nothing; RQ would end the worker, or take a horse
        # that was killed for one that had finished.
        try:
            return super()._fetch_status()
        except (InvalidJobOperation, ValueError):
            return JobStatus.CREATED


def _task_of(job_id: str) -> str:
    return TRACE_TASK if is_trace(job_id) else TASK


def _storage_fault(stored: Mapping[bytes, bytes]) -> str | None:
    """Say what is wrong with stored fields that RQ would stumble over, or unpack without end."""
    packed, timeout = stored[b"data"], stored.get(b"timeout", b"1")
    if len(packed) > BELL_BYTES:
        return f"its data has {len(packed)} bytes"
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(packed, BELL_BYTES)
    except zlib.error:
        return "its data is not packed"
    if not unpacker.eof:
        return f"its data is cut off, or unpacks to more than {BELL_BYTES} bytes"
    if not re.fullmatch(rb"[0-9]{1,6}", timeout) or not 0 < int(timeout) <= DAY_SECONDS:
        return "its time limit is not a number of seconds"
    return None


def _are_arguments(arguments: object, job_id: str) -> bool:
    match arguments:
        case [str(named), int(run)]:
            return named == job_id and not isinstance(run, bool) and 0 <= run < HIGHEST_RUN
        case _:
            return False


class BellQueue(Queue):
    """A queue of bells."""

    job_class = BellJob

    def move_dependents_to_ready(
        self,
        job: RqJob,  # noqa: ARG002
        pipeline: Any = None,  # noqa: ANN401, ARG002
        exclude_job_id: str | None = None,  # noqa: ARG002
        refresh_job_status: bool = True,  # noqa: ARG002, FBT001, FBT002
    ) -> dict[str, list[str]]:
        """Do nothing: no job depends on a bell, whatever is stored beside it."""
        return {}


class Bells:
    """RQ, reduced to what a bell needs. Every call may raise BellsUnavailable.

    One client for the life of the process: redis-py's script cache keeps each that it has seen.
    """

    def __init__(self, link: Link) -> None:
        self._redis = link
        self._move = cast("Callable[..., Any]", self._redis.register_script(MOVE))

    def ring(
        self, rings: Rings, *, queue: str, timeout_seconds: float, at_front: bool = False
    ) -> int:
        """Push the bells that `rings` has numbers for; return how many.

        Raises BellsUnavailable. A bell that is there already was rung by a first sending whose
        answer was lost, so that is success.
        """
        with translated():
            for number in range(rings.last - rings.bells + 1, rings.last + 1):
                self._push(f"{rings.job_id}-{number}", rings, queue, timeout_seconds, at_front)
        return rings.bells

    def _push(
        self,
        bell: str,
        rings: Rings,
        queue: str,
        timeout_seconds: float,
        at_front: bool,  # noqa: FBT001
    ) -> None:
        try:
            self._queue(queue).enqueue(
                _task_of(rings.job_id),
                rings.job_id,
                rings.run,
                job_id=bell,
                unique=True,
                at_front=at_front,
                job_timeout=int(timeout_seconds),
                result_ttl=FINISHED_TTL_SECONDS,
                failure_ttl=FAILED_TTL_SECONDS,
                description="bell",
            )
        except DuplicateJobError:
            return

    def first_waiting(self, queue: str, *, limit: int | None = None) -> list[str]:
        """Return the ids of the first bells that wait in a queue, or of all of them."""
        last = -1 if limit is None else limit - 1
        with translated():
            ids = cast("list[bytes]", self._redis.lrange(self._queue(queue).key, 0, last))
        return [_text(bell) for bell in ids]

    def move(self, queue: str, bell: str, *, other: str, is_behind: bool = True) -> None:
        """Move a bell that waits behind another, or before it; to the end where that is gone."""
        where = "AFTER" if is_behind else "BEFORE"
        with translated():
            self._move(keys=[self._queue(queue).key], args=[bell, other, where])

    def waiting(self, queue: str) -> list[str]:
        """Return the job id of every bell that waits in a queue, first one first."""
        return [job_of(bell) for bell in self.first_waiting(queue)]

    def others_wait(self, queue: str, job_id: str) -> bool:
        """Whether a bell of another job is among the first that wait in a queue."""
        with translated():
            ids = cast("list[bytes]", self._redis.lrange(self._queue(queue).key, 0, 99))
        return any(job_of(_text(bell)) != job_id for bell in ids)

    def forget_failed(self, queue: str, job_id: str) -> int:
        """Delete the failed bells of a job, which a requeue has answered; return how many."""
        registry = FailedJobRegistry(queue=self._queue(queue))
        with translated():
            ids = cast("list[bytes]", self._redis.zrange(registry.key, 0, -1))
            mine = [bell for bell in map(_text, ids) if job_of(bell) == job_id]
            if mine:
                self._redis.zrem(registry.key, *mine)
                for bell in mine:
                    result = Result.get_key(bell)  # type: ignore[no-untyped-call]
                    self._redis.delete(BellJob.key_for(bell), result)
        return len(mine)

    def failed(self, queue: str) -> list[str]:
        """Return the job id of every bell that RQ shows as failed."""
        registry = FailedJobRegistry(queue=self._queue(queue))
        with translated():
            ids = cast("list[bytes]", self._redis.zrange(registry.key, 0, -1))
        return [job_of(_text(bell)) for bell in ids]

    def facts(self) -> dict[str, Any]:
        """Return what a health check says of Redis: version, policy, run id."""
        with translated():
            info: dict[str, Any] = self._redis.info()
        policy = str(info.get("maxmemory_policy"))
        return {
            "version": str(info.get("redis_version")),
            "policy": policy,
            "evicts": policy not in ("noeviction", "None"),
            "persistent": bool(info.get("aof_enabled")),
            "run_id": str(info.get("run_id")),
        }

    def _queue(self, name: str) -> Queue:
        return BellQueue(name, connection=self._redis, serializer="json", job_class=BellJob)


def job_of(bell: str) -> str:
    """Return the job that a bell's id names: all but its number."""
    return bell.rpartition("-")[0]


def _text(bell: bytes) -> str:
    return bell.decode("ascii", "replace")
