-- What housekeeping has to look at is found by what has changed since it last looked, not by looking at all there is.

-- Deltas that no fold has seen yet: the batches they belong to may have come to their end.
ALTER TABLE penstock.progress ADD COLUMN folded boolean NOT NULL DEFAULT false;
CREATE INDEX progress_unfolded ON penstock.progress (batch_id) WHERE NOT folded;

-- When a batch was last paused, resumed, cancelled or reopened: a retry that is written at the same moment may miss it.
ALTER TABLE penstock.batches ADD COLUMN steered_at timestamptz;
CREATE INDEX batches_steered ON penstock.batches (steered_at) WHERE steered_at IS NOT NULL;

-- Batches that are to end although inputs are left: those past their deadline, and those that are being cancelled.
CREATE INDEX batches_closing ON penstock.batches ((CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END))
  WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
    AND (cancelling_at IS NOT NULL OR deadline < 'infinity');
