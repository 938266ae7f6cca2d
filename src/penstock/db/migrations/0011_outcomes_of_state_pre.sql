-- transaction: off
-- Pages of outcomes of one state, which may be few among many failures.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outcomes_of_state ON penstock.outcomes (lane_id, state, ordinal)
  WHERE state <> 'completed';
