-- Pages of what is pending. Apart from the others, since it writes `lanes` anew: a row for each batch and session, while
-- claims wait. Leases and deferrals have indexes for it (0009); of rows that were never claimed, lanes have
-- this one. `pending` changes when the last row is claimed and when the job ends, not with every claim: claims stay
-- heap-only updates. A lane that ended is closed for good, unless its batch is reopened; one that is paused is not.
ALTER TABLE penstock.lanes
  ADD COLUMN ended boolean NOT NULL DEFAULT false,
  ADD COLUMN pending boolean NOT NULL GENERATED ALWAYS AS (
    endpoint = 'rows' AND NOT session AND NOT ended AND next < total) STORED;
CREATE INDEX lanes_pending ON penstock.lanes (created_at, id) WHERE pending;
CREATE INDEX lanes_pending_of_owner ON penstock.lanes (owner, created_at, id) WHERE pending;
