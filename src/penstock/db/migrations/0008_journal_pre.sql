-- A line's number in the order of a batch's journal is given once and kept. It was counted along transaction ids, which a
-- dump does not take along to another cluster, over entries that a retry made smaller. Numbers are given by the first
-- reader who comes by after the commit, to entries as a whole; a batch that is not followed needs none.
ALTER TABLE penstock.journal
  ADD COLUMN outputs_before int8,
  ADD COLUMN errors_before int8;
CREATE INDEX journal_unnumbered ON penstock.journal (batch_id, xact, id) WHERE outputs_before IS NULL;
CREATE INDEX journal_outputs ON penstock.journal (batch_id, outputs_before)
  WHERE completed_count > 0 AND outputs_before IS NOT NULL;
CREATE INDEX journal_errors ON penstock.journal (batch_id, errors_before)
  WHERE others_count > 0 AND errors_before IS NOT NULL;
-- A batch's latest entries, for its pace.
CREATE INDEX journal_latest ON penstock.journal (batch_id, id);

-- How many lines of a batch have their numbers. A reader that gives more of them locks this row.
CREATE TABLE penstock.journal_heads (
  batch_id  uuid PRIMARY KEY,
  outputs   int8 NOT NULL DEFAULT 0,
  errors    int8 NOT NULL DEFAULT 0
) WITH (fillfactor = 50, vacuum_truncate = off);
