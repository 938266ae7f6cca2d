-- The batch server: files as they were uploaded, validation, results as files, journals for followers, keys, uploads in
-- parts, webhooks, erasure.

-- Files. An `input` is what somebody uploaded; `output` and `errors` are a batch's results, which are read from its
-- outcomes and get a row here when the batch ends.
ALTER TABLE penstock.files
  ALTER COLUMN worker_id DROP NOT NULL,
  ADD COLUMN kind text NOT NULL DEFAULT 'input',
  ADD COLUMN purpose text NOT NULL DEFAULT 'batch',
  ADD COLUMN batch_id uuid,
  ADD COLUMN expires_at timestamptz,
  ADD COLUMN idempotency_key text,
  -- Why no batch can run over it: [{"code", "line", "message", "param"}]. Such a file holds no templates.
  ADD COLUMN problems jsonb,
  -- Pieces of the upload as it came, for those who want the very bytes back.
  ADD COLUMN chunks int4 NOT NULL DEFAULT 0,
  ADD CONSTRAINT files_kind_legal CHECK (kind IN ('input', 'output', 'errors')),
  ADD CONSTRAINT files_results_have_a_batch CHECK ((kind = 'input') = (batch_id IS NULL)),
  ADD CONSTRAINT files_problems_hold_nothing CHECK (problems IS NULL OR lines = 0),
  ADD CONSTRAINT files_ingest_has_a_worker CHECK (state <> 'ingesting' OR worker_id IS NOT NULL);
-- What a message batch was asked for with is nobody's file: it comes and goes with its batch.
CREATE INDEX files_newest ON penstock.files (owner, id DESC)
  WHERE state = 'ready' AND deleted_at IS NULL AND purpose <> 'message_batch';
CREATE INDEX files_newest_by_purpose ON penstock.files (owner, purpose, id DESC)
  WHERE state = 'ready' AND deleted_at IS NULL;
CREATE INDEX files_expiring ON penstock.files (expires_at)
  WHERE expires_at IS NOT NULL AND state = 'ready' AND deleted_at IS NULL;
CREATE UNIQUE INDEX files_idempotent ON penstock.files (owner, idempotency_key)
  WHERE idempotency_key IS NOT NULL AND state = 'ready';
CREATE UNIQUE INDEX files_of_batch ON penstock.files (batch_id, kind) WHERE batch_id IS NOT NULL;

-- What was uploaded, as it came, in pieces of at most a mebibyte, each compressed (zstd) on its own.
CREATE TABLE penstock.file_chunks (
  source_id  bigint NOT NULL,
  chunk      int4 NOT NULL,
  size       int4 NOT NULL CHECK (size > 0),
  bytes      bytea NOT NULL,
  PRIMARY KEY (source_id, chunk)
) WITH (fillfactor = 100);
ALTER TABLE penstock.file_chunks ALTER COLUMN bytes SET STORAGE EXTERNAL;
CREATE TRIGGER file_chunks_are_immutable BEFORE UPDATE ON penstock.file_chunks
  FOR EACH STATEMENT EXECUTE FUNCTION penstock.refuse_update();

-- Batches. One that was asked for is `validating` until its lanes exist, or `failed` if it cannot have any.
ALTER TABLE penstock.batches
  DROP COLUMN state,
  DROP CONSTRAINT batches_end_once,
  DROP CONSTRAINT batches_frozen_when_ended,
  ADD COLUMN dialect text NOT NULL DEFAULT 'run',
  ADD COLUMN endpoint text,
  ADD COLUMN completion_window text,
  ADD COLUMN window_s float8,
  ADD COLUMN validated_at timestamptz,
  ADD COLUMN failed_at timestamptz,
  ADD COLUMN problems jsonb,
  ADD COLUMN fingerprint bytea,
  -- Since when its requests and results are gone, while it can still be looked at.
  ADD COLUMN archived_at timestamptz,
  -- How often it was asked to run its failures again. A batch cannot end on figures from before it was asked.
  ADD COLUMN reruns int4 NOT NULL DEFAULT 0,
  ADD COLUMN output_file_id uuid,
  ADD COLUMN error_file_id uuid,
  ADD COLUMN output_expires_after_s int4,
  ADD COLUMN output_bytes bigint,
  ADD COLUMN error_bytes bigint,
  ADD COLUMN input_tokens bigint,
  ADD COLUMN cached_tokens bigint,
  ADD COLUMN output_tokens bigint,
  ADD COLUMN reasoning_tokens bigint;
UPDATE penstock.batches SET validated_at = created_at,
       output_bytes = CASE WHEN completed IS NOT NULL THEN 0 END, error_bytes = CASE WHEN completed IS NOT NULL THEN 0 END,
       input_tokens = CASE WHEN completed IS NOT NULL THEN 0 END, cached_tokens = CASE WHEN completed IS NOT NULL THEN 0 END,
       output_tokens = CASE WHEN completed IS NOT NULL THEN 0 END,
       reasoning_tokens = CASE WHEN completed IS NOT NULL THEN 0 END;
ALTER TABLE penstock.batches
  ADD COLUMN state text NOT NULL GENERATED ALWAYS AS (
    CASE WHEN completed_at IS NOT NULL THEN 'completed'
         WHEN cancelled_at IS NOT NULL THEN 'cancelled'
         WHEN expired_at IS NOT NULL THEN 'expired'
         WHEN failed_at IS NOT NULL THEN 'failed'
         WHEN cancelling_at IS NOT NULL THEN 'cancelling'
         WHEN validated_at IS NULL THEN 'validating'
         WHEN paused_at IS NOT NULL THEN 'paused'
         ELSE 'in_progress' END) STORED,
  ADD CONSTRAINT batches_dialect_legal CHECK (dialect IN ('run', 'openai', 'anthropic')),
  ADD CONSTRAINT batches_end_once CHECK (num_nonnulls(completed_at, cancelled_at, expired_at, failed_at) <= 1),
  ADD CONSTRAINT batches_failed_says_why CHECK ((failed_at IS NULL) = (problems IS NULL)),
  ADD CONSTRAINT batches_frozen_when_ended CHECK (
    num_nonnulls(completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens,
                 output_tokens, reasoning_tokens)
      = CASE WHEN num_nonnulls(completed_at, cancelled_at, expired_at, failed_at) = 0 THEN 0 ELSE 11 END);
DROP INDEX penstock.batches_newest;
CREATE INDEX batches_newest_by_state ON penstock.batches (owner, dialect, state, id DESC) WHERE deleted_at IS NULL;
CREATE INDEX batches_by_metadata ON penstock.batches USING gin (metadata jsonb_path_ops);
CREATE INDEX batches_of_file ON penstock.batches (file_id) WHERE file_id IS NOT NULL;
CREATE UNIQUE INDEX batches_output ON penstock.batches (output_file_id) WHERE output_file_id IS NOT NULL;
CREATE UNIQUE INDEX batches_errors ON penstock.batches (error_file_id) WHERE error_file_id IS NOT NULL;
DROP INDEX penstock.batches_unfinished;
CREATE INDEX batches_unfinished ON penstock.batches (id)
  WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL;

-- Message batches whose results are to go some time after they were made.
CREATE INDEX batches_to_archive ON penstock.batches (created_at)
  WHERE dialect = 'anthropic' AND completed IS NOT NULL AND archived_at IS NULL AND deleted_at IS NULL;
CREATE INDEX batches_unvalidated ON penstock.batches (id) WHERE state = 'validating' AND deleted_at IS NULL;

-- Held deferrals of open lanes, and others of closed ones, are found without reading the rest.
DROP INDEX penstock.deferrals_of_batch;
CREATE INDEX deferrals_of_batch ON penstock.deferrals (batch_id, held, id);
-- Who holds anything, one probe per worker: what the dead held is found without reading what the living hold.
CREATE INDEX leases_of_worker ON penstock.leases (worker_id);

-- Work that one process does for all: whoever moves the time on has the turn.
CREATE TABLE penstock.duties (
  name     text PRIMARY KEY,
  done_at  timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 10);
INSERT INTO penstock.duties (name) VALUES ('round'), ('stuck');

ALTER TABLE penstock.progress
  ADD COLUMN output_bytes bigint NOT NULL DEFAULT 0,
  ADD COLUMN error_bytes bigint NOT NULL DEFAULT 0,
  ADD COLUMN input_tokens bigint NOT NULL DEFAULT 0,
  ADD COLUMN cached_tokens bigint NOT NULL DEFAULT 0,
  ADD COLUMN output_tokens bigint NOT NULL DEFAULT 0,
  ADD COLUMN reasoning_tokens bigint NOT NULL DEFAULT 0;

-- What each settle decided, in the order of commit: how a running batch is followed. A reader takes only rows of
-- transactions older than every one still running (`xact`), so that nothing can turn up behind its place.
CREATE TABLE penstock.journal (
  batch_id    uuid NOT NULL,
  xact        xid8 NOT NULL DEFAULT pg_current_xact_id(),
  id          bigint GENERATED ALWAYS AS IDENTITY,
  lane_id     bigint NOT NULL,
  completed   int4multirange NOT NULL,
  others      int4multirange NOT NULL,
  completed_count  int4 NOT NULL GENERATED ALWAYS AS (penstock.ordinal_count(completed)) STORED,
  others_count     int4 NOT NULL GENERATED ALWAYS AS (penstock.ordinal_count(others)) STORED,
  written_at  timestamptz NOT NULL,
  PRIMARY KEY (batch_id, xact, id)
) WITH (autovacuum_vacuum_insert_scale_factor = 1.0);

-- Tables that are looked into for one batch, lane or source are to be read through an index, however few of these there
-- were when the rows were last counted: one batch alone would make every later search read the whole table.
ALTER TABLE penstock.files ALTER COLUMN batch_id SET (n_distinct = -0.05);
ALTER TABLE penstock.templates ALTER COLUMN source_id SET (n_distinct = -0.05);
ALTER TABLE penstock.lanes ALTER COLUMN batch_id SET (n_distinct = -0.05);
ALTER TABLE penstock.leases ALTER COLUMN batch_id SET (n_distinct = -0.05);
ALTER TABLE penstock.deferrals ALTER COLUMN batch_id SET (n_distinct = -0.05);
ALTER TABLE penstock.outcomes ALTER COLUMN lane_id SET (n_distinct = -0.05);
ALTER TABLE penstock.attempts ALTER COLUMN lane_id SET (n_distinct = -0.05);
ALTER TABLE penstock.reclaims ALTER COLUMN lane_id SET (n_distinct = -0.05);
ALTER TABLE penstock.progress ALTER COLUMN batch_id SET (n_distinct = -0.05);
ALTER TABLE penstock.journal ALTER COLUMN batch_id SET (n_distinct = -0.05);

-- The first ordinal of a source lane whose line is past the given one: lines grow with ordinals, so halving finds it.
CREATE FUNCTION penstock.ordinal_after_line(source bigint, lane int4, total int4, after_line int4) RETURNS int4
LANGUAGE plpgsql STABLE STRICT
AS $$
DECLARE
  low int4 := 0;
  high int4 := least(total, greatest(after_line, 0));
  middle int4;
  at_line int4;
BEGIN
  WHILE low < high LOOP
    middle := (low + high) / 2;
    SELECT t.line INTO at_line FROM penstock.templates t
     WHERE t.source_id = source AND t.source_lane = lane AND t.ordinal = middle;
    IF at_line IS NULL THEN
      RETURN total;
    ELSIF at_line > after_line THEN
      high := middle;
    ELSE
      low := middle + 1;
    END IF;
  END LOOP;
  RETURN low;
END $$;

-- Uploads in parts. A part's bytes are chunks under a source of its own.
CREATE TABLE penstock.uploads (
  id               uuid PRIMARY KEY,
  owner            text NOT NULL,
  filename         text NOT NULL,
  purpose          text NOT NULL,
  mime_type        text NOT NULL,
  bytes            bigint NOT NULL CHECK (bytes > 0),
  expires_after_s  int4,
  idempotency_key  text,
  fingerprint      bytea,
  file_id          uuid,
  created_at       timestamptz NOT NULL,
  expires_at       timestamptz NOT NULL,
  completed_at     timestamptz,
  cancelled_at     timestamptz,
  -- When its parts were given up; it counts as expired from `expires_at` on.
  expired_at       timestamptz,
  CONSTRAINT uploads_end_once CHECK (num_nonnulls(completed_at, cancelled_at, expired_at) <= 1),
  CONSTRAINT uploads_completed_has_a_file CHECK ((completed_at IS NULL) = (file_id IS NULL))
);
CREATE UNIQUE INDEX uploads_idempotent ON penstock.uploads (owner, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX uploads_open ON penstock.uploads (expires_at)
  WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL;

CREATE TABLE penstock.upload_parts (
  upload_id   uuid NOT NULL,
  id          uuid NOT NULL,
  source_id   bigint NOT NULL,
  bytes       bigint NOT NULL CHECK (bytes >= 0),
  chunks      int4 NOT NULL,
  digest      bytea NOT NULL CHECK (octet_length(digest) = 32),
  created_at  timestamptz NOT NULL,
  PRIMARY KEY (upload_id, id)
);

-- Keys are random; only their SHA-256 is kept.
CREATE TABLE penstock.api_keys (
  id          uuid PRIMARY KEY,
  owner       text NOT NULL CHECK (owner <> ''),
  name        text NOT NULL,
  role        text NOT NULL,
  prefix      text NOT NULL,
  hash        bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
  created_at  timestamptz NOT NULL,
  expires_at  timestamptz,
  revoked_at  timestamptz,
  CONSTRAINT api_keys_role_legal CHECK (role IN ('user', 'admin'))
);

CREATE TABLE penstock.webhook_endpoints (
  id               uuid PRIMARY KEY,
  owner            text NOT NULL,
  name             text NOT NULL,
  url              text NOT NULL,
  event_types      text[] NOT NULL CHECK (cardinality(event_types) > 0),
  secret           bytea NOT NULL,
  -- The secret before the last rotation, which receivers may still hold.
  previous_secret  bytea,
  previous_until   timestamptz,
  created_at       timestamptz NOT NULL,
  updated_at       timestamptz NOT NULL
);
CREATE INDEX webhook_endpoints_newest ON penstock.webhook_endpoints (owner, id DESC);

-- One event for one endpoint. Written by the statement that ends the batch, so that none is lost or told twice.
CREATE TABLE penstock.webhook_deliveries (
  id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  event_id      uuid NOT NULL,
  endpoint_id   uuid NOT NULL,
  owner         text NOT NULL,
  type          text NOT NULL,
  batch_id      uuid,
  event_at      timestamptz NOT NULL,
  attempts      int4 NOT NULL DEFAULT 0,
  due_at        timestamptz NOT NULL,
  delivered_at  timestamptz,
  given_up_at   timestamptz,
  status_code   int4,
  error         text
) WITH (fillfactor = 70);
CREATE INDEX webhook_deliveries_due ON penstock.webhook_deliveries (due_at)
  WHERE delivered_at IS NULL AND given_up_at IS NULL;
CREATE INDEX webhook_deliveries_of_endpoint ON penstock.webhook_deliveries (endpoint_id, id DESC);

-- Erasure: what was asked for, what is left to delete, what was deleted. The report outlives what it is about.
CREATE TABLE penstock.erasures (
  id            uuid PRIMARY KEY,
  owner         text NOT NULL,
  kind          text NOT NULL CHECK (kind IN ('file', 'batch', 'output', 'errors', 'upload', 'message_batch', 'message_batch_results')),
  object_id     uuid NOT NULL,
  requested_at  timestamptz NOT NULL,
  finished_at   timestamptz,
  templates     bigint NOT NULL DEFAULT 0,
  chunks        bigint NOT NULL DEFAULT 0,
  outcomes      bigint NOT NULL DEFAULT 0,
  attempts      bigint NOT NULL DEFAULT 0,
  others        bigint NOT NULL DEFAULT 0
);
CREATE INDEX erasures_newest ON penstock.erasures (owner, id DESC);
CREATE INDEX erasures_unfinished ON penstock.erasures (id) WHERE finished_at IS NULL;

-- A stretch of rows to delete: keys [next, total) of one source or lane. Taken in steps under its row lock, so that two
-- replicas never try the same rows and never wait for each other. `erased` is added up when the erasure is finished:
-- a counter of all would be what they wait for.
CREATE TABLE penstock.erasure_pieces (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  erasure_id  uuid NOT NULL,
  what        text NOT NULL
    CHECK (what IN ('templates', 'chunks', 'outcomes', 'completed', 'not_completed', 'attempts', 'reclaims', 'journal',
                    'deferrals')),
  key         bigint,
  batch_id    uuid,
  source_lane int4,
  next        bigint NOT NULL DEFAULT 0,
  total       bigint NOT NULL,
  erased      bigint NOT NULL DEFAULT 0,
  -- What the keys are of. Two deletions may list the same rows, such as the history that goes with an input and with its
  -- batch: then one stretch is worked on after the other.
  place       text NOT NULL GENERATED ALWAYS AS (
    CASE WHEN what IN ('completed', 'not_completed') THEN 'outcomes' ELSE what END
    || ' ' || coalesce(key::text, batch_id::text) || coalesce(' ' || source_lane::text, '')) STORED
) WITH (fillfactor = 50);
CREATE INDEX erasure_pieces_of ON penstock.erasure_pieces (erasure_id);
CREATE INDEX erasure_pieces_open ON penstock.erasure_pieces (id) WHERE next < total;
CREATE INDEX erasure_pieces_open_over ON penstock.erasure_pieces (place, id) WHERE next < total;

-- Vacuum gives the empty end of a table back to the system under a lock that everybody waits for. After an erasure that
-- would be in the middle of the work; kept, the space is used again.
ALTER TABLE penstock.templates SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.file_chunks SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.outcomes SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.attempts SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.reclaims SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.journal SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.lanes SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.leases SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.deferrals SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.progress SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.files SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.file_lanes SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.batches SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.erasures SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.erasure_pieces SET (vacuum_truncate = off, toast.vacuum_truncate = off);
