-- name: sight_files_if_new
-- Of files that are listed, finds those that were never taken or set aside, and notes since when each is as it is. The
-- scalar subquery is one probe of the key for each file, whatever the planner believes about the table.
WITH listed AS MATERIALIZED (
  SELECT DISTINCT ON (path) path, version
    FROM unnest(%(paths)s::text[], %(versions)s::text[]) AS listed (path, version)
   ORDER BY path
),
sighted AS (
  INSERT INTO penstock.sighted_files AS s (adapter, path, version, since, seen_at)
  SELECT %(adapter)s, path, version, @now, @now
    FROM listed
   WHERE (SELECT i.id FROM penstock.ingested_files i
           WHERE i.adapter = %(adapter)s AND i.path = listed.path AND i.version = listed.version) IS NULL
   ORDER BY path
  ON CONFLICT (adapter, path) DO UPDATE
    SET version = excluded.version, seen_at = excluded.seen_at,
        since = CASE WHEN s.version = excluded.version AND s.since <= excluded.since THEN s.since
                     ELSE excluded.since END
  RETURNING path, version, since
)
SELECT path, version, extract(epoch FROM @now - since)::float8 FROM sighted

-- name: read_time
-- Reads the clock by which files are noted as seen.
SELECT now()

-- name: forget_unseen
-- Forgets the files that a whole scan did not see: they were taken away before they settled.
DELETE FROM penstock.sighted_files WHERE adapter = %(adapter)s AND seen_at < %(began)s

-- name: record_file_if_new
-- Records what became of a file, unless that version of it was recorded before. In the transaction that makes its job,
-- this is what makes one job of a file, whichever servers see it.
WITH recorded AS (
  INSERT INTO penstock.ingested_files (id, adapter, path, version, bytes, owner, batch_id, problem, recorded_at)
  VALUES (%(id)s, %(adapter)s, %(path)s, %(version)s, %(bytes)s, %(owner)s, %(batch_id)s, %(problem)s, @now)
  ON CONFLICT (adapter, path, version) DO NOTHING
  RETURNING id
),
settled AS (
  DELETE FROM penstock.sighted_files WHERE adapter = %(adapter)s AND path = %(path)s
)
SELECT id FROM recorded

-- name: list_files
-- Reads a page of what was taken and set aside, newest first.
SELECT id, adapter, path, version, bytes, owner, batch_id, problem, recorded_at
  FROM penstock.ingested_files
 WHERE id < %(below)s
 ORDER BY id DESC
 LIMIT %(limit)s

-- name: list_files_of_owner
-- Reads a page of what was taken and set aside for an owner, newest first.
SELECT id, adapter, path, version, bytes, owner, batch_id, problem, recorded_at
  FROM penstock.ingested_files
 WHERE owner = %(owner)s AND id < %(below)s
 ORDER BY id DESC
 LIMIT %(limit)s
