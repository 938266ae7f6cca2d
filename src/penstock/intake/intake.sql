-- name: insert_file
-- Opens a file: from here to its seal it belongs to one worker and nobody else can see its rows.
INSERT INTO penstock.files (id, owner, filename, worker_id, created_at)
VALUES (%(file_id)s, %(owner)s, %(filename)s, %(worker_id)s, now())
RETURNING source_id;

-- name: hold_if_ingesting
-- Starts a batch of rows. The row lock is the fence: whoever fails the file waits for the batch under
-- way, and no batch starts afterwards. Batches need not be flushed one by one: the seal's commit,
-- which is, flushes all WAL before it.
SELECT set_config('synchronous_commit', 'off', true)
  FROM penstock.files
 WHERE id = %(file_id)s AND state = 'ingesting'
   FOR SHARE;

-- name: copy_templates
-- Takes rows packed by the parser.
COPY penstock.templates (source_id, source_lane, ordinal, line, custom_id, summary, body)
FROM STDIN (FORMAT BINARY);

-- name: seal_if_ingesting
-- Makes the file whole and visible, with one row per lane, or does nothing.
WITH sealed AS (
  UPDATE penstock.files
     SET state = 'ready', lines = %(lines)s, bytes = %(bytes)s, digest = %(digest)s, sealed_at = now()
   WHERE id = %(file_id)s AND state = 'ingesting'
  RETURNING source_id
), lanes AS (
  INSERT INTO penstock.file_lanes (source_id, source_lane, route, endpoint, total)
  SELECT sealed.source_id, lane.source_lane, lane.route, lane.endpoint, lane.total
    FROM sealed,
         unnest(%(source_lanes)s::int4[], %(routes)s::text[], %(endpoints)s::text[], %(totals)s::int4[])
           AS lane (source_lane, route, endpoint, total)
)
SELECT source_id FROM sealed;

-- name: fail_if_ingesting
-- Gives a file up, unless it was sealed or given up before.
UPDATE penstock.files SET state = 'failed' WHERE id = %(file_id)s AND state = 'ingesting';

-- name: bound_lock_wait
-- Ends the wait for a batch whose connection is gone, but not yet for the server.
SELECT set_config('lock_timeout', %(timeout_ms)s::text, true);

-- name: read_state
-- What became of a file.
SELECT state FROM penstock.files WHERE id = %(file_id)s;

-- name: fail_if_abandoned
-- Gives up files whose worker is gone: named as dead, unknown, or silent longer than the grace.
UPDATE penstock.files SET state = 'failed'
 WHERE state = 'ingesting' AND id = ANY (ARRAY(
   SELECT f.id
     FROM penstock.files f
    WHERE f.state = 'ingesting'
      AND (f.worker_id = ANY (%(dead_workers)s::uuid[])
           OR NOT EXISTS (
             SELECT FROM penstock.workers w
              WHERE w.id = f.worker_id
                AND w.heartbeat_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(grace_s)s)))
      FOR UPDATE OF f SKIP LOCKED))
RETURNING id;

-- name: list_failed
-- Files given up whose rows are still to be deleted.
SELECT id, source_id FROM penstock.files WHERE state = 'failed' ORDER BY created_at;

-- name: purge_templates_after
-- Deletes the next rows of one source, in key order from where the last call ended: starting over
-- would walk past everything deleted before. Rows that another purge has locked are left to it. Addressed by place
-- alone: with its key beside it, the planner may prefer to read the whole source.
WITH gone AS (
  DELETE FROM penstock.templates
   WHERE ctid = ANY (ARRAY(
       SELECT ctid
         FROM penstock.templates
        WHERE source_id = %(source_id)s
          AND (source_lane, ordinal) > (%(source_lane)s::int4, %(ordinal)s::int4)
        ORDER BY source_lane, ordinal
        LIMIT %(rows)s
          FOR UPDATE SKIP LOCKED))
  RETURNING source_lane, ordinal
)
SELECT source_lane, ordinal, count(*) OVER () FROM gone ORDER BY source_lane DESC, ordinal DESC LIMIT 1;

-- name: has_templates
-- Whether rows of a source are left, those another purge is deleting included.
SELECT EXISTS (SELECT FROM penstock.templates WHERE source_id = %(source_id)s);

-- name: forget_if_failed
-- Removes the trace of a file that has no rows left.
DELETE FROM penstock.files WHERE id = %(file_id)s AND state = 'failed';
