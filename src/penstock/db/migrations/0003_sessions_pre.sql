-- Sessions: open lanes of width 1. A lane's `batch_id` names its batch or its session; leases, deferrals and reclaims of a
-- session carry the session's id there.
ALTER TABLE penstock.lanes
  DROP CONSTRAINT lanes_batch_id_fkey,
  ADD COLUMN session boolean NOT NULL DEFAULT false,
  -- A session's place in the line: when it last became ready. Batches share one place, and go by deadline and age.
  ADD COLUMN turn timestamptz NOT NULL DEFAULT '-infinity',
  -- Whether a head that failed for good closes the lane until somebody decides.
  ADD COLUMN blocks boolean NOT NULL DEFAULT false;
DROP INDEX penstock.lanes_runnable;
CREATE INDEX lanes_runnable ON penstock.lanes (pool, route, priority DESC, deadline, turn, id) WHERE runnable;

CREATE TABLE penstock.sessions (
  id              uuid PRIMARY KEY,
  owner           text NOT NULL,
  key             text NOT NULL CHECK (key <> '' AND length(key) <= 256),
  lane_id         bigint NOT NULL UNIQUE,
  on_dead_head    text NOT NULL DEFAULT 'continue',
  max_queued      int4,
  wait_timeout_s  float8,
  priority        int2 NOT NULL DEFAULT 0,
  created_at      timestamptz NOT NULL,
  deleted_at      timestamptz,
  -- What it goes by until it is deleted. Looked up by this alone: among indexes that begin with the same column, or are
  -- about the same rows, the planner may take the wrong one, and walk all of an owner's sessions.
  place           text[] UNIQUE GENERATED ALWAYS AS (CASE WHEN deleted_at IS NULL THEN ARRAY[owner, key] END) STORED,
  CONSTRAINT sessions_on_dead_head_legal CHECK (on_dead_head IN ('continue', 'block')),
  CONSTRAINT sessions_room_for_one CHECK (max_queued >= 1),
  CONSTRAINT sessions_wait_is_time CHECK (wait_timeout_s > 0)
);
CREATE INDEX sessions_newest ON penstock.sessions (owner, id DESC) WHERE deleted_at IS NULL;

-- One accepted request: where it stands in its session, and what it asks for. Its body is a template, its answer an outcome.
-- Templates of sessions have sources below zero, by their lane: those of files count upwards.
CREATE TABLE penstock.session_requests (
  lane_id          bigint NOT NULL,
  ordinal          int4 NOT NULL,
  id               uuid NOT NULL UNIQUE,
  session_id       uuid NOT NULL,
  owner            text NOT NULL,
  pool             text NOT NULL,
  route            text NOT NULL,
  endpoint         text NOT NULL,
  stream           boolean NOT NULL DEFAULT false,
  -- Somebody waits for the answer: record it at once and ring.
  waited           boolean NOT NULL DEFAULT false,
  idempotency_key  text,
  fingerprint      bytea,
  accepted_at      timestamptz NOT NULL,
  cancelled_at     timestamptz,
  PRIMARY KEY (lane_id, ordinal)
);
CREATE UNIQUE INDEX session_requests_idempotent ON penstock.session_requests (session_id, idempotency_key)
  WHERE idempotency_key IS NOT NULL;
-- As with the engine's tables: however few lanes were known.
ALTER TABLE penstock.session_requests ALTER COLUMN lane_id SET (n_distinct = -0.05);
CREATE INDEX session_requests_cancelled ON penstock.session_requests (lane_id, ordinal) WHERE cancelled_at IS NOT NULL;

-- What became of requests so far. Each part is one probe: a join might read the tables whole.
CREATE VIEW penstock.session_answers AS
  SELECT r.id, r.session_id, s.owner, s.key AS session_key, s.deleted_at AS session_deleted_at, r.lane_id, r.ordinal,
         r.endpoint, r.route, r.stream,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'cancelled'
              WHEN o.state = 'completed' THEN 'completed'
              WHEN o.state IS NOT NULL THEN 'failed'
              WHEN l.id IS NOT NULL THEN 'processing'
              ELSE 'pending' END AS status,
         o.status_code, o.response,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'cancelled' ELSE o.error_code END AS error_code,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'It was cancelled before it was sent.'
              ELSE o.error_message END AS error_message,
         coalesce(o.attempts - (r.cancelled_at IS NOT NULL)::int4, l.attempt, d.attempt - 1, 0) AS attempts,
         r.accepted_at,
         coalesce(o.finished_at, r.cancelled_at) AS completed_at, r.fingerprint, coalesce(o.lease_id, l.id) AS lease_id
    FROM penstock.session_requests r
   CROSS JOIN LATERAL (
     SELECT owner, key, deleted_at FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s
    LEFT JOIN LATERAL (
     SELECT state, status_code, response, error_code, error_message, attempts, finished_at, lease_id
       FROM penstock.outcomes WHERE lane_id = r.lane_id AND ordinal = r.ordinal LIMIT 1) AS o ON true
    LEFT JOIN LATERAL (
     SELECT id, attempt FROM penstock.leases WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS l ON true
    LEFT JOIN LATERAL (
     SELECT attempt FROM penstock.deferrals WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS d ON true;

-- Pieces of answers on their way to callers who wait on another machine. They only matter while the call lasts.
CREATE UNLOGGED TABLE penstock.session_stream (
  request_id  uuid NOT NULL,
  lease_id    bigint NOT NULL,
  piece       int4 NOT NULL,
  bytes       bytea NOT NULL,
  PRIMARY KEY (request_id, lease_id, piece)
);

ALTER TABLE penstock.erasures
  DROP CONSTRAINT erasures_kind_check,
  ADD CONSTRAINT erasures_kind_check
    CHECK (kind IN ('file', 'batch', 'output', 'errors', 'upload', 'message_batch', 'message_batch_results', 'session'));
ALTER TABLE penstock.erasure_pieces
  DROP CONSTRAINT erasure_pieces_what_check,
  ADD CONSTRAINT erasure_pieces_what_check
    CHECK (what IN ('templates', 'chunks', 'outcomes', 'completed', 'not_completed', 'attempts', 'reclaims', 'journal',
                    'deferrals', 'session_requests'));
-- As for the other tables that are deleted from.
ALTER TABLE penstock.sessions SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.session_requests SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.session_stream SET (vacuum_truncate = off, toast.vacuum_truncate = off);
