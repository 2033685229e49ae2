"""What lives in Redis with a TTL: job metadata, pages of results. Here our keys are built."""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from app.core.link import Link, translated
from app.core.model import is_trace

FRESH_SECONDS = 5
"""How long the metadata of an open job may be shown: then it is read from Postgres anew."""


@dataclass(frozen=True, slots=True)
class Meta:
    """The body of GET /api/job/<id>, and what decides whether it may replace another one."""

    job_id: str
    client: str
    run: int
    is_final: bool
    read_at: float
    """When Postgres was read, by its own clock, in seconds."""
    body: bytes
    ttl_seconds: float


# An older state never replaces a newer one: a higher run wins, then a final state, then the one
# that was read later. So a poller never sees a job go back, whoever writes late.
KEEP_NEWEST = """
local old = redis.call('HMGET', KEYS[1], 'run', 'final', 'read_at')
if old[1] then
    local run, final, read_at = tonumber(old[1]), tonumber(old[2]), tonumber(old[3])
    local new_run, new_final, new_read_at = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
    if run > new_run then return 0 end
    if run == new_run and final > new_final then return 0 end
    if run == new_run and final == new_final and read_at > new_read_at then return 0 end
end
redis.call('HSET', KEYS[1], 'run', ARGV[1], 'final', ARGV[2], 'read_at', ARGV[3],
           'client', ARGV[4], 'body', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
"""


class Live:
    """Live facts of jobs. None of its calls may fail a slice or an answer: see BellsUnavailable."""

    def __init__(self, link: Link) -> None:
        self._redis = link
        self._keep_newest = cast("Callable[..., Any]", self._redis.register_script(KEEP_NEWEST))

    def keep(self, meta: Meta) -> bool:
        """Write a job's metadata unless newer is there; raises BellsUnavailable."""
        with translated():
            kept = self._keep_newest(
                keys=[_meta_key(meta.job_id)],
                args=[
                    meta.run,
                    int(meta.is_final),
                    meta.read_at,
                    meta.client,
                    meta.body,
                    max(1, int(meta.ttl_seconds * 1000)),
                ],
            )
        return bool(kept)

    def find(self, job_id: str, *, client: str | None) -> bytes | None:
        """Return a job's body where it is fresh and the client's own; raises BellsUnavailable."""
        with translated():
            owner, body = cast(
                "tuple[bytes | None, bytes | None]",
                self._redis.hmget(_meta_key(job_id), ["client", "body"]),
            )
        if owner is None or (client is not None and owner.decode() != client):
            return None
        return body

    def forget(self, job_id: str) -> None:
        """Drop a job's metadata; raises BellsUnavailable."""
        with translated():
            self._redis.delete(_meta_key(job_id))

    # ---- pages of trace results ----------------------------------------------------------

    def keep_page(self, key: str, packed: bytes, *, ttl_seconds: float) -> None:
        """Store a page; raises RedisFull, BellsUnavailable."""
        with translated():
            self._redis.set(key, packed, px=max(1, int(ttl_seconds * 1000)))

    def pages(self, keys: Sequence[str], *, all_keys: Sequence[str]) -> list[bytes | None] | None:
        """Return some pages of a result; None where any of all its pages is gone.

        Raises BellsUnavailable.
        """
        with translated(), self._redis.pipeline(transaction=False) as pipeline:
            for block in _blocks(all_keys):
                pipeline.exists(*block)
            if keys:
                pipeline.mget(keys)
            answers = pipeline.execute()
        found: list[bytes | None] = answers.pop() if keys else []
        return found if sum(answers) == len(all_keys) else None

    def expire_pages(self, keys: Sequence[str], *, ttl_seconds: float) -> list[bool]:
        """Give pages one common end, and say of each whether it is there.

        By Redis' own clock, at the same millisecond for all. Raises BellsUnavailable.
        """
        with translated():
            seconds, micros = self._redis.time()
            ends = seconds * 1000 + micros // 1000 + max(1, int(ttl_seconds * 1000))
            with self._redis.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.pexpireat(key, ends)
                return [bool(answer) for answer in pipeline.execute()]

    def drop_pages(self, keys: Sequence[str]) -> None:
        """Delete pages; raises BellsUnavailable."""
        with translated():
            for block in _blocks(keys):
                self._redis.unlink(*block)

    # ---- vectors of items without a target -----------------------------------------------

    def keep_vectors(
        self, job_id: str, vectors: Mapping[int, Sequence[float]], *, ttl_seconds: float
    ) -> None:
        """Store vectors of a job by position, as float32; raises RedisFull, BellsUnavailable.

        What is written together gets its end in the same step, so that no key is ever without one.
        """
        pages: dict[str, dict[int, bytes]] = {}
        for position, vector in vectors.items():
            pages.setdefault(_vectors_key(job_id, position), {})[position] = _packed(vector)
        with translated(), self._redis.pipeline(transaction=True) as pipeline:
            for key, fields in pages.items():
                pipeline.hset(key, mapping=cast("dict[Any, Any]", fields))
                pipeline.pexpire(key, max(1, int(ttl_seconds * 1000)))
            pipeline.execute()

    def vectors(self, job_id: str, positions: Sequence[int]) -> dict[int, list[float]]:
        """Return the vectors of a job that are there, by position; raises BellsUnavailable."""
        pages: dict[str, list[int]] = {}
        for position in positions:
            pages.setdefault(_vectors_key(job_id, position), []).append(position)
        with translated(), self._redis.pipeline(transaction=False) as pipeline:
            for key, asked in pages.items():
                pipeline.hmget(key, [str(position) for position in asked])
            answers: list[list[bytes | None]] = pipeline.execute()
        return {
            position: _unpacked(packed)
            for asked, found in zip(pages.values(), answers, strict=True)
            for position, packed in zip(asked, found, strict=True)
            if packed is not None
        }

    def held_vectors(self, job_id: str, last_position: int) -> set[int]:
        """Return the positions whose vectors are there; raises BellsUnavailable."""
        with translated(), self._redis.pipeline(transaction=False) as pipeline:
            for first in range(0, last_position + 1, VECTORS_A_KEY):
                pipeline.hkeys(_vectors_key(job_id, first))
            return {int(position) for page in pipeline.execute() for position in page}

    def expire_vectors(self, job_id: str, last_position: int, *, ttl_seconds: float) -> None:
        """Give the vectors of a job one common end; raises BellsUnavailable."""
        firsts = range(0, last_position + 1, VECTORS_A_KEY)
        self.expire_pages([_vectors_key(job_id, each) for each in firsts], ttl_seconds=ttl_seconds)

    def memory_share(self) -> float:
        """Return how full Redis is, of its maxmemory; 0 where none is set.

        Raises BellsUnavailable.
        """
        with translated():
            info = self._redis.info("memory")
        most = int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / most if most else 0.0


KEYS_AT_ONCE = 1000
VECTORS_A_KEY = 1000


def _blocks(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[first : first + KEYS_AT_ONCE] for first in range(0, len(keys), KEYS_AT_ONCE)]


def page_key(job_id: str, run: int, domain: str, page: str) -> str:
    """Return the key of a page; `page` is its segment, the lease it was read under, its number."""
    return f"trace:job:{job_id}:{run}:result:{domain}:{page}"


def _vectors_key(job_id: str, position: int) -> str:
    return f"embedding:job:{job_id}:vectors:{position // VECTORS_A_KEY}"


def _packed(vector: Sequence[float]) -> bytes:
    """Pack a vector as float32, lowest byte first: a fifth of what it is as JSON."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(packed: bytes) -> list[float]:
    numbers = array("f")
    numbers.frombytes(packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _meta_key(job_id: str) -> str:
    return f"{'trace' if is_trace(job_id) else 'embedding'}:job:{job_id}:meta"
