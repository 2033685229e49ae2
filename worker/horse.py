"""Our RQ worker: what it runs, how it stops, how it names a death, how it is seen to live."""

import gc
import logging
import mmap
import os
import re
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from resource import struct_rusage
from typing import Any, Self

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from rq import Queue, Worker, worker_registration
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job as RqJob
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.timeouts import HorseMonitorTimeoutException
from rq.utils import now

from app.core.bells import BellJob, BellQueue, Bells, job_of
from app.core.checks import warn_of_eviction, warn_of_targets
from app.core.config import Settings
from app.core.errors import ErrorClass, StoreUnavailable
from app.core.link import Link, connect
from app.core.model import is_trace
from app.core.store import fleet, items, traces
from app.core.store.database import Database, Tx, translated
from worker import tasks
from worker.notice import Notice
from worker.runtime import prepare, prepare_trace

log = logging.getLogger(__name__)

REDIS_RETRIES = 40
"""About 80 s: a worker that gives up sooner leaves its horse alone over a restart of Redis."""
REDIS_PAUSE_SECONDS = 2.0
AWAY = (redis.ConnectionError, redis.TimeoutError)


class UnsavedError(redis.ResponseError):
    """Redis takes nothing, as it could not save to its disk (MISCONF)."""


REFUSED = (redis.OutOfMemoryError, redis.ReadOnlyError, UnsavedError)
"""Redis is there and takes nothing: it is full, a replica, or its disk is. It can be read."""
CONNECT_SECONDS = 5.0
MONITOR_SECONDS = 15
MAINTENANCE_SECONDS = 60
BEAT_SECONDS = 5.0
"""The row in Postgres is written no more often, however fast bells follow each other."""
MISSED_BEATS = 3
BEAT_LIMIT_SECONDS = 5
LAST_LIMIT_SECONDS = 2
OOM_SCORE = "900"
MIB = 2**20
CRASHES = frozenset({signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})


def run(settings: Settings, queue: str) -> int:
    """Serve one queue until a stop is asked for, and return the exit code.

    Logging is the caller's. Raises ConfigError where an adapter cannot be used.
    """
    # Before numpy is imported, which an adapter may do: threads of its own would fight for the
    # cores, and not survive a fork.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # noqa: TID251 - a library's
    notice = Notice.of_service()
    queue = queue.partition(":")[0]  # embeddings:2 is how a service manager names a second worker
    serves_traces = queue == settings.trace_worker_queue
    recipe = prepare_trace(settings) if serves_traces else prepare(settings, queue)
    gc.freeze()  # what the parent loaded is not touched, and so not copied, by each horse
    stop = StopByte()
    tasks.STABLE.set(tasks.Stable(recipe, stop.is_set))
    worker = HoldfastWorker(settings, queue, stop=stop, notice=notice)
    facts = {"worker": worker.name, "queue": queue}
    log.info("Queue worker starting", extra={"event": "worker_start", **facts})
    notice.send("READY=1")  # whoever is away now is waited for while working
    try:
        worker.work(logging_level="WARNING", with_scheduler=False)
    except Exception:
        log.exception("Queue worker error", extra={"event": "worker_stop", **facts})
        return 1
    if not stop.is_set():  # RQ came to an end of itself, which it would call a success
        log.error("Queue worker error: it gave up", extra={"event": "worker_stop", **facts})
        return 1
    log.info("Queue worker stopped", extra={"event": "worker_stop", **facts})
    return 0


class StopByte:
    """A byte that a worker shares with its horses: whether a stop was asked for."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)

    def set(self) -> None:
        """Ask for the stop."""
        self._shared[0] = 1

    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._shared[0] != 0


class HoldfastWorker(Worker):
    """RQ's forking worker for one queue of bells.

    Redis is not trusted: a bell that is none is shown as failed, and none of it is run.
    """

    queue_class = BellQueue
    job_class = BellJob
    max_connection_wait_time = 5.0

    def __init__(self, settings: Settings, queue: str, *, stop: StopByte, notice: Notice) -> None:
        host = socket.gethostname()
        name = f"{host}-{queue}-{secrets.token_hex(4)}"  # RQ refuses a name that a dead one had
        self._patience = NotedRetry()
        connection = patient(settings.redis_url, name, self._patience)
        super().__init__(
            [BellQueue(queue, connection=connection, job_class=BellJob, serializer="json")],
            name=name,
            connection=connection,
            serializer="json",
            worker_ttl=settings.queue_wait_time + 15,
            job_monitoring_interval=MONITOR_SECONDS,
            maintenance_interval=MAINTENANCE_SECONDS,
            log_job_description=False,
        )
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._stop = stop
        self._notice = notice
        self._database = Database(settings.database_url, application=f"holdfast {name}")
        self._process = fleet.Process(name, "worker", queue, host, os.getpid())
        # An idle worker writes its row after each blocking read, a busy one at each look at its
        # horse. Two of them may be missed.
        self._alive_seconds = MISSED_BEATS * max(self.dequeue_timeout, MONITOR_SECONDS)
        self._next_beat = 0.0
        self._is_store_lost = False
        self._cgroup = MemoryCgroup.of_process()
        self._kills_before: int | None = None

    def _set_ip_address(self, connection: Link) -> None:  # noqa: ARG002 - RQ's signature
        self.ip_address = "unknown"  # RQ would ask Redis here, before anything may be waited for

    # ---- one bell ------------------------------------------------------------------------

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[RqJob, Queue] | None:
        """Wait for a bell, and step over what cannot even be the id of one."""
        while True:
            try:
                return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
            except UnicodeDecodeError as exc:
                self._drop(exc.object)
            except REFUSED:  # once more, as where Redis is away
                self.counters["redis_errors"] += 1
            except (ValueError, redis.ResponseError) as exc:
                bell = getattr(exc, "job_id", None)  # RQ's mark: it was taken from the queue
                if bell is None:
                    raise
                self._drop(bell)

    def _drop(self, bell: str | bytes) -> None:
        self.counters["bells_refused"] += 1
        shown = ascii(bell)[:80]
        log.warning("no bell, dropped: %s", shown, extra={"event": "bell_refused"})
        self.connection.lrem(self.queues[0].intermediate_queue_key, 1, bell)  # type: ignore[arg-type]

    def execute_job(self, job: RqJob, queue: Queue) -> None:
        """Have a horse follow a bell; show what is no bell as failed."""
        refusal = job.refusal if isinstance(job, BellJob) else "it is none"
        with self._despite_refusals():  # a bell that nobody has followed is rung again
            if refusal is not None:
                self._refuse(job, queue, refusal)
            else:
                self.counters["bells"] += 1
                super().execute_job(job, queue)

    def _refuse(self, job: RqJob, queue: Queue, refusal: str) -> None:
        self.counters["bells_refused"] += 1
        facts = {"event": "bell_refused", "bell": job.id, "queue": queue.name}
        log.warning("bell refused: %s", refusal, extra=facts)
        job.origin = queue.name
        self.connection.delete(job.key)  # nothing of it stays
        self.handle_job_failure(job, queue, exc_string=f"refused: {refusal}")
        queue.intermediate_queue.remove(job.id)

    def fork_work_horse(self, job: RqJob, queue: Queue) -> None:
        """Fork, knowing how many processes the kernel had killed before."""
        self._kills_before = self._kills()
        super().fork_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        """Begin as a horse: be the first to go where memory runs out, and wait for no refusal."""
        super().setup_work_horse_signals()  # type: ignore[no-untyped-call]
        self._patience.take_refusals()
        with suppress(OSError):  # no /proc: then the kernel chooses
            Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, "ascii")

    def perform_job(self, job: RqJob, queue: Queue, execution: Execution) -> bool:
        """Follow the bell; whether RQ can write how that went is nobody's matter but a person's."""
        try:
            return super().perform_job(job, queue, execution)
        except redis.RedisError as exc:
            facts = {"event": "redis_lost", "bell": job.id, "reason": type(exc).__name__}
            log.warning("RQ could not note how a bell went", extra=facts)
            return False

    def handle_exception(self, job: RqJob, *exc_info: Any) -> None:  # noqa: ANN401 - RQ's signature
        """Say in one line that a bell failed; RQ would log its arguments and traceback."""
        facts = {"event": "bell_end", "bell": job.id, "queue": job.origin}
        log.warning("bell failed: %s", exc_info[1], extra=facts)

    def handle_work_horse_killed(
        self,
        job: RqJob,
        retpid: int | None,  # noqa: ARG002
        ret_val: int | None,
        rusage: struct_rusage | None,
    ) -> None:
        """Name the death, and end the leases of its bell now instead of when they run out."""
        cause = self._cause(ret_val, rusage)
        self.counters["horses_killed"] += 1
        self.counters[cause.error_class] += 1
        facts = {"event": "horse_killed", "bell": job.id, "job_id": job_of(job.id)}
        freed: int | None = None
        try:
            with self._store(LAST_LIMIT_SECONDS) as tx:
                recover = traces.recover_dead if is_trace(job.id) else items.recover_dead
                freed = recover(
                    tx, leased_by=job.id, error_class=cause.error_class, message=cause.message
                )
        except Exception as exc:  # noqa: BLE001 - whatever it is, it would end the worker
            self.counters["store_errors"] += 1
            facts["reason"] = f"leases left to run out: {type(exc).__name__}"
        told = {"error_class": cause.error_class, "items": freed}
        log.warning("horse died: %s", cause.message, extra={**facts, **told})

    def _cause(self, wait_status: int | None, usage: struct_rusage | None) -> "Cause":
        before, now_killed = self._kills_before, self._kills()
        has_grown = before is not None and now_killed is not None and now_killed > before
        error_class = death_class(wait_status, is_out_of_memory=has_grown)
        if error_class is not ErrorClass.OOM_KILLED:
            return Cause(error_class, _death_message(wait_status))
        limit = self._cgroup.limit_bytes() if self._cgroup else None
        limit_text = f"{limit // MIB} MiB" if limit else "unknown"
        peak_text = f"{usage.ru_maxrss // 1024} MiB" if usage else "unknown"
        message = f"memory ran out: limit {limit_text}, peak of its process {peak_text}"
        return Cause(error_class, message)

    def _kills(self) -> int | None:
        return self._cgroup.kills() if self._cgroup else None

    # ---- being seen to live --------------------------------------------------------------

    def bootstrap(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - handed on
        """Register with RQ, then in Postgres: from here on bells are heard."""
        super().bootstrap(*args, **options)
        warn_of_eviction(Bells(self.connection))
        with suppress(StoreUnavailable), self._store(BEAT_LIMIT_SECONDS) as tx:
            warn_of_targets(tx)
        self._beat()

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:  # noqa: ANN401
        """Say that this worker lives: to RQ, to the service manager, and in Postgres."""
        with self._despite_refusals():
            super().heartbeat(timeout, pipeline)
        if self.is_horse:
            return
        self._notice.send("WATCHDOG=1")
        if pipeline is None:  # else nothing has been sent yet
            with self._despite_refusals():
                self._register_again()
            if time.monotonic() >= self._next_beat:
                self._beat()

    def maintain_heartbeats(self, job: RqJob, execution: Execution) -> None:
        """Say so while a horse works, which goes on whether Redis hears it or not."""
        self._beat()
        try:
            super().maintain_heartbeats(job, execution)
            self._register_again()
        except redis.RedisError:
            self.counters["redis_errors"] += 1

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + BEAT_SECONDS
        try:
            with self._store(BEAT_LIMIT_SECONDS) as tx:
                self._write_row(tx)
        except (StoreUnavailable, HorseMonitorTimeoutException) as exc:
            self.counters["store_errors"] += 1
            self._note_store(is_lost=True, reason=str(exc))
        else:
            self._note_store(is_lost=False)

    def _write_row(self, tx: Tx) -> None:
        counters = dict(self.counters)
        fleet.beat(tx, self._process, seconds=self._alive_seconds, counters=counters)

    def _note_store(self, *, is_lost: bool, reason: str | None = None) -> None:
        if is_lost != self._is_store_lost:
            self._is_store_lost = is_lost
            event = "postgres_lost" if is_lost else "postgres_back"
            facts = {"event": event, "worker": self.name, "reason": reason}
            log.warning("Postgres is %s", "away" if is_lost else "back", extra=facts)

    def _register_again(self) -> None:
        """Stand in RQ's list of workers again where Redis was emptied."""
        if self.connection.sismember(self.redis_workers_keys, self.key):
            return
        entry: dict[Any, Any] = self.serialize()  # pyright: ignore[reportUnknownVariableType]
        with self.connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping={**entry, "state": self.get_state()})
            pipeline.expire(self.key, self.worker_ttl + 60)
            worker_registration.register(self, pipeline)
            pipeline.execute()
        facts = {"event": "redis_back", "worker": self.name}
        log.warning("Redis had been emptied: registered again", extra=facts)

    @contextmanager
    def _store(self, limit_seconds: int) -> Generator[Tx]:
        """Lend a connection of its own for a moment: a fork must not inherit one.

        Raises StoreUnavailable, or HorseMonitorTimeoutException when the time is over.
        """
        with (
            self.death_penalty_class(limit_seconds, HorseMonitorTimeoutException),
            translated(),
            self._database.dedicated() as connection,
        ):
            yield connection

    # ---- a Redis that takes nothing ------------------------------------------------------

    @contextmanager
    def _despite_refusals(self) -> Generator[None]:
        """Do what RQ wants to write, and go on where Redis still takes nothing."""
        try:
            yield
        except REFUSED:
            self.counters["redis_errors"] += 1

    def check_for_suspension(self, burst: bool) -> None:  # noqa: FBT001 - RQ's signature
        """Rest while an operator has suspended all workers; RQ writes a heartbeat to ask."""
        with self._despite_refusals():
            super().check_for_suspension(burst)

    # ---- keeping RQ's lists --------------------------------------------------------------

    def run_maintenance_tasks(self) -> None:
        """Let RQ's lists forget what is over; they are for people, so no fault in them matters."""
        try:
            self.clean_registries()
        except StopRequested:
            raise
        except Exception as exc:  # noqa: BLE001 - anything may stand in Redis
            self.counters["redis_errors"] += 1
            name = type(exc).__name__
            log.warning("RQ's lists not cleaned: %s", name, extra={"worker": self.name})
        self.last_cleaned_at = now()  # type: ignore[assignment]

    def clean_registries(self) -> None:
        """Clean the lists that bells can be in; RQ would run what others hold, too."""
        queue = self.queues[0]
        if not queue.acquire_maintenance_lock():
            return
        try:
            for registry in (FinishedJobRegistry, FailedJobRegistry, Started):
                registry(queue=queue, job_class=BellJob).cleanup()
            worker_registration.clean_worker_registry(queue)
            queue.intermediate_queue.cleanup(self, queue)
        finally:
            if not self._stop.is_set():  # a stop waits for nobody: the lock runs out
                queue.release_maintenance_lock()  # type: ignore[no-untyped-call]

    # ---- the end -------------------------------------------------------------------------

    def handle_warm_shutdown_request(self) -> None:
        """Have the horse stop after its slice; the rest of its job is rung again."""
        self._stop.set()

    def set_shutdown_requested_date(self) -> None:
        """Write nothing: this is called in a signal handler, and Redis may be away."""

    def teardown(self) -> None:
        """Leave in order, without waiting for anybody."""
        if self.is_horse:
            return
        lost = (StoreUnavailable, HorseMonitorTimeoutException)  # then its row runs out
        with suppress(*lost), self._store(LAST_LIMIT_SECONDS) as tx:
            self._write_row(tx)
            fleet.leave(tx, self.name)
        self.connection = connect(self._settings.redis_url)  # the worker's own would try on
        with suppress(redis.RedisError):
            self.register_death()  # type: ignore[no-untyped-call]


class Started(StartedJobRegistry):
    """RQ's list of running bells, whose clean-up looks at bells only."""

    def get_queue(self) -> BellQueue:
        """Return the queue that these bells came from."""
        return BellQueue(self.name, connection=self.connection, serializer="json")


# ---- Redis, patiently --------------------------------------------------------------------


class NotedRetry(Retry):
    """Tries for long, and says once that Redis is lost and once that it is back."""

    def __init__(self) -> None:
        pauses = ExponentialBackoff(cap=REDIS_PAUSE_SECONDS, base=0.1)
        super().__init__(pauses, REDIS_RETRIES, supported_errors=(*AWAY, *REFUSED))
        self._is_lost = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # redis-py copies it for each connection; they share what is known

    def take_refusals(self) -> None:
        """Wait no longer where Redis takes nothing.

        At the end of a bell RQ would take each refusal for a change of what it watches, and try
        again without a pause.
        """
        self._supported_errors = AWAY

    def call_with_retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Do it, and again while Redis is away or takes nothing."""
        is_refused = False

        def succeed() -> Any:  # noqa: ANN401
            try:
                result = do()
            except redis.ResponseError as exc:
                if "MISCONF " in str(exc):
                    raise UnsavedError from exc
                raise
            # A Redis that takes nothing can be read: only who was refused knows that it is back.
            if is_refused:
                _say_redis(is_lost=False)
            self._note(is_lost=False)
            return result

        def note_failure(error: Exception, *count: int) -> Any:  # noqa: ANN401
            nonlocal is_refused
            if not isinstance(error, REFUSED):
                self._note(is_lost=True, reason=type(error).__name__)
            elif not is_refused:
                is_refused = True
                _say_redis(is_lost=True, reason=type(error).__name__)
            return fail(error, *count)

        return super().call_with_retry(succeed, note_failure, *args, **options)

    def _note(self, *, is_lost: bool, reason: str | None = None) -> None:
        if is_lost != self._is_lost:
            self._is_lost = is_lost
            _say_redis(is_lost=is_lost, reason=reason)


def _say_redis(*, is_lost: bool, reason: str | None = None) -> None:
    event = "redis_lost" if is_lost else "redis_back"
    facts = {"event": event, "reason": reason}
    log.warning("Redis is %s", "away" if is_lost else "back", extra=facts)


def patient(url: str, name: str, retry: NotedRetry) -> Link:
    """Make the worker's client, which outlasts a restart of Redis."""
    return redis.Redis.from_url(
        url,
        client_name=name,
        retry=retry,
        health_check_interval=30,
        socket_connect_timeout=CONNECT_SECONDS,
    )


# ---- how a horse died --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cause:
    """How a horse died, for the items that it held."""

    error_class: ErrorClass
    message: str


def death_class(wait_status: int | None, *, is_out_of_memory: bool) -> ErrorClass:
    """Name a death by what `wait` said; None is RQ's word for a horse that it killed itself."""
    if wait_status is None:
        return ErrorClass.TIMEOUT_KILLED
    if not os.WIFSIGNALED(wait_status):
        return ErrorClass.EXITED
    number = os.WTERMSIG(wait_status)
    if number in CRASHES:
        return ErrorClass.CRASHED
    if number == signal.SIGTERM:
        return ErrorClass.SERVICE_STOP
    if number == signal.SIGKILL and is_out_of_memory:
        return ErrorClass.OOM_KILLED
    return ErrorClass.KILLED


def _death_message(wait_status: int | None) -> str:
    if wait_status is None:
        return "its process did not end in time and was killed"
    code = os.waitstatus_to_exitcode(wait_status)
    return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """Where the kernel counts the processes that it killed for memory, and the limit."""

    kills_file: Path
    limit_file: Path

    @classmethod
    def of_process(
        cls, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ) -> "MemoryCgroup | None":
        """Find that of this process; None where there is none that can be read."""
        return next(
            (each for each in cls._candidates(proc, root) if each.kills() is not None), None
        )

    @classmethod
    def _candidates(cls, proc: Path, root: Path) -> Iterator["MemoryCgroup"]:
        for line in _text(proc).splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            is_first_version = "memory" in controllers.split(",")
            if not is_first_version and controllers:
                continue
            top = root / "memory" if is_first_version else root
            names = (
                ("memory.oom_control", "memory.limit_in_bytes")
                if is_first_version
                else ("memory.events", "memory.max")
            )
            # In a container the path may be the host's, while its own group is mounted at the top.
            for folder in (top / path.strip("/"), top):
                yield cls(folder / names[0], folder / names[1])

    def kills(self) -> int | None:
        """Return how many processes were killed so far."""
        found = re.search(r"^oom_kill (\d+)$", _text(self.kills_file), re.MULTILINE)
        return int(found[1]) if found else None

    def limit_bytes(self) -> int | None:
        """Return the limit; None where there is none."""
        text = _text(self.limit_file).strip()
        return int(text) if text.isdigit() and int(text) < 2**60 else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
