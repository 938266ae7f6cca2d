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
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);
CREATE INDEX audit_of_object ON penstock.audit (object_id, id);

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

-- Pages of what is pending. Leases and deferrals have indexes for it (0009); of rows that were never claimed, lanes have
-- this one. `pending` changes when the last row is claimed and when the job ends, not with every claim: claims stay
-- heap-only updates. A lane that ended is closed for good, unless its batch is reopened; one that is paused is not.
ALTER TABLE penstock.lanes
  ADD COLUMN ended boolean NOT NULL DEFAULT false,
  ADD COLUMN pending boolean NOT NULL GENERATED ALWAYS AS (
    endpoint = 'rows' AND NOT session AND NOT ended AND next < total) STORED;
CREATE INDEX lanes_pending ON penstock.lanes (created_at, id) WHERE pending;
CREATE INDEX lanes_pending_of_owner ON penstock.lanes (owner, created_at, id) WHERE pending;
