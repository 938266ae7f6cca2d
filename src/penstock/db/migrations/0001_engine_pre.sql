-- The lane engine: files and their templates, batches and their lanes, leases, deferrals,
-- outcomes, attempts, reclaims, progress, workers, gates.
--
-- Payload and history tables (templates, outcomes, attempts, reclaims) are keyed by their source or lane and reference
-- nothing, so that they can be distributed while the control tables stay on one node.

CREATE TYPE penstock.outcome_state AS ENUM ('completed', 'failed', 'not_found', 'skipped');

CREATE FUNCTION penstock.ordinal_count(ordinals int4multirange) RETURNS int4
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
AS $$ SELECT coalesce(sum(upper(r) - lower(r)), 0)::int4 FROM unnest(ordinals) AS r $$;

-- The lowest `n` ordinals of a multirange: what a claim takes when it cannot take all.
CREATE FUNCTION penstock.first_ordinals(ordinals int4multirange, n int4) RETURNS int4multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
AS $$
  SELECT coalesce(range_agg(int4range(lower(r), least(upper(r), lower(r) + n - before))), '{}')
    FROM (SELECT r, (sum(upper(r) - lower(r)) OVER (ORDER BY lower(r)))::int4 - (upper(r) - lower(r)) AS before
            FROM unnest(ordinals) AS r) AS ranges
   WHERE before < n
$$;

CREATE FUNCTION penstock.refuse_update() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
  RAISE EXCEPTION 'rows of %.% are written once and never updated', TG_TABLE_SCHEMA, TG_TABLE_NAME
    USING ERRCODE = 'restrict_violation';
END $$;

-- A file is an uploaded, sealed list of inputs. `source_id` is the short key its templates carry.
CREATE TABLE penstock.files (
  id          uuid PRIMARY KEY,
  source_id   bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
  owner       text NOT NULL,
  filename    text NOT NULL,
  state       text NOT NULL DEFAULT 'ingesting',
  worker_id   uuid NOT NULL,
  lines       int4 NOT NULL DEFAULT 0,
  bytes       bigint NOT NULL DEFAULT 0,
  digest      bytea,
  created_at  timestamptz NOT NULL,
  sealed_at   timestamptz,
  deleted_at  timestamptz,
  CONSTRAINT files_state_legal CHECK (state IN ('ingesting', 'ready', 'failed')),
  CONSTRAINT files_ready_is_sealed CHECK ((state = 'ready') = (sealed_at IS NOT NULL)),
  CONSTRAINT files_counts CHECK (lines >= 0 AND bytes >= 0)
);
CREATE INDEX files_unsealed ON penstock.files (created_at) WHERE state <> 'ready';

-- One row per (url, model) of a file: what a batch's lanes are made from.
CREATE TABLE penstock.file_lanes (
  source_id    bigint NOT NULL,
  source_lane  int4 NOT NULL,
  route        text NOT NULL,
  endpoint     text NOT NULL,
  total        int4 NOT NULL CHECK (total > 0),
  PRIMARY KEY (source_id, source_lane)
);

-- One stored input. Ordinals are dense per source lane; `body` holds the exact bytes received.
CREATE TABLE penstock.templates (
  source_id    bigint NOT NULL,
  source_lane  int4 NOT NULL,
  ordinal      int4 NOT NULL,
  line         int4 NOT NULL,
  custom_id    text NOT NULL,
  summary      text,
  body         bytea NOT NULL,
  PRIMARY KEY (source_id, source_lane, ordinal)
) WITH (
  -- Written once by COPY: nothing to vacuum until erasure; inserts alone should trigger the cheap
  -- visibility pass late, not in the middle of an intake.
  autovacuum_vacuum_insert_scale_factor = 1.0,
  fillfactor = 100
);
CREATE TRIGGER templates_are_immutable BEFORE UPDATE ON penstock.templates
  FOR EACH STATEMENT EXECUTE FUNCTION penstock.refuse_update();

CREATE TABLE penstock.batches (
  id               uuid PRIMARY KEY,
  owner            text NOT NULL,
  file_id          uuid REFERENCES penstock.files (id),
  pool             text NOT NULL,
  idempotency_key  text,
  target           text,
  metadata         jsonb NOT NULL DEFAULT '{}',
  priority         int2 NOT NULL DEFAULT 0,
  deadline         timestamptz NOT NULL DEFAULT 'infinity',
  total            int4 NOT NULL CHECK (total >= 0),
  created_at       timestamptz NOT NULL,
  paused_at        timestamptz,
  cancelling_at    timestamptz,
  completed_at     timestamptz,
  cancelled_at     timestamptz,
  expired_at       timestamptz,
  deleted_at       timestamptz,
  -- Counts, frozen when the batch ends; until then they are the sum of its progress rows.
  completed        int4,
  failed           int4,
  not_found        int4,
  skipped          int4,
  retried          int4,
  state            text NOT NULL GENERATED ALWAYS AS (
    CASE WHEN completed_at IS NOT NULL THEN 'completed'
         WHEN cancelled_at IS NOT NULL THEN 'cancelled'
         WHEN expired_at IS NOT NULL THEN 'expired'
         WHEN cancelling_at IS NOT NULL THEN 'cancelling'
         WHEN paused_at IS NOT NULL THEN 'paused'
         ELSE 'in_progress' END) STORED,
  CONSTRAINT batches_end_once CHECK (num_nonnulls(completed_at, cancelled_at, expired_at) <= 1),
  CONSTRAINT batches_cancel_in_order CHECK (cancelled_at IS NULL OR cancelling_at IS NOT NULL),
  CONSTRAINT batches_frozen_when_ended CHECK (
    num_nonnulls(completed, failed, not_found, skipped, retried)
      = CASE WHEN num_nonnulls(completed_at, cancelled_at, expired_at) = 0 THEN 0 ELSE 5 END),
  CONSTRAINT batches_counts_fit CHECK (coalesce(completed + failed + not_found + skipped, 0) <= total),
  CONSTRAINT batches_completed_is_whole CHECK (
    completed_at IS NULL OR completed + failed + not_found + skipped = total)
) WITH (fillfactor = 80);
CREATE UNIQUE INDEX batches_idempotent ON penstock.batches (owner, idempotency_key)
  WHERE idempotency_key IS NOT NULL;
CREATE INDEX batches_newest ON penstock.batches (owner, created_at DESC, id DESC);
CREATE INDEX batches_unfinished ON penstock.batches (deadline)
  WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL;

-- A lane: an ordered list of stored inputs, a cursor and a width. Its row lock is the engine's only
-- point of order: claims advance it, pause and cancel close it.
CREATE TABLE penstock.lanes (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  batch_id     uuid NOT NULL REFERENCES penstock.batches (id),
  pool         text NOT NULL,
  route        text NOT NULL,
  endpoint     text NOT NULL,
  source_id    bigint NOT NULL,
  source_lane  int4 NOT NULL,
  next         int4 NOT NULL DEFAULT 0,
  total        int4 NOT NULL,
  width        int4,
  busy         int4 NOT NULL DEFAULT 0,
  priority     int2 NOT NULL DEFAULT 0,
  deadline     timestamptz NOT NULL DEFAULT 'infinity',
  open         boolean NOT NULL DEFAULT true,
  runnable     boolean GENERATED ALWAYS AS (open AND next < total AND (width IS NULL OR busy < width)) STORED,
  CONSTRAINT lanes_cursor CHECK (0 <= next AND next <= total),
  CONSTRAINT lanes_width CHECK (busy >= 0 AND (width IS NULL OR (width > 0 AND busy <= width)))
) WITH (
  -- Every claim rewrites one row here. Half-empty pages keep those updates heap-only, so the partial
  -- index below is touched only when a lane starts or stops being runnable.
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 500,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 5000
);
-- The claim's only search. Higher priority first, then the earliest deadline, then the oldest lane.
CREATE INDEX lanes_runnable ON penstock.lanes (pool, route, priority DESC, deadline, id) WHERE runnable;
CREATE INDEX lanes_of_batch ON penstock.lanes (batch_id);

-- A worker's numbered hold on some ordinals of one lane. Ids are never reused: the id is the fence.
-- It carries what settling needs, so that settling never reads `lanes`.
CREATE TABLE penstock.leases (
  id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  lane_id        bigint NOT NULL,
  batch_id       uuid NOT NULL,
  pool           text NOT NULL,
  route          text NOT NULL,
  limited        boolean NOT NULL,
  worker_id      uuid NOT NULL,
  ordinals       int4multirange NOT NULL,
  size           int4 NOT NULL GENERATED ALWAYS AS (penstock.ordinal_count(ordinals)) STORED,
  attempt        int4 NOT NULL,
  reclaims       int4 NOT NULL DEFAULT 0,
  claimed_at     timestamptz NOT NULL,
  progressed_at  timestamptz NOT NULL,
  CONSTRAINT leases_hold_something CHECK (NOT isempty(ordinals)),
  CONSTRAINT leases_attempt CHECK (attempt >= 1 AND reclaims >= 0)
) WITH (
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 500,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 5000
);
CREATE INDEX leases_of_batch ON penstock.leases (batch_id);

-- Ordinals to run again, not before a time.
CREATE TABLE penstock.deferrals (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  lane_id   bigint NOT NULL,
  batch_id  uuid NOT NULL,
  pool      text NOT NULL,
  route     text NOT NULL,
  limited   boolean NOT NULL,
  ordinals  int4multirange NOT NULL,
  size      int4 NOT NULL GENERATED ALWAYS AS (penstock.ordinal_count(ordinals)) STORED,
  attempt   int4 NOT NULL,
  reclaims  int4 NOT NULL DEFAULT 0,
  -- Lost twice: perhaps it kills its workers. Suspects are claimed one at a time per worker.
  suspect   boolean NOT NULL GENERATED ALWAYS AS (reclaims > 1) STORED,
  reason    text NOT NULL,
  due_at    timestamptz NOT NULL,
  held      boolean NOT NULL DEFAULT false,
  CONSTRAINT deferrals_hold_something CHECK (NOT isempty(ordinals)),
  CONSTRAINT deferrals_reason_legal CHECK (reason IN ('retry', 'given_back', 'reclaimed', 'reprocess'))
) WITH (
  fillfactor = 70,
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 5000
);
CREATE INDEX deferrals_due ON penstock.deferrals (pool, route, suspect, due_at, id) WHERE NOT held;
CREATE INDEX deferrals_of_batch ON penstock.deferrals (batch_id);

-- The terminal record of one (lane, ordinal). Its key is what makes it exactly one.
CREATE TABLE penstock.outcomes (
  lane_id        bigint NOT NULL,
  ordinal        int4 NOT NULL,
  line           int4 NOT NULL,
  state          penstock.outcome_state NOT NULL,
  status_code    int4,
  attempts       int4 NOT NULL,
  lease_id       bigint NOT NULL,
  finished_at    timestamptz NOT NULL,
  custom_id      text NOT NULL,
  request_id     text,
  error_code     text,
  error_message  text,
  response       bytea,
  PRIMARY KEY (lane_id, ordinal)
) WITH (
  autovacuum_vacuum_insert_scale_factor = 1.0,
  fillfactor = 100
);
CREATE INDEX outcomes_not_completed ON penstock.outcomes (lane_id, ordinal) WHERE state <> 'completed';

-- Every attempt that did not complete: append-only history.
CREATE TABLE penstock.attempts (
  lane_id        bigint NOT NULL,
  ordinal        int4 NOT NULL,
  id             bigint GENERATED ALWAYS AS IDENTITY,
  attempt        int4 NOT NULL,
  lease_id       bigint NOT NULL,
  worker_id      uuid NOT NULL,
  ended_at       timestamptz NOT NULL,
  duration_ms    int4 NOT NULL,
  counted        boolean NOT NULL,
  status_code    int4,
  error_code     text NOT NULL,
  error_message  text NOT NULL,
  not_before     timestamptz,
  PRIMARY KEY (lane_id, ordinal, id)
) WITH (autovacuum_vacuum_insert_scale_factor = 1.0);
CREATE TRIGGER attempts_are_append_only BEFORE UPDATE ON penstock.attempts
  FOR EACH STATEMENT EXECUTE FUNCTION penstock.refuse_update();

-- Every lease that was taken back, and what it still held: with attempts, why an input was called more than once.
CREATE TABLE penstock.reclaims (
  lane_id       bigint NOT NULL,
  id            bigint GENERATED ALWAYS AS IDENTITY,
  lease_id      bigint NOT NULL,
  batch_id      uuid NOT NULL,
  worker_id     uuid NOT NULL,
  reclaimed_by  uuid NOT NULL,
  ordinals      int4multirange NOT NULL,
  attempt       int4 NOT NULL,
  reclaims      int4 NOT NULL,
  reclaimed_at  timestamptz NOT NULL,
  PRIMARY KEY (lane_id, id)
);
CREATE TRIGGER reclaims_are_append_only BEFORE UPDATE ON penstock.reclaims
  FOR EACH STATEMENT EXECUTE FUNCTION penstock.refuse_update();

-- Counters as deltas: each settle appends one row per batch it wrote to, folding sums them up.
-- An appended row leaves no version chain behind, however long somebody's snapshot stays open.
CREATE TABLE penstock.progress (
  batch_id   uuid NOT NULL,
  id         bigint GENERATED ALWAYS AS IDENTITY,
  completed  int4 NOT NULL DEFAULT 0,
  failed     int4 NOT NULL DEFAULT 0,
  not_found  int4 NOT NULL DEFAULT 0,
  skipped    int4 NOT NULL DEFAULT 0,
  retried    int4 NOT NULL DEFAULT 0,
  PRIMARY KEY (batch_id, id)
) WITH (
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 1000,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 5000
);

-- A process with a fresh id and a heartbeat on the database's clock.
CREATE TABLE penstock.workers (
  id            uuid PRIMARY KEY,
  pool          text NOT NULL,
  host          text NOT NULL,
  machine       text NOT NULL,
  pid           int4 NOT NULL,
  pid_birth     float8 NOT NULL,
  started_at    timestamptz NOT NULL,
  heartbeat_at  timestamptz NOT NULL,
  draining      boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- What an upstream asked of a whole route: wait until then, or wait for a person.
CREATE TABLE penstock.gates (
  pool        text NOT NULL,
  route       text NOT NULL,
  not_before  timestamptz,
  halted_at   timestamptz,
  code        text,
  message     text,
  PRIMARY KEY (pool, route)
) WITH (fillfactor = 50);

-- For people with psql: what is in flight and what is decided. Pending requests have no rows.
CREATE VIEW penstock.requests AS
  SELECT l.batch_id, l.lane_id, o.ordinal, 'processing' AS state, l.attempt, l.worker_id, l.claimed_at AS since
    FROM penstock.leases l
    CROSS JOIN LATERAL unnest(l.ordinals) AS r
    CROSS JOIN LATERAL generate_series(lower(r), upper(r) - 1) AS o (ordinal)
  UNION ALL
  SELECT l.batch_id, o.lane_id, o.ordinal, o.state::text, o.attempts, NULL, o.finished_at
    FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id;
