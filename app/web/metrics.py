"""/metrics for Prometheus: one collector over what Postgres knows; no ids, clients or texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from flask import Flask, Response, current_app
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.core import checks, coverage
from app.core.context import Context
from app.core.errors import StoreUnavailable
from app.core.store import fleet, vectors
from app.web.auth import needs


def register(app: Flask) -> None:
    """Serve /metrics."""
    app.add_url_rule("/metrics", "metrics", _metrics, methods=["GET"])


@needs("read")
def _metrics() -> Response:
    registry = CollectorRegistry()
    ctx = cast("Context", current_app.extensions["context"])
    registry.register(_Collector(ctx))
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


class _Collector:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of one moment."""
        up = GaugeMetricFamily("holdfast_postgres_up", "Whether Postgres answers.")
        try:
            with self._ctx.database.transaction() as tx:
                alive = fleet.alive(tx)
                paused = fleet.backends(tx, self._ctx.settings.embedder)
                gauges = fleet.gauges(tx)
                totals = fleet.totals(tx)
                alerts = fleet.alerts(tx)
                snapshot = fleet.oldest_snapshot(tx)
                backlog = vectors.backlog(tx)
                covered = vectors.coverage(tx)
        except StoreUnavailable:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from self._redis()
        yield from self._fleet(alive, paused)
        yield from self._work(gauges)
        yield from _outcomes(totals)
        yield from _alerts(alerts, snapshot)
        yield from self._sinks(backlog)
        yield from _coverage(covered)

    def _redis(self) -> Iterator[Metric]:
        faults = checks.redis_faults(self._ctx)
        up = GaugeMetricFamily("holdfast_redis_up", "Whether Redis answers.")
        up.add_metric([], int("redis" not in faults))
        yield up
        if "redis" not in faults:  # else nobody knows
            policy = GaugeMetricFamily(
                "holdfast_redis_policy_ok", "Whether Redis keeps what is written (noeviction)."
            )
            policy.add_metric([], int("redis_policy" not in faults))
            yield policy

    def _fleet(self, alive: fleet.Alive, backends: dict[str, fleet.Backend]) -> Iterator[Metric]:
        workers = GaugeMetricFamily("holdfast_workers", "Workers alive.", labels=["queue"])
        expected = dict.fromkeys(checks.expected_queues(self._ctx), 0)  # at 0 there is an alert
        for queue, count in sorted((expected | alive.workers).items()):
            workers.add_metric([queue], count)
        yield workers
        sweepers = GaugeMetricFamily("holdfast_sweepers", "Sweepers alive.")
        sweepers.add_metric([], alive.sweepers)
        yield sweepers
        paused = GaugeMetricFamily(
            "holdfast_backend_paused", "Whether a backend is paused.", labels=["backend", "model"]
        )
        for model, backend in sorted(backends.items()):
            paused.add_metric([self._ctx.settings.embedder, model], int(bool(backend.paused_since)))
        yield paused
        labels = ["backend", "model", "digest"]
        info = GaugeMetricFamily(
            "holdfast_model_info", "What exactly is behind a model's name now.", labels=labels
        )
        for model, backend in sorted(backends.items()):
            if backend.digest:
                info.add_metric([self._ctx.settings.embedder, model, backend.digest], 1)
        yield info

    def _work(self, gauges: fleet.Gauges) -> Iterator[Metric]:
        items = GaugeMetricFamily(
            "holdfast_items", "Items of open jobs, and failed ones.", labels=["status"]
        )
        for status, count in gauges.items.items():
            items.add_metric([status], count)
        yield items
        jobs = GaugeMetricFamily("holdfast_open_jobs", "Jobs that are not final.")
        jobs.add_metric([], gauges.open_jobs)
        yield jobs
        oldest = GaugeMetricFamily(
            "holdfast_oldest_due_age_seconds", "How long the oldest due item has waited."
        )
        oldest.add_metric([], gauges.oldest_due_seconds)
        yield oldest

    def _sinks(self, backlog: Sequence[vectors.Backlog]) -> Iterator[Metric]:
        rows = GaugeMetricFamily(
            "holdfast_sink_items",
            "Items that a sink which follows has not done.",
            labels=["sink", "status"],
        )
        oldest = GaugeMetricFamily(
            "holdfast_sink_oldest_pending_seconds",
            "How long the oldest of those that wait has waited.",
            labels=["sink"],
        )
        known = {(each.sink, each.status): each for each in backlog}
        for sink in self._ctx.settings.followers:
            for status in ("pending", "failed"):
                found = known.get((sink, status))
                rows.add_metric([sink, status], found.rows if found else 0)
            waiting = known.get((sink, "pending"))
            oldest.add_metric([sink], waiting.oldest_seconds if waiting else 0)
        yield rows
        yield oldest


OUTCOMES = {
    "claimed": "Items taken in hand, each time.",
    "done": "Items whose vector was stored.",
    "skipped": "Items whose target row was gone.",
    "retried": "Attempts that failed and will be repeated.",
    "released": "Items handed back uncharged.",
    "failed": "Items that wait for a person.",
}


def _outcomes(totals: Mapping[str, float]) -> Iterator[Metric]:
    for name, text in OUTCOMES.items():
        counter = CounterMetricFamily(f"holdfast_items_{name}", text)
        counter.add_metric([], totals[name])
        yield counter
    yield SummaryMetricFamily(
        "holdfast_item_processing_seconds",
        "From the claim of an item to its end.",
        count_value=int(totals["done"]),
        sum_value=totals["processing_seconds"],
    )


def _alerts(alerts: Sequence[fleet.Alert], snapshot: fleet.Snapshot | None) -> Iterator[Metric]:
    gauge = GaugeMetricFamily("holdfast_alert", "Alerts that are on.", labels=["name"])
    for each in alerts:
        gauge.add_metric([each.name], 1)
    yield gauge
    oldest = GaugeMetricFamily(
        "holdfast_oldest_snapshot_seconds",
        "How long somebody has kept dead rows from being cleaned away.",
    )
    oldest.add_metric([], snapshot.seconds if snapshot else 0)
    yield oldest


def _coverage(surveys: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ["target_table", "embedding_version", "sink"]
    share = GaugeMetricFamily(
        "holdfast_coverage_ratio", "Share with the vector of the current text.", labels=labels
    )
    without = GaugeMetricFamily(
        "holdfast_rows_without_vector",
        "Rows of the current version without a vector, for which none is on its way.",
        labels=["target_table"],
    )
    for each in surveys:
        names = [str(each[name]) for name in labels]
        share.add_metric(names, coverage.share(each["kinds"]))
        if each["is_current"] and each["sink"] == "pgvector":
            without.add_metric([names[0]], each["kinds"].get("missing", 0))
    yield share
    yield without
