"""The self-audit: silent as long as all is well, and it names each thing that is not."""

import argparse
from collections.abc import Iterator

import pytest

from app.core.store import audit
from app.core.store.audit import AUDIT
from tests.drains import Mill, open_mill
from tests.fakes import Fake
from worker import admin, upkeep

# What breaks each of them, said in the order of AUDIT.
BREAKS = {
    "an item waits or is in hand for a job that is not open": (
        """UPDATE holdfast.jobs SET state = 'completed', finished_at = now() - interval '1 hour',
                  expires_at = now(), final_counts = '{}' WHERE state <> 'completed'"""
    ),
    "a lease ran out and nobody recovered it": (
        """UPDATE embedding_retry_queue
              SET status = 'processing', lease_token = 1, leased_by = 'x', max_attempts = 5,
                  lease_until = now() - interval '1 hour' WHERE status = 'pending'"""
    ),
    "an item has more attempts than it may have": (
        "UPDATE embedding_retry_queue SET attempts = 9, max_attempts = 5 WHERE status = 'done'"
    ),
    "a job has nothing open and is not final": (
        """UPDATE holdfast.jobs SET state = 'running', finished_at = NULL, final_counts = NULL,
                  created_at = now() - interval '1 hour' WHERE state = 'completed';
           UPDATE embedding_retry_queue SET updated_at = now() - interval '1 hour'"""
    ),
    "a job counts other items than it has": (
        "UPDATE holdfast.job_counts SET pending = pending + 1 WHERE pending > 0"
    ),
    "a final job does not add up": (
        """UPDATE holdfast.jobs SET final_counts = '{"pending": 1}' WHERE state = 'completed'"""
    ),
    "what is done does not stand in the ledger": "DELETE FROM holdfast.vectors",
    "a sink claims a version that the ledger does not have": (
        """INSERT INTO holdfast.item_sinks (vector_id, sink, version_wanted)
           SELECT id, 'opensearch', version + 1 FROM holdfast.vectors"""
    ),
    "a failed item has no attempt that says why": (
        """UPDATE embedding_retry_queue
              SET status = 'processing', lease_token = 1, leased_by = 'x', max_attempts = 5,
                  lease_until = now(), attempts = 1, deliveries = 1 WHERE status = 'pending';
           UPDATE embedding_retry_queue
              SET status = 'failed', error_class = 'unclear', lease_token = NULL,
                  leased_by = NULL, lease_until = NULL WHERE status = 'processing'"""
    ),
}


@pytest.fixture
def mill(shared_database_url: str, redis_url: str) -> Iterator[Mill]:
    """Give a queue in which one job is done and one waits."""
    with Fake() as fake, open_mill(shared_database_url, redis_url, fake) as mill:
        mill.empty()
        mill.work(mill.submit("one", "two"))
        mill.submit("three", first=3)
        yield mill
        mill.empty()


def violations(mill: Mill) -> list[str]:
    with mill.ctx.database.transaction() as tx:
        return [each.what for each in audit.audit(tx)]


def test_nothing_is_said_while_all_is_well(mill: Mill) -> None:
    assert violations(mill) == []


def test_each_of_them_has_something_that_breaks_it() -> None:
    assert list(BREAKS) == list(AUDIT)


@pytest.mark.parametrize("what", AUDIT)
def test_what_does_not_hold_is_named(mill: Mill, what: str) -> None:
    mill.rows(BREAKS[what])

    assert what in violations(mill)


def test_the_command_says_so_and_ends_with_one(
    mill: Mill, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    upkeep.add_parsers(parser.add_subparsers())
    assert admin.run(mill.settings, parser.parse_args(["audit"])) == 0
    assert "9 things" in capsys.readouterr().out
    mill.rows("DELETE FROM holdfast.vectors")

    assert admin.run(mill.settings, parser.parse_args(["audit"])) == 1
    said = capsys.readouterr().out
    assert "what is done does not stand in the ledger" in said
    assert "three" not in said
