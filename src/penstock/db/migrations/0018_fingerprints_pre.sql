-- transaction: off
-- The rows of a job that failed in the same way.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outcomes_of_fingerprint ON penstock.outcomes (lane_id, fingerprint, ordinal)
  WHERE fingerprint IS NOT NULL;
