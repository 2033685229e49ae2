"""Submitting: a batch, a stream or a document becomes a committed job; then a bell is rung."""

import hashlib
import logging
import secrets
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

import orjson

from app.core import rings, status
from app.core.chunks import split
from app.core.context import Context
from app.core.errors import (
    FAULTS_SHOWN,
    Fault,
    InvalidRequest,
    KeyInUse,
    KeyReused,
    StoreUnavailable,
    TooLarge,
    TooManyQueued,
)
from app.core.model import (
    EMBEDDING_PREFIX,
    MEMORY_TARGET,
    NO_TARGET,
    TRACE_PREFIX,
    Caller,
    Job,
    NewItem,
    Rings,
    Target,
)
from app.core.requests import (
    BatchOptions,
    Ingest,
    MemoryRecord,
    Rules,
    Traced,
    check_item,
    check_record,
    targets_by_name,
)
from app.core.store import fleet, items, jobs, memory, targets, traces, vectors
from app.core.store.database import Tx, take_time
from app.core.store.jobs import IdempotencyKey, NewJob
from app.core.store.memory import Chunk, Document
from app.core.trace import pack_ids, segments

log = logging.getLogger(__name__)

COPY_BLOCK = 1000
FLOAT_BYTES = 4
REPEATED_BLOCK = 100_000
"""Each block of repeated ids costs a look at the whole batch."""
TOO_MANY_RETRY_SECONDS = 60


class Fingerprint(Protocol):
    """A hash under way."""

    def update(self, data: bytes, /) -> None:
        """Take in more of the body."""
        ...

    def digest(self) -> bytes:
        """Return the hash of what was taken in."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A batch as it arrives: its options, its items one by one, and how to treat the bad ones."""

    options: BatchOptions
    values: Iterable[Any]
    """Each item as decoded JSON, or the Fault that kept its line from being decoded."""
    skip_invalid: bool = False
    is_stream: bool = False
    is_by_operator: bool = False
    """Whether every target is open to it: a repair, a new version."""


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """An Idempotency-Key, and what the request hashes to: of a stream that is known at its end."""

    key: str
    fingerprint: Any
    """A function that returns the SHA-256 over path, query and body."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a POST."""

    job_id: str
    answer: bytes


def _new_job_id() -> str:
    return f"{EMBEDDING_PREFIX}{secrets.token_hex(16)}"


@dataclass(slots=True)
class _Checked:
    job_id: str = field(default_factory=_new_job_id)
    sent: int = 0
    rejected: int = 0
    text_bytes: int = 0
    result_bytes: int = 0
    """Of vectors that go to the job's result alone."""
    faults: list[Fault] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)
    """What the answer says besides, by name."""

    def refuse(self, faults: Sequence[Fault]) -> None:
        self.rejected += 1
        self.faults += faults[: max(0, FAULTS_SHOWN - len(self.faults))]


def submit(
    ctx: Context, caller: Caller, incoming: Incoming, repeat: RepeatKey | None = None
) -> Submitted:
    """Store a batch and ring for it; returns only what is committed (P1).

    Raises InvalidRequest naming every bad item, KeyReused, KeyInUse, TooManyQueued, and
    StoreUnavailable where nothing was stored. Redis may be away: the sweeper rings.
    """
    with ctx.database.session() as connection, _held_key(connection, caller, repeat):
        checked = _collect(ctx, connection, caller, incoming)
        key = _full_key(caller, repeat)
        if key:
            earlier = _earlier(connection, key)
            if earlier:
                return earlier
        _refuse_faults(checked, incoming)
        with connection.transaction():
            stored = _merge(ctx, connection, caller, incoming, checked, key)
    _announce(ctx, stored)
    return stored.submitted


def ingest(
    ctx: Context, caller: Caller, asked: Ingest, repeat: RepeatKey | None = None
) -> Submitted:
    """Split a document into chunks, store them with what is to be embedded of them, and ring.

    Chunks that have not changed are duplicates, those that are gone are removed from every sink.
    Raises what `submit` raises.
    """
    document = Document(caller.client, asked.project, asked.source, asked.ingest_id)
    chunks = _chunks(ctx, document, asked.records)
    options = BatchOptions(project=asked.project)
    with ctx.database.session() as connection, _held_key(connection, caller, repeat):
        target = _memory_target(connection)
        checked = _Checked()
        items.begin_batch(connection)
        items.copy_in(connection, _chunk_items(target, chunks, checked))
        memory.copy_in(connection, chunks)
        key = _full_key(caller, repeat)
        if key:
            earlier = _earlier(connection, key)
            if earlier:
                return earlier
        with connection.transaction():
            rows = memory.replace(connection, document)
            # A new row has no vector: what is known of its id is of a row that somebody deleted.
            stale = [*rows.gone, *rows.new]
            items.withdraw(connection, MEMORY_TARGET, stale, keeps_rows=False)
            checked.more = {"chunks": len(chunks), "removed": len(rows.gone)}
            stored = _merge(ctx, connection, caller, Incoming(options, ()), checked, key)
            vectors.redescribe(connection)
    _announce(ctx, stored)
    return stored.submitted


def _memory_target(connection: Tx) -> Target:
    named = targets_by_name(targets.registered(connection))
    target = named.get((MEMORY_TARGET, None))
    if target is None:
        message = "there is no memory in this database yet; run python -m migrations --memory"
        raise InvalidRequest(message, faults=[Fault("target_unknown", message)])
    return target


def _chunks(ctx: Context, document: Document, records: Sequence[Any]) -> list[Chunk]:
    most = ctx.settings.max_batch_items
    if len(records) > most:
        message = f"{len(records)} records, the limit is {most}"
        raise InvalidRequest(message, faults=[Fault("too_many_items", message, "records")])
    checked = _Checked(sent=len(records))
    found: list[Chunk] = []
    for index, value in enumerate(records):
        record = check_record(index, value, max_bytes=ctx.settings.max_body_bytes)
        if isinstance(record, MemoryRecord):
            for number, text in enumerate(split(record.text)):
                chunk_id = _chunk_id(document, index, number)
                found.append(Chunk(chunk_id, index, number, text, record.metadata))
        else:
            checked.refuse(record)
    if checked.rejected:
        message = f"{checked.rejected} of {len(records)} records are invalid; nothing was stored"
        raise InvalidRequest(message, faults=checked.faults)
    return found


def _chunk_id(document: Document, record: int, number: int) -> str:
    named = orjson.dumps([*asdict(document).values(), record, number])
    return str(uuid.UUID(bytes=hashlib.sha256(named).digest()[:16]))


def _chunk_items(target: Target, chunks: Sequence[Chunk], checked: _Checked) -> Iterator[NewItem]:
    for position, chunk in enumerate(chunks):
        encoded = chunk.text.encode()
        checked.sent += 1
        checked.text_bytes += len(encoded)
        yield NewItem(
            position=position,
            target_table=target.target_table,
            target_id=chunk.id,
            embedding_version=target.embedding_version,
            model=target.model,
            text=chunk.text,
            content_hash=hashlib.sha256(encoded).digest(),
            custom_id=f"{chunk.record}/{chunk.number}",
            metadata=chunk.metadata,
        )


def submit_trace(
    ctx: Context, caller: Caller, traced: Traced, repeat: RepeatKey | None = None
) -> Submitted:
    """Store a trace request and ring for it; returns only what is committed (P1).

    Raises KeyReused, KeyInUse, TooManyQueued, and StoreUnavailable where nothing was stored.
    """
    packed = pack_ids(traced.ids)
    with ctx.database.session() as connection, _held_key(connection, caller, repeat):
        key = _full_key(caller, repeat)
        if key:
            earlier = _earlier(connection, key)
            if earlier:
                return earlier
        with connection.transaction():
            stored = _store_trace(ctx, connection, caller, traced, packed, key)
    _announce(ctx, stored)
    return stored.submitted


def _announce(ctx: Context, stored: "_Stored") -> None:
    if stored.rings:
        rings.push(ctx, stored.rings, stored.alive, by="submit")
    job_id = stored.submitted.job_id
    try:
        status.publish(ctx, job_id)
    except StoreUnavailable as exc:  # the batch is committed, so its 202 is true all the same
        log.warning("job not shown: %s", exc, extra={"event": "postgres_lost", "job_id": job_id})


# ---- reading ------------------------------------------------------------------------------------


def _collect(ctx: Context, connection: Tx, caller: Caller, incoming: Incoming) -> _Checked:
    """Check the items and copy the good ones into the session's temporary table, block by block.

    No transaction stays open while a slow client sends, and no more than a block is in memory.
    """
    checked = _Checked()
    registered = targets.registered(connection)
    untargeted = targets.untargeted(registered, ctx.settings)
    rules = Rules(
        targets=targets_by_name(registered),
        options=incoming.options,
        client=caller.client,
        max_text_bytes=ctx.settings.max_text_bytes,
        is_stream=incoming.is_stream,
        is_by_operator=incoming.is_by_operator,
        job_id=checked.job_id,
        untargeted={None: untargeted[0], **{each.model: each for each in untargeted}},
    )
    items.begin_batch(connection)
    good = _good_items(rules, incoming.values, checked)
    while block := list(islice(good, COPY_BLOCK)):
        items.copy_in(connection, block)
        _refuse_large_result(ctx, checked)
    _refuse_repeated(connection, incoming, checked)
    return checked


def _refuse_large_result(ctx: Context, checked: _Checked) -> None:
    most = ctx.settings.embedding_result_bytes
    if checked.result_bytes > most:
        message = (
            "the vectors of items without a target would have more bytes than"
            f" embedding_result_bytes = {most}: send them in smaller batches"
        )
        raise TooLarge(message)


def _refuse_repeated(connection: Tx, incoming: Incoming, checked: _Checked) -> None:
    while repeated := items.repeated_custom_ids(connection, limit=REPEATED_BLOCK):
        for position in repeated:
            line = position + 1 if incoming.is_stream else None
            message = "stands earlier in this batch"
            fault = Fault("custom_id_repeated", message, "custom_id", position, line)
            checked.refuse([fault])
        items.drop_incoming(connection, repeated)


def _good_items(rules: Rules, values: Iterable[Any], checked: _Checked) -> Iterator[NewItem]:
    for index, value in enumerate(values):
        checked.sent += 1
        item = [value] if isinstance(value, Fault) else check_item(rules, index, value)
        if isinstance(item, NewItem):
            checked.text_bytes += len(item.text.encode())
            if item.target_table == NO_TARGET:
                dimension = rules.untargeted[rules.options.model].dimension
                checked.result_bytes += FLOAT_BYTES * dimension
            yield item
        else:
            checked.refuse(item)


def _refuse_faults(checked: _Checked, incoming: Incoming) -> None:
    if checked.rejected and not incoming.skip_invalid:
        message = f"{checked.rejected} of {checked.sent} items are invalid; nothing was stored"
        raise InvalidRequest(message, faults=checked.faults)
    if checked.sent == checked.rejected:
        faults = checked.faults or [Fault("no_items", "the batch has no items", "items")]
        raise InvalidRequest("the batch has no valid item; nothing was stored", faults=faults)


# ---- storing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    submitted: Submitted
    rings: Rings | None
    alive: fleet.Alive


def _merge(
    ctx: Context,
    tx: Tx,
    caller: Caller,
    incoming: Incoming,
    checked: _Checked,
    key: IdempotencyKey | None,
) -> _Stored:
    take_time(tx)
    good = checked.sent - checked.rejected
    _refuse_too_many(ctx, tx, caller, jobs.OpenWork(good, checked.text_bytes))
    options = incoming.options
    job_id = checked.job_id
    jobs.insert(
        tx, NewJob(job_id, caller.client, options.project, options.priority, options.return_vectors)
    )
    accepted = items.enqueue(tx, job_id=job_id, project=options.project, priority=options.priority)
    jobs.count_now(tx)
    job = jobs.finish(tx, job_id, ttl_seconds=ctx.settings.job_result_ttl_seconds) or jobs.find(
        tx, job_id
    )
    if job is None:  # inserted above
        raise AssertionError
    alive = fleet.alive(tx)
    answer = _answer(ctx, tx, job, checked, accepted)
    if key:
        jobs.keep_answer(tx, key, job_id=job_id, answer=answer.decode())
    taken = None
    if job.counts.pending:
        bells = rings.wanted(ctx, job.counts.pending, alive, options.project)
        taken = jobs.take_rings(tx, job_id, bells)
    facts = {"event": "job_accepted", "job_id": job_id, "client": caller.client, "items": good}
    log.info("job stored", extra=facts)
    return _Stored(Submitted(job_id, answer), taken, alive)


def _store_trace(
    ctx: Context,
    tx: Tx,
    caller: Caller,
    traced: Traced,
    packed: bytes,
    key: IdempotencyKey | None,
) -> _Stored:
    _refuse_too_many_traces(ctx, tx, caller)
    job_id = f"{TRACE_PREFIX}{secrets.token_hex(16)}"
    jobs.insert(tx, NewJob(job_id, caller.client, kind="trace"))
    trace = traces.NewTrace(
        job_id=job_id,
        profile=traced.profile,
        params=traced.params,
        domains=traced.domains,
        is_partial=traced.is_partial,
        ids=packed,
        ids_sha256=hashlib.sha256("\n".join(traced.ids).encode()).digest(),
        cid_count=len(traced.ids),
        source=ctx.settings.trace_source,
    )
    traces.insert(tx, trace, segments(traced.ids, ctx.settings.trace_segment_cids))
    job = jobs.find(tx, job_id)
    if job is None:  # inserted above
        raise AssertionError
    checked = _Checked(sent=len(traced.ids) + traced.duplicates)
    answer = _answer(ctx, tx, job, checked, len(traced.ids))
    if key:
        jobs.keep_answer(tx, key, job_id=job_id, answer=answer.decode())
    taken = jobs.take_rings(tx, job_id, 1)
    facts = {"event": "job_accepted", "job_id": job_id, "client": caller.client}
    log.info("job stored", extra={**facts, "items": len(traced.ids)})
    return _Stored(Submitted(job_id, answer), taken, fleet.alive(tx))


def _refuse_too_many_traces(ctx: Context, tx: Tx, caller: Caller) -> None:
    most = ctx.settings.trace_max_queued
    if traces.open_jobs(tx, caller.client) >= most:
        raise TooManyQueued(
            f"{most} trace jobs of this client are open; the limit is trace_max_queued",
            retry_after_seconds=TOO_MANY_RETRY_SECONDS,
        )


def _refuse_too_many(ctx: Context, tx: Tx, caller: Caller, more: jobs.OpenWork) -> None:
    settings = ctx.settings
    open_now = jobs.open_work(tx, caller.client)
    limits = (
        ("items", open_now.items + more.items, settings.queue_max_per_client),
        ("bytes", open_now.text_bytes + more.text_bytes, settings.queue_max_bytes_per_client),
    )
    for what, wanted, most in limits:
        if wanted > most:
            raise TooManyQueued(
                f"{wanted} {what} of this client would be open; the limit is"
                f" open_{what}_per_client = {most}",
                retry_after_seconds=TOO_MANY_RETRY_SECONDS,
            )


def _answer(ctx: Context, tx: Tx, job: Job, checked: _Checked, accepted: int) -> bytes:
    seconds = status.estimate(ctx, tx, job)
    link = f"/api/job/{job.id}"
    return orjson.dumps(
        {
            "job_id": job.id,
            "kind": job.kind,
            **({"stage": "events"} if job.kind == "trace" else {}),
            "async": True,
            "state": job.state,
            "status_url": link,
            "result_url": f"{link}/result",
            "accepted": accepted,
            "duplicates": checked.sent - checked.rejected - accepted,
            "rejected": checked.rejected,
            "errors": [shown(fault) for fault in checked.faults],
            "estimated_seconds": seconds["p50"] if seconds else None,
            **checked.more,
        }
    )


def shown(fault: Fault) -> dict[str, Any]:
    """Return a fault as the API shows it."""
    return {name: value for name, value in asdict(fault).items() if value is not None}


# ---- the same request once more -----------------------------------------------------------------


@contextmanager
def _held_key(connection: Tx, caller: Caller, repeat: RepeatKey | None) -> Generator[None]:
    if repeat is None:
        yield
        return
    if not jobs.try_lock_key(connection, caller.client, repeat.key):
        raise KeyInUse(retry_after_seconds=1)
    try:
        yield
    finally:
        jobs.unlock_key(connection, caller.client, repeat.key)


def _full_key(caller: Caller, repeat: RepeatKey | None) -> IdempotencyKey | None:
    if repeat is None:
        return None
    return IdempotencyKey(caller.client, repeat.key, repeat.fingerprint())


def _earlier(connection: Tx, key: IdempotencyKey) -> Submitted | None:
    answer = jobs.find_answer(connection, key.client, key.key)
    if answer is None:
        return None
    if answer.fingerprint != key.fingerprint:
        raise KeyReused
    body = answer.answer.encode()
    return Submitted(str(orjson.loads(body)["job_id"]), body)


def fingerprint_of(path: str, query: bytes, body: bytes) -> bytes:
    """Return the SHA-256 over path, query and body of a request."""
    return begin_fingerprint(path, query, body).digest()


def hash_of(text: str) -> str:
    """Return the SHA-256 of a text in hex, as the ledger and the followers have it."""
    return hashlib.sha256(text.encode()).hexdigest()


def begin_fingerprint(path: str, query: bytes, body: bytes = b"") -> Fingerprint:
    """Begin the fingerprint of a request whose body, or the rest of it, is still to come."""
    return hashlib.sha256(b"\0".join((path.encode(), query, body)))
