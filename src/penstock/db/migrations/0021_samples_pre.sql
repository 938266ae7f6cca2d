-- Samples of batches, for charts: what was decided in each interval, how long calls took, what they cost. Workers append
-- one row for each batch and second; maintenance sums them up, by second first, then coarser as they grow older. They are
-- no accounts: a worker that is killed takes its last second with it.
CREATE TABLE penstock.samples (
  batch_id       uuid NOT NULL,
  -- The interval's length; 0 for a worker's own share of a second.
  resolution_s   int4 NOT NULL CHECK (resolution_s IN (0, 1, 10, 60, 600, 3600, 86400)),
  -- The interval's beginning, on the database's clock.
  at             timestamptz NOT NULL,
  id             bigint GENERATED ALWAYS AS IDENTITY,
  completed      int8 NOT NULL,
  failed         int8 NOT NULL,
  not_found      int8 NOT NULL,
  skipped        int8 NOT NULL,
  retried        int8 NOT NULL,
  -- Of those retried: the upstream did not admit the call.
  refused        int8 NOT NULL,
  input_tokens   int8 NOT NULL,
  output_tokens  int8 NOT NULL,
  -- Calls by how long they took, in the buckets of penstock.latency; refusals are not among them.
  latency        int8[] NOT NULL,
  -- The most calls that were allowed, and that were in flight, at once: summed over workers. NULL where nobody told.
  limit_now      int4,
  in_flight      int4,
  PRIMARY KEY (batch_id, resolution_s, at, id)
) WITH (
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off,
  toast.vacuum_truncate = off
);
ALTER TABLE penstock.samples ALTER COLUMN batch_id SET (n_distinct = -0.05);
CREATE INDEX samples_to_roll_up ON penstock.samples (resolution_s, at) WHERE resolution_s <= 10;

CREATE FUNCTION penstock.add_counts(int8[], int8[]) RETURNS int8[]
  LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
  RETURN ARRAY(SELECT coalesce(a, 0) + coalesce(b, 0) FROM unnest($1, $2) WITH ORDINALITY AS n (a, b, place) ORDER BY place);
CREATE AGGREGATE penstock.sum_counts(int8[]) (SFUNC = penstock.add_counts, STYPE = int8[], PARALLEL = SAFE);

ALTER TABLE penstock.erasure_pieces
  DROP CONSTRAINT erasure_pieces_what_check,
  ADD CONSTRAINT erasure_pieces_what_check
    CHECK (what IN ('templates', 'chunks', 'outcomes', 'completed', 'not_completed', 'attempts', 'reclaims', 'journal',
                    'deferrals', 'session_requests', 'blobs', 'samples'));
