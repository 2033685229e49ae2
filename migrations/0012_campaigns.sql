-- Campaigns: a target's rows embedded in another version, beside daily work; and which exact model
-- a backend has behind a name.
--
-- Locks: holdfast.backends and holdfast.vectors for a moment, and the latter's writers while its
-- index is built, some seconds a million. Old code: may go on beside this.
-- Undo: DROP TABLE holdfast.campaign_marks, holdfast.campaigns; DROP INDEX holdfast.vectors_by_time;
-- ALTER TABLE holdfast.backends DROP COLUMN digest.

ALTER TABLE holdfast.backends ADD COLUMN digest text;

CREATE INDEX vectors_by_time ON holdfast.vectors (stored_at);

CREATE TABLE holdfast.campaigns (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    target_table  text NOT NULL,
    from_version  text NOT NULL,
    to_version    text NOT NULL,
    -- closing: nothing of the old version is taken in hand, so that the last few can catch up.
    state         text NOT NULL DEFAULT 'running'
                  CHECK (state IN ('running', 'paused', 'closing', 'cut_over', 'cancelled')),
    -- The id of the last row that was read; all of them have been once it is_read.
    cursor        text,
    is_read       boolean NOT NULL DEFAULT false,
    submitted     bigint NOT NULL DEFAULT 0,
    -- Rows without a text that can be embedded.
    skipped       bigint NOT NULL DEFAULT 0,
    -- What was stored in the old version before this has been looked at.
    caught_up_to  timestamptz NOT NULL DEFAULT now() - interval '10 minutes',
    closes_until  timestamptz,
    -- Whether rows that failed in the new version are left behind at the cut-over.
    leaves_failed boolean NOT NULL DEFAULT false,
    said          text,
    started_at    timestamptz NOT NULL DEFAULT now(),
    cut_over_at   timestamptz,
    finished_at   timestamptz
);
CREATE UNIQUE INDEX campaigns_open ON holdfast.campaigns (target_table) WHERE finished_at IS NULL;

-- Coverage over time, a line a minute while it changes.
CREATE TABLE holdfast.campaign_marks (
    campaign_id  bigint NOT NULL REFERENCES holdfast.campaigns (id) ON DELETE CASCADE,
    at           timestamptz NOT NULL DEFAULT now(),
    has          bigint NOT NULL,
    wants        bigint NOT NULL,
    PRIMARY KEY (campaign_id, at)
);
