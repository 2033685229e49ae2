"""/metrics for Prometheus: one collector over what Postgres knows; no ids, clients or texts."""

from collections.abc import Iterator
from typing import cast

from flask import Flask, Response, current_app
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.core import checks
from app.core.context import Context
from app.core.errors import StoreUnavailable
from app.core.store import fleet
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
        except StoreUnavailable:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from self._redis()
        yield from self._fleet(alive, paused)
        yield from self._work(gauges)

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
