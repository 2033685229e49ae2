"""The settings: the only reader of the environment; every fault at once, before anything starts."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.core.errors import ConfigError
from app.core.model import EMBEDDINGS

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PREFIX = re.compile(r"[a-z][a-z0-9_-]{0,63}")
TRUE, FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def setting(
    default: Any,  # noqa: ANN401 - the field's own annotation is the type
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    words: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:  # noqa: ANN401
    """Declare one setting: its default, one sentence, and the values that it may have."""
    return field(
        default=default,
        repr=not secret,
        metadata={"text": text, "least": least, "most": most, "words": words, "secret": secret},
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set. A field's name in capitals is its environment variable."""

    database_url: str = setting("", "Postgres 15 or newer, as a URL; required.", secret=True)
    redis_url: str = setting("", "Redis 6.2 or newer, as a URL; required.", secret=True)
    rq_key_prefix: str = setting(
        "rq", "Prefix of RQ's keys; must not be another RQ's on the same database number."
    )
    embedder: str = setting(
        "ollama", "Backend: `ollama`, `openai`, `local`, or your own `package.module:build`."
    )
    embedder_url: str = setting("http://127.0.0.1:11434", "Base URL of the backend.")
    embedder_api_key: str = setting("", "Key sent to the backend as a bearer token.", secret=True)
    embedder_timeout_seconds: float = setting(
        60.0, "Total time for one call to the backend.", least=0.1, most=600
    )
    embedder_load_seconds: float = setting(
        300.0,
        "The same for the first call after a start or a pause: the model may have to be loaded.",
        least=0.1,
        most=1800,
    )
    embedder_max_calls: int = setting(
        4, "Most calls to the backend at a time, over all workers.", least=1, most=1000
    )
    embedder_max_items: int = setting(1000, "Most texts in one call.", least=1, most=10000)
    embedder_max_tokens: int = setting(
        200000,
        "Most tokens in one call, estimated as one per three bytes of text.",
        least=1,
        most=10000000,
    )
    embedder_canary: str = setting(
        "",
        "A text whose vector each model must go on giving, or its backend is paused; empty: none.",
    )
    embedding_model: str = setting(
        "bge-m3:latest", "Model of targets that are registered without one."
    )
    embedding_dim: int = setting(1024, "Dimension of that model's vectors.", least=1, most=16000)
    embedding_version: str = setting(
        "", "Label of a target registered without one; made of model and dimension where empty."
    )
    queue_batch_size: int = setting(
        64, "Most items in a slice: one claim, one call, one commit.", least=1, most=1000
    )
    queue_visibility_timeout: float = setting(
        45.0,
        "Seconds that a lease lasts; it is extended each third while its holder lives.",
        least=1,
        most=3600,
    )
    queue_wait_time: int = setting(
        20, "Seconds that an idle worker blocks on Redis.", least=0, most=60
    )
    queue_max_retries: int = setting(5, "Attempts of an item in all.", least=1, most=20)
    queue_bell_seconds: float = setting(
        20.0,
        "Seconds that one bell works before it lets the next job have its turn.",
        least=0.05,
        most=600,
    )
    queue_bells_per_job: int = setting(
        8, "Most bells of one job at a time, so most workers on it.", least=1, most=1000
    )
    queue_max_per_client: int = setting(
        2000000, "Open items that one client may have before a POST is 429.", least=1, most=10**9
    )
    queue_max_bytes_per_client: int = setting(
        4 * 2**30, "Bytes of text that it may have open, the same.", least=1024, most=2**50
    )
    queue_project: str = setting("", "A worker with this set serves `embeddings-<project>` only.")
    enable_queue_worker: bool = setting(
        True, "Off: `worker run` and `worker sweep` leave at once with exit code 0."
    )
    sweep_seconds: float = setting(15.0, "Seconds between two sweeps.", least=0.05, most=3600)
    alert_failed_count: int = setting(
        10, "Failed items from which on there is an alert.", least=1, most=10**9
    )
    alert_oldest_seconds: float = setting(
        3600.0, "Age of the oldest due item from which on there is one.", least=1, most=10**7
    )
    alert_snapshot_seconds: float = setting(
        3600.0,
        "Age of a transaction, anybody's in this database, from which on there is one.",
        least=1,
        most=10**7,
    )
    alert_webhook_url: str = setting(
        "",
        "Where a POST tells which alerts are on, at each change; empty: nobody is told.",
        secret=True,
    )
    coverage_seconds: float = setting(
        3600.0,
        "Seconds between two surveys of how much of each target has its vector.",
        least=0.05,
        most=604800,
    )
    job_result_ttl_seconds: int = setting(
        86400, "Seconds that a finished embedding job's result can be read.", least=1, most=31536000
    )
    embedding_result_bytes: int = setting(
        512 * 2**20,
        "Largest result of an embedding job in Redis: the vectors of items without a target.",
        least=1024,
        most=2**40,
    )
    cleanup_done_days: int = setting(
        7,
        "Days that a finished item is kept; after that the same text is embedded anew.",
        least=1,
        most=3650,
    )
    cleanup_job_days: int = setting(
        30, "Days that a finished job is kept; after that it is 404.", least=1, most=3650
    )
    sinks: str = setting(
        "pgvector",
        "Where vectors go: first `pgvector`, written in the settle transaction; then any of"
        " `opensearch`, `lancedb`, or your own `package.module:build`, which follow.",
    )
    opensearch_url: str = setting("", "Base URL of the OpenSearch that follows.", secret=True)
    opensearch_mapping: str = setting(
        "knn_vector",
        "How a vector is mapped there: `knn_vector`, or `dense_vector` for Elasticsearch.",
        words=("knn_vector", "dense_vector"),
    )
    lancedb_path: str = setting(
        "", "Folder of the LanceDB that follows; only one host may write to it."
    )
    sink_prefix: str = setting(
        "holdfast", "What the names of its indexes and tables in those stores begin with."
    )
    sink_timeout_seconds: float = setting(
        30.0, "Total time for one call to a sink that follows.", least=0.1, most=600
    )
    trace_async_cid_threshold: int = setting(
        20000, "Most container ids that are answered at once; more are a job.", least=1, most=10**6
    )
    trace_segment_cids: int = setting(
        10000, "Container ids that a trace job reads at a time: its segment.", least=1, most=100000
    )
    trace_max_cids: int = setting(800000, "Most container ids in one request.", least=1, most=10**7)
    trace_job_timeout_seconds: int = setting(
        1800, "Longest time that a trace job may run, from its start.", least=1, most=86400
    )
    trace_job_ttl_seconds: int = setting(
        3600, "Seconds that a finished trace job's result can be read.", least=1, most=604800
    )
    trace_segment_seconds: float = setting(
        300.0, "Longest time that one segment may take.", least=0.1, most=3600
    )
    trace_sync_seconds: float = setting(
        100.0, "Longest time that an answer at once may take.", least=0.1, most=3600
    )
    trace_max_sync: int = setting(
        2, "Answers at once that one API process reads at a time.", least=1, most=100
    )
    trace_max_queued: int = setting(
        20, "Open trace jobs that one client may have before a POST is 429.", least=1, most=10**6
    )
    trace_result_bytes: int = setting(
        512 * 2**20, "Largest result of a trace job, compressed.", least=1024, most=2**40
    )
    trace_worker_queue: str = setting("trace-events", "Queue of the bells of trace jobs.")
    trace_worker_count: int = setting(
        1, "Trace workers that `make up` starts; 0: `/readyz` does not miss them.", least=0, most=64
    )
    trace_source: str = setting(
        "postgres", "Where events are read: `postgres`, `oracle`, or `package.module:build`."
    )
    trace_source_url: str = setting(
        "", "The source's URL; empty: the same Postgres as DATABASE_URL.", secret=True
    )
    trace_source_queries: str = setting(
        "", "File with one SELECT a domain; empty: the demo's, on Postgres only."
    )
    trace_source_timeout_seconds: float = setting(
        60.0, "Longest time that one statement may take there.", least=0.1, most=3600
    )
    max_body_bytes: int = setting(64 * 2**20, "Largest JSON body.", least=1024, most=2**30)
    max_stream_bytes: int = setting(4 * 2**30, "Largest NDJSON body.", least=1024, most=2**40)
    max_batch_items: int = setting(
        100000, "Most items in a JSON batch; NDJSON has no such limit.", least=1, most=10**6
    )
    max_text_bytes: int = setting(262144, "Largest text, in bytes of UTF-8.", least=1, most=2**26)
    max_streams: int = setting(
        4, "NDJSON bodies that one API process reads at a time.", least=1, most=1000
    )
    stream_seconds: int = setting(
        3600, "Longest time that one NDJSON body may take to arrive.", least=1, most=86400
    )
    host: str = setting("127.0.0.1", "Address that the API listens on.")
    port: int = setting(8000, "Port that the API listens on.", least=0, most=65535)
    auth: str = setting("on", "`off` asks for no key; on loopback only.", words=("on", "off"))
    web_threads: int = setting(
        16, "Threads of one API process; long polls hold one each.", least=1, most=512
    )
    log_level: str = setting(
        "INFO", "Least level that is logged.", words=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    holdfast_home: str = setting(
        ".holdfast", "Folder of the embedded services that `make up` starts."
    )

    @property
    def primary_sink(self) -> str:
        """The sink that is written in the settle transaction."""
        return _names(self.sinks)[0]

    @property
    def followers(self) -> tuple[str, ...]:
        """The sinks that catch up with it, each with its own state per item."""
        return _names(self.sinks)[1:]

    @property
    def version_label(self) -> str:
        """The embedding_version of a target that is registered without one."""
        return self.embedding_version or label_of(self.embedding_model, self.embedding_dim)


def _names(sinks: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in sinks.split(","))


def label_of(model: str, dimension: int) -> str:
    """Return a label for the vectors of a model."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model)}-{dimension}"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine, seen from itself."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:  # noqa: ANN401
    """Read the settings from `environ` (the process's own by default).

    `overrides` win over it: they are what a command sets for the processes that it starts.
    A secret may be the path of a file instead: `<NAME>_FILE`. Raises ConfigError naming each fault.
    """
    source = dict(os.environ if environ is None else environ)
    values: dict[str, Any] = dict(overrides)
    faults: list[str] = []
    for item in fields(Settings):
        if item.name in values:
            continue
        raw = _raw(source, item.name.upper(), faults, is_secret=item.metadata["secret"])
        if raw is not None:
            _read(item.name, raw, values, faults)
    faults += _strangers(source)
    settings = Settings(**values)
    faults += _contradictions(settings)
    if faults:
        raise ConfigError(faults)
    return settings


def _raw(source: Mapping[str, str], name: str, faults: list[str], *, is_secret: bool) -> str | None:
    path = source.get(f"{name}_FILE") if is_secret else None
    if path:
        try:
            return Path(path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            faults.append(f"{name}_FILE: cannot be read ({type(exc).__name__})")
            return None
    value = source.get(name)
    return value.strip() if value and value.strip() else None


def _read(name: str, raw: str, values: dict[str, Any], faults: list[str]) -> None:
    item = next(each for each in fields(Settings) if each.name == name)
    limits = item.metadata
    shown = "…" if limits["secret"] else repr(raw[:80])
    try:
        value = _PARSERS[type(_default(item))](raw)
    except ValueError:
        faults.append(f"{name.upper()}: {shown} is not {_KINDS[type(_default(item))]}")
        return
    if limits["words"] and value not in limits["words"]:
        faults.append(f"{name.upper()}: {shown} is not one of {', '.join(limits['words'])}")
    elif limits["least"] is not None and not limits["least"] <= value <= limits["most"]:
        faults.append(
            f"{name.upper()}: {shown} is not between {limits['least']} and {limits['most']}"
        )
    else:
        values[name] = value


def _default(item: Any) -> Any:  # noqa: ANN401
    assert item.default is not MISSING  # noqa: S101 - every setting has one
    return item.default


def _boolean(raw: str) -> bool:
    word = raw.lower()
    if word not in TRUE | FALSE:
        raise ValueError
    return word in TRUE


_PARSERS: dict[type, Callable[[str], Any]] = {str: str, int: int, float: float, bool: _boolean}
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _strangers(source: Mapping[str, str]) -> list[str]:
    known = {item.name.upper() for item in fields(Settings)}
    known |= {f"{item.name.upper()}_FILE" for item in fields(Settings) if item.metadata["secret"]}
    faults: list[str] = []
    for name in source:
        if name in known or len(name) < 6:  # noqa: PLR2004 - HOST and PORT are too near to too much
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.85)
        if near and _distance(name, near[0]) <= 2:  # noqa: PLR2004 - one or two letters
            faults.append(f"{name}: unknown; did you mean {near[0]}?")
    return faults


def _distance(one: str, other: str) -> int:
    previous = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, wanted in enumerate(other, 1):
            current.append(
                min(
                    previous[column] + 1,
                    current[-1] + 1,
                    previous[column - 1] + (letter != wanted),
                )
            )
        previous = current
    return previous[-1]


def _contradictions(settings: Settings) -> list[str]:
    faults = _address_faults(settings)
    for name in ("rq_key_prefix", "queue_project", "trace_worker_queue"):
        value = getattr(settings, name)
        if value and not NAME.fullmatch(value):
            faults.append(f"{name.upper()}: letters, digits, - and _ only")
    if settings.auth == "off" and not is_loopback(settings.host):
        faults.append(f"AUTH=off is for loopback only, but HOST is {settings.host}")
    if settings.trace_worker_queue.partition("-")[0] in ("", EMBEDDINGS):
        faults.append(f"TRACE_WORKER_QUEUE: must be set, and not to {EMBEDDINGS} or a project's")
    faults += _sink_faults(settings)
    if settings.cleanup_job_days < settings.cleanup_done_days:
        faults.append("CLEANUP_JOB_DAYS: must not be less than CLEANUP_DONE_DAYS")
    return faults


def _sink_faults(settings: Settings) -> list[str]:
    faults: list[str] = []
    if settings.primary_sink != "pgvector":
        faults.append("SINKS: the first must be pgvector, which lives in the same Postgres")
    if len({settings.primary_sink, *settings.followers}) != 1 + len(settings.followers):
        faults.append("SINKS: a name stands there twice")
    if not all(settings.followers):
        faults.append("SINKS: a name is empty")
    if not PREFIX.fullmatch(settings.sink_prefix):
        faults.append("SINK_PREFIX: a small letter, then small letters, digits, - and _")
    for name, needed in (("opensearch", "opensearch_url"), ("lancedb", "lancedb_path")):
        if name in settings.followers and not getattr(settings, needed):
            faults.append(f"{needed.upper()}: must be set where {name} is one of SINKS")
    if settings.opensearch_url:
        faults += _url_faults("OPENSEARCH_URL", settings.opensearch_url, ("http", "https"))
    return faults


def _address_faults(settings: Settings) -> list[str]:
    faults: list[str] = []
    for name, schemes in (
        ("database_url", ("postgresql", "postgres")),
        ("redis_url", ("redis", "rediss", "unix")),
    ):
        url = getattr(settings, name)
        if not url:
            faults.append(f"{name.upper()}: must be set")
        else:
            faults += _url_faults(name.upper(), url, schemes)
    faults += _url_faults("EMBEDDER_URL", settings.embedder_url, ("http", "https"))
    if settings.alert_webhook_url:
        faults += _url_faults("ALERT_WEBHOOK_URL", settings.alert_webhook_url, ("http", "https"))
    return faults


def _url_faults(name: str, url: str, schemes: tuple[str, ...]) -> list[str]:
    # The URL itself is not shown: it may hold a password.
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        return [f"{name}: is not a URL"]
    if scheme not in schemes:
        return [f"{name}: must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}"]
    return []
