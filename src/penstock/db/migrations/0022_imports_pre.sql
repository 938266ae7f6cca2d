-- What `penstock import` has brought from a database of the eager layout (ADR 19), so that it can go on, bring what came
-- since, and not bring back what was deleted here. Ids are those of files and batches; no payload.
CREATE TABLE penstock.imports (
  id              uuid PRIMARY KEY,
  kind            text NOT NULL CHECK (kind IN ('file', 'batch')),
  -- What the source's rows said when they were read: the state, and requests by state.
  figures         jsonb NOT NULL,
  imported_at     timestamptz NOT NULL,
  -- Since when a batch is the old system's again: the next import takes its word for everything.
  handed_back_at  timestamptz
);
