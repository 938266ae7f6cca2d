-- Jobs: batches over rows of tables and over images (ADR 16). Code from before never meets one: jobs are in pools of their
-- own, or of providers whose workers come with this code.
ALTER TABLE penstock.batches
  DROP CONSTRAINT batches_dialect_legal,
  ADD CONSTRAINT batches_dialect_legal CHECK (dialect IN ('run', 'openai', 'anthropic', 'job')) NOT VALID;
ALTER TABLE penstock.batches VALIDATE CONSTRAINT batches_dialect_legal;

-- What a batch that is a job has besides.
CREATE TABLE penstock.jobs (
  batch_id     uuid PRIMARY KEY,
  owner        text NOT NULL,
  job_type     text NOT NULL,
  -- What is done with each row, and how its columns are read.
  spec         jsonb NOT NULL,
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
) WITH (vacuum_truncate = off);

-- Images, stored once for each owner.
CREATE TABLE penstock.blobs (
  owner       text NOT NULL,
  digest      bytea NOT NULL CHECK (octet_length(digest) = 32),
  media_type  text NOT NULL,
  bytes       bytea NOT NULL,
  PRIMARY KEY (owner, digest)
) WITH (fillfactor = 100, vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE penstock.blobs ALTER COLUMN bytes SET STORAGE EXTERNAL;
-- Which sources have an image: it is deleted with the last of them.
CREATE TABLE penstock.blob_uses (
  owner      text NOT NULL,
  digest     bytea NOT NULL,
  source_id  bigint NOT NULL,
  PRIMARY KEY (owner, digest, source_id)
) WITH (vacuum_truncate = off);
CREATE INDEX blob_uses_of_source ON penstock.blob_uses (source_id, digest);

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
);
CREATE INDEX audit_of_object ON penstock.audit (object_id, id);

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
) WITH (fillfactor = 100, vacuum_truncate = off);
CREATE INDEX row_keys_of_rows ON penstock.row_keys (source_id, ordinal);
ALTER TABLE penstock.jobs ADD COLUMN discovered int4 NOT NULL DEFAULT 0;
