-- Jobs: batches over rows of tables and over images (ADR 16). Jobs of processors are in pools that code from before does not
-- serve. Workers from before would fail the rows of a provider's job: such jobs are for when all workers are new.
ALTER TABLE penstock.batches
  DROP CONSTRAINT batches_dialect_legal,
  ADD CONSTRAINT batches_dialect_legal CHECK (dialect IN ('run', 'openai', 'anthropic', 'job')) NOT VALID;

-- What a batch that is a job has besides.
CREATE TABLE penstock.jobs (
  batch_id     uuid PRIMARY KEY,
  owner        text NOT NULL,
  job_type     text NOT NULL,
  -- What is done with each row, and how its columns are read. As it was written: the order of its members is that of the
  -- result's columns.
  spec         json NOT NULL,
  -- The batch's file holds the bytes as they came, and the rows read from them. Files that came together are one after
  -- the other in it: [[name, bytes], …]; NULL if it is one.
  parts        jsonb,
  -- The address that the upload came from, or the adapter that found the file.
  client       text NOT NULL,
  created_at   timestamptz NOT NULL,
  -- Ingest: which process reads the rows, and when all of them were stored.
  worker_id    uuid,
  ingested_at  timestamptz,
  rows         int4 NOT NULL DEFAULT 0,
  -- Why its rows could not be read to their end.
  problem      text,
  -- The input's columns, once they are known.
  columns      text[] NOT NULL DEFAULT '{}',
  CONSTRAINT jobs_ingest_ends CHECK (ingested_at IS NULL OR worker_id IS NULL)
) WITH (fillfactor = 80, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX jobs_to_ingest ON penstock.jobs (batch_id) WHERE ingested_at IS NULL;

-- The result's columns of a job, in the order in which they were first seen. Recorded before the results that have them.
CREATE TABLE penstock.job_columns (
  batch_id  uuid NOT NULL,
  name      text NOT NULL,
  id        bigint GENERATED ALWAYS AS IDENTITY,
  PRIMARY KEY (batch_id, name)
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

-- Every change that a user made to a job, for admins to read.
CREATE TABLE penstock.audit (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at         timestamptz NOT NULL,
  owner      text NOT NULL,
  actor      text NOT NULL,
  client     text NOT NULL,
  action     text NOT NULL,
  object_id  uuid NOT NULL,
  details    jsonb NOT NULL DEFAULT '{}'
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX audit_of_object ON penstock.audit (object_id, id);

-- Files that adapters found. Each version of a file once, over all servers: a job was made of it, in the transaction that
-- wrote the row, or it was set aside.
CREATE TABLE penstock.ingested_files (
  id           uuid PRIMARY KEY,
  adapter      text NOT NULL,
  path         text NOT NULL,
  version      text NOT NULL,
  bytes        int8 NOT NULL,
  owner        text NOT NULL,
  batch_id     uuid,
  problem      text,
  recorded_at  timestamptz NOT NULL,
  UNIQUE (adapter, path, version),
  CONSTRAINT ingested_files_taken_or_not CHECK ((batch_id IS NULL) <> (problem IS NULL))
);
CREATE INDEX ingested_files_of_owner ON penstock.ingested_files (owner, id);
-- Files that were seen and not recorded yet: since when each is as it is.
CREATE TABLE penstock.sighted_files (
  adapter  text NOT NULL,
  path     text NOT NULL,
  version  text NOT NULL,
  since    timestamptz NOT NULL,
  seen_at  timestamptz NOT NULL,
  PRIMARY KEY (adapter, path)
) WITH (fillfactor = 80, vacuum_truncate = off, toast.vacuum_truncate = off);

-- Images of jobs. An owner has each content once. The row here is what ingests and purges lock; the bytes lie apart, so
-- that they can be distributed over nodes.
CREATE TABLE penstock.blobs (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  owner   text NOT NULL,
  digest  bytea NOT NULL CHECK (octet_length(digest) = 32),
  size    int4 NOT NULL CHECK (size > 0),
  UNIQUE (owner, digest)
) WITH (fillfactor = 80, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE TABLE penstock.blob_bytes (
  blob_id  bigint PRIMARY KEY,
  bytes    bytea NOT NULL
) WITH (fillfactor = 100, vacuum_truncate = off, toast.vacuum_truncate = off);
-- Images are compressed already.
ALTER TABLE penstock.blob_bytes ALTER COLUMN bytes SET STORAGE EXTERNAL;
-- Which rows stand for an image: it is deleted with the last of them. The reference is what makes that right whatever
-- runs beside it: a use cannot be stored without its image, and an image that is used cannot be deleted.
CREATE TABLE penstock.blob_uses (
  source_id    bigint NOT NULL,
  source_lane  int4 NOT NULL,
  ordinal      int4 NOT NULL,
  blob_id      bigint NOT NULL REFERENCES penstock.blobs,
  PRIMARY KEY (source_id, source_lane, ordinal)
) WITH (vacuum_truncate = off);
CREATE INDEX blob_uses_of_blob ON penstock.blob_uses (blob_id, source_id, source_lane, ordinal);

-- Whether each of the job's rows stands for an image.
ALTER TABLE penstock.jobs ADD COLUMN images boolean NOT NULL DEFAULT false;

ALTER TABLE penstock.erasure_pieces
  DROP CONSTRAINT erasure_pieces_what_check,
  ADD CONSTRAINT erasure_pieces_what_check
    CHECK (what IN ('templates', 'chunks', 'outcomes', 'completed', 'not_completed', 'attempts', 'reclaims', 'journal',
                    'deferrals', 'session_requests', 'blobs'));

-- Errors of jobs, in groups of the same fingerprint (code, status, message without numbers and quoted parts). The
-- outcome of a row has it; those of other batches have none.
ALTER TABLE penstock.outcomes ADD COLUMN fingerprint int8;
-- Counters as deltas, like progress: settles append what they add, reruns what they take away; folding sums them up.
CREATE TABLE penstock.job_errors (
  batch_id     uuid NOT NULL,
  fingerprint  int8 NOT NULL,
  id           bigint GENERATED ALWAYS AS IDENTITY,
  count        int4 NOT NULL,
  folded       boolean NOT NULL DEFAULT false,
  -- The row that was last seen to fail like this, and when; of those taken away, nothing.
  first_at     timestamptz,
  last_at      timestamptz,
  code         text,
  status_code  int4,
  line         int4,
  message      text,
  PRIMARY KEY (batch_id, fingerprint, id)
) WITH (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off,
  toast.vacuum_truncate = off
);
CREATE INDEX job_errors_to_fold ON penstock.job_errors (batch_id, fingerprint) WHERE NOT folded;
CREATE INDEX job_errors_latest ON penstock.job_errors (batch_id, last_at) WHERE last_at IS NOT NULL;

-- What cursors of pages are signed with. One for all servers, and new in every database.
CREATE TABLE penstock.cursor_secret (
  one     boolean PRIMARY KEY DEFAULT true CHECK (one),
  secret  bytea NOT NULL CHECK (octet_length(secret) >= 16)
);
INSERT INTO penstock.cursor_secret (secret)
VALUES (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- Operations on jobs that take longer than a request: they are done a chunk at a time, each committed with how far it is.
CREATE TABLE penstock.operations (
  id               uuid PRIMARY KEY,
  batch_id         uuid NOT NULL,
  kind             text NOT NULL CHECK (kind IN ('reprocess')),
  -- Which rows, and how.
  wish             jsonb NOT NULL,
  idempotency_key  text,
  state            text NOT NULL DEFAULT 'running',
  -- Rows up to this ordinal have been looked at.
  place            int4 NOT NULL DEFAULT -1,
  requeued         int4 NOT NULL DEFAULT 0,
  worn_out         int4 NOT NULL DEFAULT 0,
  error            text,
  -- The server that does it.
  worker_id        uuid,
  created_at       timestamptz NOT NULL,
  ended_at         timestamptz,
  CONSTRAINT operations_state_legal CHECK (state IN ('running', 'done', 'failed', 'cancelled')),
  CONSTRAINT operations_end CHECK ((ended_at IS NULL) = (state = 'running') AND (ended_at IS NULL OR worker_id IS NULL)),
  CONSTRAINT operations_failed_why CHECK ((error IS NOT NULL) = (state = 'failed'))
) WITH (fillfactor = 70, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX operations_of_job ON penstock.operations (batch_id, id);
CREATE UNIQUE INDEX operations_idempotent ON penstock.operations (batch_id, idempotency_key)
  WHERE idempotency_key IS NOT NULL;
CREATE INDEX operations_running ON penstock.operations (id) WHERE state = 'running';

-- Rows that processors have added to their own jobs, by the keys they gave them: each key once. The keys go with the rows.
CREATE TABLE penstock.row_keys (
  source_id  bigint NOT NULL,
  key        text NOT NULL,
  ordinal    int4 NOT NULL,
  PRIMARY KEY (source_id, key)
) WITH (fillfactor = 100, vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX row_keys_of_rows ON penstock.row_keys (source_id, ordinal);
ALTER TABLE penstock.jobs ADD COLUMN discovered int4 NOT NULL DEFAULT 0;
