-- Clients: hashed keys with scopes, and who asked for a second try of what.
--
-- Locks: none, all new. Old code: does not know them. Undo: DROP TABLE both.

CREATE TABLE holdfast.api_keys (
    prefix      text PRIMARY KEY,
    key_hash    bytea NOT NULL,
    client      text NOT NULL,
    scopes      text[] NOT NULL
                CHECK (scopes <@ ARRAY['submit', 'read', 'requeue', 'admin'] AND scopes <> '{}'),
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);

CREATE TABLE holdfast.requeues (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id  text NOT NULL,
    client  text NOT NULL,
    via     text NOT NULL CHECK (via IN ('api', 'cli', 'dashboard')),
    reason  text,
    items   integer NOT NULL,
    at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX requeues_by_job ON holdfast.requeues (job_id, at);
