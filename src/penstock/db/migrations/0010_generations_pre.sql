-- Running an input again, and batches that grow.
--
-- What is run again on purpose is the next generation of its outcome, which stays readable until the new one takes its
-- place. `spent` is what earlier generations took of an input's attempts; it counts toward the bound for its whole life.
ALTER TABLE penstock.leases
  ADD COLUMN generation int4 NOT NULL DEFAULT 0,
  ADD COLUMN spent int4 NOT NULL DEFAULT 0;
ALTER TABLE penstock.deferrals
  ADD COLUMN generation int4 NOT NULL DEFAULT 0,
  ADD COLUMN spent int4 NOT NULL DEFAULT 0;
ALTER TABLE penstock.outcomes
  ADD COLUMN generation int4 NOT NULL DEFAULT 0;
-- Those of a batch that ends before they were run are looked for, and are few.
CREATE INDEX deferrals_to_rerun ON penstock.deferrals (batch_id) WHERE generation > 0;

-- What was stamped by a clock that was set back since is looked for each round. There is an index like it for batches.
CREATE INDEX deferrals_of_sessions_by_time ON penstock.deferrals (deferred_at) WHERE session;

-- A batch that is growing gets further inputs while it runs, under its lock, and does not complete before it is sealed.
ALTER TABLE penstock.batches
  ADD COLUMN growing boolean NOT NULL DEFAULT false,
  ADD CONSTRAINT batches_completed_is_sealed CHECK (completed_at IS NULL OR NOT growing);
