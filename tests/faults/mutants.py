"""The product broken in one place each: what a suite that proves anything must notice."""

from dataclasses import dataclass

ITEMS = "app/core/store/items.py"
JOBS = "app/core/store/jobs.py"
LIVE = "app/core/live.py"
SUBMISSION = "app/core/submission.py"
TRACE = "app/core/trace.py"
VECTORS = "app/core/store/vectors.py"
CALLS = "worker/calls.py"
FOLLOW = "worker/sweep/followers.py"
EMBEDDING = "worker/embedding.py"
SWEEP = "worker/sweep/__init__.py"
RINGS = "worker/sweep/rings.py"

SCENARIOS = "tests/faults/test_scenarios.py::test_"
FENCES = "tests/faults/test_fences.py::test_"
OWNERS = "tests/security/test_strangers.py::test_"
FOLLOWERS = "tests/integration/test_followers.py::test_"
LOCKS = "tests/integration/test_outbox_locks.py::test_"

NEW_TEXTS = "f4_a_worker_that_wakes_while_another_has_its_items_with_new_texts_changes_nothing"
STOPPED = "f4_a_worker_that_was_stopped_longer_than_its_leases_changes_nothing"
POISON = "f6_a_text_that_kills_its_horse_each_time_fails_at_the_limit_and_takes_no_neighbour"
KILLED = "f2_the_leases_of_a_killed_horse_end_at_once_and_cost_their_attempt"
IN_A_SETTLE = "f2_a_horse_that_is_killed_in_a_settle_leaves_all_of_it_or_nothing[before the settle]"
UNCOMMITTED = "f15_a_batch_whose_commit_never_arrived_is_not_accepted"
EVERY_FAULT = "f20_a_backend_with_every_fault_in_turn_costs_nobody_an_attempt"
LOST_BELLS = "f24_bells_that_are_lost_doubled_or_emptied_change_nothing_but_time"
CLOCKS = "f23_hosts_whose_clocks_are_hours_apart_move_no_lease_and_no_back_off"
ANY_ORDER = "items_that_a_user_enqueues_in_any_order_stop_no_settle"
ROW_HELD = "a_row_that_its_owner_holds_keeps_no_neighbour_and_nobody_waits_in_a_ring"
FORGED = (
    "tests/security/test_forged_results.py::test_a_forged_page_is_never_shown_and_made_again"
    "[other rows with the same length and checksum]"
)
NEWER_TEXT = "a_text_that_changes_while_the_old_one_is_in_hand_is_the_last_one_written"
ONLY_ITSELF = "one_that_is_down_delays_only_itself_and_nothing_is_embedded_twice"
STRANGERS = "what_is_another_client_s_is_to_a_stranger_as_if_it_were_not_there"


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: the old text stands in the file exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A product that breaks a promise, and the test that has to notice."""

    name: str
    caught_by: str
    shows: str
    """What the failure has to say, so that it is this promise that was found broken."""
    edits: tuple[Edit, ...]


HOLD = """
SELECT id
  FROM public.embedding_retry_queue
 WHERE id = ANY(%(ids)s::bigint[]) AND lease_token = %(token)s AND status = 'processing'
   FOR UPDATE SKIP LOCKED
"""
UNFENCED_HOLD = Edit(
    ITEMS, f'HOLD = """{HOLD}', f'HOLD = """{HOLD}'.replace(" AND lease_token = %(token)s", "")
)
UNFENCED_SETTLE = Edit(ITEMS, " AND q.lease_token = o.token AND q.status", " AND q.status")

CLAIM_SET = """       FOR UPDATE SKIP LOCKED
), lease AS (
    SELECT nextval('holdfast.lease_tokens') AS token
)
UPDATE public.embedding_retry_queue AS q
   SET status = 'processing', attempts = q.attempts + 1, """
AT_THE_FAILURE = """q.attempts + (CASE WHEN o.error_class IS NULL THEN 0 ELSE 1 END) - o.refund"""

MUTANTS = (
    Mutant(
        "effects without the token",
        FENCES + NEW_TEXTS,
        "I8 done and a vector are one",
        (UNFENCED_HOLD,),
    ),
    Mutant(
        "effects and outcomes without the token",
        FENCES + NEW_TEXTS,
        "_check_vectors",
        (UNFENCED_HOLD, UNFENCED_SETTLE),
    ),
    Mutant(
        "attempts counted at the failure and not at the claim",
        FENCES + POISON,
        "assert 6 == 3",
        (
            Edit(
                ITEMS,
                "     LIMIT %(limit)s\n" + CLAIM_SET,
                "     LIMIT %(limit)s\n" + CLAIM_SET.replace("q.attempts + 1", "q.attempts"),
            ),
            Edit(
                ITEMS,
                "     LIMIT 1\n" + CLAIM_SET,
                "     LIMIT 1\n" + CLAIM_SET.replace("q.attempts + 1", "q.attempts"),
            ),
            Edit(ITEMS, "attempts = q.attempts - o.refund", f"attempts = {AT_THE_FAILURE}"),
        ),
    ),
    Mutant(
        "a crash that costs no attempt",
        SCENARIOS + KILLED,
        "sorted(",
        (
            Edit(
                ITEMS,
                "kills = q.kills + 1, next",
                "attempts = q.attempts - 1, kills = q.kills + 1, next",
            ),
        ),
    ),
    Mutant(
        "a crash that leaves its items together",
        FENCES + POISON,
        "'failed'",
        (
            Edit(
                ITEMS,
                "status = 'pending' AND kills = 0 AND next_attempt_at <= now()",
                "status = 'pending' AND next_attempt_at <= now()",
            ),
        ),
    ),
    Mutant(
        "202 though the COMMIT never arrived",
        FENCES + UNCOMMITTED,
        "(202, 202) == (503, 202)",
        (
            Edit(SUBMISSION, "import contextmanager", "import contextmanager, suppress"),
            Edit(
                SUBMISSION,
                "        with connection.transaction():\n            stored = _merge(",
                "        with suppress(Exception), connection.transaction():\n"
                "            stored = _merge(",
            ),
        ),
    ),
    Mutant(
        "a sweeper that recovers no leases",
        SCENARIOS + STOPPED,
        "wait_until_final",
        (Edit(SWEEP, '    ("leases", leases.run_once),\n', ""),),
    ),
    Mutant(
        "a sweeper that rings for nothing",
        SCENARIOS + LOST_BELLS,
        "wait_until_final",
        (Edit(RINGS, "if missing > 0:", "if missing > 10**9:"),),
    ),
    Mutant(
        "an effect and its done in two transactions",
        FENCES + IN_A_SETTLE,
        "I8 done and a vector are one",
        (
            Edit(
                EMBEDDING,
                "            outcomes = self._outcomes(tx, answer.only(held.ours))\n",
                "            outcomes = self._outcomes(tx, answer.only(held.ours))\n"
                "        with self.ctx.database.transaction() as tx:\n",
            ),
        ),
    ),
    Mutant(
        "an outage that costs an attempt",
        SCENARIOS + EVERY_FAULT,
        "== {1}",
        (
            Edit(
                ITEMS,
                "_Row(*ids, ItemStatus.PENDING, 1, seconds,",
                "_Row(*ids, ItemStatus.PENDING, 0, seconds,",
            ),
        ),
    ),
    Mutant(
        "vectors that nobody checks",
        SCENARIOS + EVERY_FAULT,
        "'failed'",
        (Edit(CALLS, "        check_vectors(vectors, count", "        dict(count"),),
    ),
    Mutant(
        "leases by the worker's own clock",
        FENCES + CLOCKS,
        "== {1}",
        (
            Edit(ITEMS, "from typing import Any\n", "from typing import Any\nimport time\n"),
            Edit(
                ITEMS,
                '"limit": limit, "paused": list(paused_models)}',
                '"limit": limit, "paused": list(paused_models), "clock": time.time()}',
            ),
            Edit(
                ITEMS,
                "cursor.execute(CLAIM, values)",
                "cursor.execute(CLAIM.replace('until = now()', 'until = to_timestamp(%(clock)s)'),"
                " values)",
            ),
        ),
    ),
    Mutant(
        "a back-off by the worker's own clock",
        FENCES + CLOCKS,
        "wait_until_final",
        (
            Edit(ITEMS, "from typing import Any\n", "from typing import Any\nimport time\n"),
            Edit(
                ITEMS,
                '"reasons": [row.skip_reason for row in rows],',
                '"reasons": [row.skip_reason for row in rows], "clock": time.time(),',
            ),
            Edit(
                ITEMS,
                "now() + make_interval(secs => o.after_seconds)",
                "to_timestamp(%(clock)s) + make_interval(secs => o.after_seconds)",
            ),
        ),
    ),
    Mutant(
        "a settle that waits for who has locked an item",
        LOCKS + ANY_ORDER,
        "still False",
        (Edit(ITEMS, f'HOLD = """{HOLD}', f'HOLD = """{HOLD}'.replace(" SKIP LOCKED", "")),),
    ),
    Mutant(
        "a job that anybody finds in Postgres",
        OWNERS + STRANGERS,
        "house.told(job_id",
        (
            Edit(
                JOBS,
                " WHERE id = %(id)s AND (%(client)s::text IS NULL OR client = %(client)s)",
                " WHERE id = %(id)s",
            ),
        ),
    ),
    Mutant(
        "a job that anybody finds in Redis",
        OWNERS + STRANGERS,
        "house.told(job_id",
        (
            Edit(
                LIVE,
                "if owner is None or (client is not None and owner.decode() != client):",
                "if owner is None:",
            ),
        ),
    ),
    Mutant(
        "pages of a result under a checksum that can be aimed at",
        FORGED,
        "DID NOT RAISE",
        (
            Edit(TRACE, "import hashlib\n", "import zlib\n"),
            Edit(TRACE, "hashlib.sha256(packed).hexdigest()", "str(zlib.crc32(packed))"),
        ),
    ),
    Mutant(
        "a follower's outcome without the version that it is of",
        FOLLOWERS + NEWER_TEXT,
        "item_sinks",
        (Edit(VECTORS, " AND s.version_wanted <= o.version", ""),),
    ),
    Mutant(
        "a sink that is asked again while it is away",
        FOLLOWERS + ONLY_ITSELF,
        "it never rests",
        (
            Edit(
                FOLLOW,
                "        if whole and whole.is_paused:\n            return 0\n",
                "",
            ),
        ),
    ),
    Mutant(
        "a follower's outage that costs its rows an attempt",
        FOLLOWERS + ONLY_ITSELF,
        "[1, 1, 1]",
        (Edit(VECTORS, 'int(each.status == "pending")', "0"),),
    ),
)
