-- The fleet: which processes live, which backends are paused, how fast slices go.
--
-- Locks: none, all new. Old code: does not know them. Undo: DROP TABLE all three.

CREATE TABLE holdfast.processes (
    name          text PRIMARY KEY,
    kind          text NOT NULL CHECK (kind IN ('worker', 'sweeper')),
    queue         text NOT NULL DEFAULT '',
    host          text NOT NULL,
    pid           integer NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT now(),
    heartbeat_at  timestamptz NOT NULL DEFAULT now(),
    alive_until   timestamptz NOT NULL,
    counters      jsonb NOT NULL DEFAULT '{}'
);

-- A backend is an embedder and a model. Paused: left alone until paused_until, then tried with
-- one item, by one worker until probe_until, before the rest goes on.
CREATE TABLE holdfast.backends (
    name          text NOT NULL,
    model         text NOT NULL,
    paused_since  timestamptz,
    paused_until  timestamptz,
    probe_until   timestamptz,
    tries         integer NOT NULL DEFAULT 0,
    error_class   text,
    message       text,
    last_ok_at    timestamptz,
    -- The most items that it took in one call, where more were refused or too slow; and since when.
    max_items     integer,
    limited_at    timestamptz,
    PRIMARY KEY (name, model),
    CHECK ((paused_since IS NULL) = (paused_until IS NULL)),
    CHECK ((max_items IS NULL) = (limited_at IS NULL)),
    CHECK (probe_until IS NULL OR paused_since IS NOT NULL)
);

-- One row a slice, for rates and estimates; kept for an hour.
CREATE TABLE holdfast.slices (
    at        timestamptz NOT NULL DEFAULT now(),
    job_id    text NOT NULL,
    backend   text NOT NULL,
    items     integer NOT NULL,
    seconds   double precision NOT NULL
);
CREATE INDEX slices_by_time ON holdfast.slices (at);
CREATE INDEX slices_by_job ON holdfast.slices (job_id, at);
