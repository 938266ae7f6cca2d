-- Limits per owner: what an operator has set for one of them, the room that uploads under way have reserved, and how many
-- requests each has made this minute. Code from before knows none of it, and limits nobody.

-- NULL is the configured default; 0 is no limit. The row is also what those lock who check a limit of its owner and then
-- write: it is made when it is first needed, and never deleted.
CREATE TABLE penstock.quotas (
  owner                text PRIMARY KEY CHECK (owner <> ''),
  max_open_batches     int4 CHECK (max_open_batches >= 0),
  max_stored_bytes     int8 CHECK (max_stored_bytes >= 0),
  requests_per_minute  int4 CHECK (requests_per_minute >= 0),
  max_priority         int2 CHECK (max_priority BETWEEN 0 AND 100)
);

-- Bytes that a file on its way in may take. They count for as long as it is being stored; a file that is given up, also by
-- the sweep, gives them back.
CREATE TABLE penstock.reservations (
  file_id  uuid PRIMARY KEY REFERENCES penstock.files (id) ON DELETE CASCADE,
  owner    text NOT NULL,
  bytes    int8 NOT NULL CHECK (bytes >= 0)
);
CREATE INDEX reservations_of_owner ON penstock.reservations (owner);
CREATE INDEX uploads_open_of_owner ON penstock.uploads (owner)
  WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL;

-- Requests that servers have taken of an owner's minute, in steps. One row for each owner with a limit.
CREATE TABLE penstock.request_counts (
  owner   text PRIMARY KEY,
  minute  timestamptz NOT NULL,
  taken   int8 NOT NULL
) WITH (fillfactor = 50);

-- Bytes that count against an owner's limit: files as they came (of jobs also their rows), result files, results of ended
-- jobs and message batches, parts of open uploads, and the room of uploads under way.
-- A function keeps its plans, also one that was made when the tables were empty: this one is planned anew each time.
CREATE FUNCTION penstock.stored_bytes(of_owner text, at timestamptz) RETURNS int8
LANGUAGE sql STABLE
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off
AS $$
  SELECT (coalesce((SELECT sum(bytes) FROM penstock.files
                     WHERE owner = of_owner AND state = 'ready' AND deleted_at IS NULL
                       AND (expires_at IS NULL OR expires_at > at)), 0)
        + coalesce((SELECT sum(output_bytes + error_bytes) FROM penstock.batches
                     WHERE owner = of_owner AND dialect IN ('anthropic', 'job') AND deleted_at IS NULL
                       AND archived_at IS NULL), 0)
        + coalesce((SELECT sum(p.bytes) FROM penstock.uploads u
                     CROSS JOIN LATERAL (SELECT bytes FROM penstock.upload_parts WHERE upload_id = u.id OFFSET 0) AS p
                     WHERE u.owner = of_owner
                       AND u.completed_at IS NULL AND u.cancelled_at IS NULL AND u.expired_at IS NULL), 0)
        + coalesce((SELECT sum(r.bytes) FROM penstock.reservations r
                     WHERE r.owner = of_owner
                       AND (SELECT f.state FROM penstock.files f WHERE f.id = r.file_id) = 'ingesting'), 0))::int8
$$;
