"""The main job on real texts with a real model, watched; then once more, with Redis emptied."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, LiteralString, NoReturn

from app.core import config
from app.core.context import Context, open_context
from app.core.ports import EmbedderOptions, find

HERE = Path(__file__).parent
MODEL, DIMENSION = "multilingual-e5-small", 384
FIRST, SECOND = "ai_insights", "conversations"
SECOND_SIZE = 240
FLUSH_AT = 80
SEARCH_SECONDS = 60.0
TOP = 5
BAR_CHARACTERS = 30

# The demo has its own home and so its own database: it begins with nothing.
CLEAR = """
TRUNCATE public.ai_insights, public.conversations, public.embedding_retry_queue,
         holdfast.jobs, holdfast.job_items, holdfast.job_counts, holdfast.item_attempts,
         holdfast.slices
"""
FILL: Mapping[str, LiteralString] = {
    FIRST: """INSERT INTO public.ai_insights (id, body)
              SELECT * FROM unnest(%(ids)s::bigint[], %(bodies)s::text[])""",
    SECOND: """INSERT INTO public.conversations (id, body)
               SELECT * FROM unnest(%(ids)s::bigint[], %(bodies)s::text[])""",
}
SEARCH = """
SELECT id, body FROM public.ai_insights
 ORDER BY embedding <=> (%(vector)s::real[])::vector LIMIT %(top)s
"""
COUNT = "SELECT count(*) AS stored FROM public.conversations WHERE embedding IS NOT NULL"


class DemoError(Exception):
    """The demo did not show what it is there to show."""


@dataclass(frozen=True, slots=True)
class Text:
    """One of the demo's texts."""

    id: int
    text: str


def run(environ: Mapping[str, str]) -> int:
    """Run the demo; 0 where everything came out as it should."""
    home = Path(environ.get("HOLDFAST_HOME") or ".holdfast").absolute() / "demo"
    signal.signal(signal.SIGTERM, _end)  # by an exception, so that what was started is stopped
    try:
        with _running(home) as url:
            _show(url, home)
    except DemoError as exc:
        print(f"demo: {exc}\n      the logs are in {home / 'logs'}", file=sys.stderr)
        return 1
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    sys.exit(1)


def _show(url: str, home: Path) -> None:
    ctx = _context(home)
    texts = [Text(row["id"], row["text"]) for row in _json_lines("demo_texts.jsonl")]
    try:
        _empty(ctx, texts)
        print(f"\n1. POST {len(texts)} short texts in 14 languages to {url}/api/embeddings")
        _watch(url, _post(url, FIRST, texts), None)
        print("\n2. Search by meaning, in pgvector, across languages")
        _search(ctx)
        print(f"\n3. POST {SECOND_SIZE} more; at {FLUSH_AT} done, Redis is emptied (FLUSHALL)")
        _watch(url, _post(url, SECOND, texts[:SECOND_SIZE]), ctx)
        _count(ctx)
    finally:
        ctx.close()
    print("\nPostgres remembered. Start it to stay with: make up")


@contextmanager
def _running(home: Path) -> Generator[str]:
    """Start everything as `make up` does, and give its URL."""
    ours = {"HOLDFAST_HOME": str(home), "PORT": "0"}
    theirs = {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}  # noqa: TID251 - handed on, less what would aim at another database
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "up"],
        env={**theirs, **ours},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield _ready_url(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


_OURS_ALONE = {item.upper() for item in config.Settings.__dataclass_fields__}


def _ready_url(process: "subprocess.Popen[str]") -> str:
    for line in process.stdout or ():
        word, _, url = line.strip().partition(" ")
        if word == "ready":
            return url
    raise DemoError("the services did not start")


def _context(home: Path) -> Context:
    environ = dict(line.split("=", 1) for line in (home / "env").read_text("utf-8").splitlines())
    return open_context(config.load(environ), application="holdfast demo", most_connections=2)


def _json_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text("utf-8").splitlines()]


def _empty(ctx: Context, texts: Sequence[Text]) -> None:
    with ctx.database.transaction() as tx:
        tx.execute(CLEAR)
        for statement in FILL.values():
            ids, bodies = [each.id for each in texts], [each.text for each in texts]
            tx.execute(statement, {"ids": ids, "bodies": bodies})


def _post(url: str, table: str, texts: Sequence[Text]) -> str:
    items = [{"target_table": table, "target_id": each.id, "text": each.text} for each in texts]
    answer = _call(f"{url}/api/embeddings", {"items": items})
    shown = {name: answer[name] for name in ("job_id", "state", "accepted", "duplicates")}
    print("   202", json.dumps(shown))
    return str(answer["status_url"])


def _call(url: str, body: Any = None) -> Any:  # noqa: ANN401 - JSON
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own loopback URL
    try:
        with urllib.request.urlopen(request, timeout=70) as response:  # noqa: S310 - the same
            return json.load(response)
    except urllib.error.HTTPError as exc:
        raise DemoError(f"{url} answered {exc.code}: {exc.read(500).decode()}") from exc


def _watch(url: str, status_url: str, flush: Context | None) -> None:
    """Show the progress of a job to its end; with `flush`, empty Redis on the way."""
    shown = ""
    while True:
        job = _call(f"{url}{status_url}?wait=5")
        shown = _draw(job, shown)
        if flush and job["counts"]["done"] >= FLUSH_AT:
            flush.link.flushall()
            flush = None
            print("\n   FLUSHALL: bells, metadata and RQ's own keys are gone")
        if job["state"] not in ("queued", "running"):
            break
    print()
    if job["state"] != "completed":
        raise DemoError(f"the job ended as {job['state']}: {job['errors']}")
    if flush:
        raise DemoError("the job was done before Redis could be emptied")
    result = _call(f"{url}{status_url}/result?limit=1")
    print(
        f"   {job['state']}: {job['counts']['done']} done; the first of {result['total']} results:"
    )
    print("  ", json.dumps(result["items"][0]))


def _draw(job: dict[str, Any], shown: str) -> str:
    progress = job["progress"]
    full = round(BAR_CHARACTERS * progress["percent"] / 100)
    eta = progress["eta_seconds"] and progress["eta_seconds"]["p50"]
    line = f"   [{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {progress['percent']:5.1f} %"
    line += f"  {job['counts']['done']}/{job['counts']['total']}"
    line += f"  {progress['rate_per_second']:.0f}/s" if progress["rate_per_second"] else ""
    line += f"  {eta} s left" if eta else ""
    if line != shown and sys.stdout.isatty():
        print(f"\r{line:<78}", end="", flush=True)
    elif line != shown:
        print(line, flush=True)
    return line


def _search(ctx: Context) -> None:
    embedder = find("embedders", "local")(EmbedderOptions("", "", MODEL, DIMENSION))
    texts = {row["id"]: row for row in _json_lines("demo_texts.jsonl")}
    searches = json.loads((HERE / "demo_searches.json").read_text("utf-8"))
    for search in searches:
        vector = embedder.embed_query(search["query"], model=MODEL, seconds=SEARCH_SECONDS)
        with ctx.database.transaction() as tx:
            rows = tx.execute(SEARCH, {"vector": vector, "top": TOP}).fetchall()
        found = [row["id"] for row in rows]
        wanted = search["expected"][0]
        if wanted not in found:
            raise DemoError(f"searched {search['query']!r}, found {found} without {wanted}")
        place, language = found.index(wanted) + 1, texts[wanted]["lang"]
        print(f"   {search['lang']}: {search['query']}")
        print(f"      -> {place}. {language}: {texts[wanted]['text']}")


def _count(ctx: Context) -> None:
    with ctx.database.transaction() as tx:
        row = tx.execute(COUNT).fetchone()
    stored = row["stored"] if row else 0
    if stored != SECOND_SIZE:
        raise DemoError(f"{stored} of {SECOND_SIZE} vectors are stored")
    print(f"   all {stored} vectors are in Postgres")
