-- name: create_batch_if_ready
-- Creates a batch over a sealed file: the batch and one lane per (url, model), whatever the number of lines.
-- IS TRUE, here and below, keeps everything else out of the choice of an index: the key alone finds the file, or the
-- batch, whatever the statistics say.
WITH source AS MATERIALIZED (
  SELECT id, source_id, lines FROM penstock.files
   WHERE id = %(file_id)s AND (owner = %(owner)s AND state = 'ready' AND deleted_at IS NULL) IS TRUE
     FOR KEY SHARE
),
batch AS (
  INSERT INTO penstock.batches
    (id, owner, dialect, file_id, pool, idempotency_key, target, endpoint, metadata, priority, deadline, window_s, total,
     created_at, validated_at, output_file_id, error_file_id)
  SELECT %(id)s, %(owner)s, CASE WHEN %(is_job)s::boolean THEN 'job' ELSE 'run' END, id, %(pool)s, %(key)s, %(target)s,
         -- Where the lines have several, none is the batch's.
         (SELECT min(endpoint) FROM penstock.file_lanes l WHERE l.source_id = source.source_id
          HAVING min(endpoint) = max(endpoint)),
         %(metadata)s::jsonb, %(priority)s,
         coalesce(%(deadline)s::timestamptz, @now + make_interval(secs => %(window_s)s), 'infinity'), %(window_s)s, lines,
         @now, @now, %(output_file_id)s, %(error_file_id)s
    FROM source
  RETURNING id, owner, priority, deadline
),
-- The lanes' places in line, as 0009 says: each lane behind the one before, if that is for the same route. How much its
-- first turn will be is not known yet: it is charged for 250 ordinals, or for all if there are fewer.
lane AS (
  SELECT f.*, %(pool)s AS pool, coalesce(%(route)s::text, f.route) AS goes_to, batch.id AS batch_id, batch.owner,
         batch.priority, batch.deadline, w.weight, n.nearness,
         least(f.total, 250) / (w.weight * n.nearness) AS step
    FROM batch, source
    JOIN penstock.file_lanes f ON f.source_id = source.source_id
   CROSS JOIN LATERAL (
     SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = %(owner)s) AS w
   CROSS JOIN LATERAL (
     SELECT penstock.nearness(batch.deadline, @now) AS nearness) AS n
)
INSERT INTO penstock.lanes
  (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total, priority, deadline, weight,
   nearness, step, tag)
SELECT batch_id, owner, @now, pool, goes_to, endpoint, source_id, source_lane, total,
       priority, deadline, weight, nearness, step,
       penstock.line_end(pool, goes_to, -priority, owner, nearness)
         + sum(step) OVER (PARTITION BY goes_to ORDER BY source_lane)
  FROM lane
 ORDER BY source_lane
RETURNING id, batch_id, route, total

-- name: find_batch_by_key
-- Finds the batch that a key already created, with the file it runs over.
SELECT b.id, b.state, b.total, b.pool, f.id AS file_id, f.digest, b.metadata, b.target
  FROM penstock.batches b
  JOIN penstock.files f ON f.id = b.file_id
 WHERE b.owner = %(owner)s AND b.idempotency_key = %(key)s AND (b.deleted_at IS NULL) IS TRUE

-- name: release_key
-- Frees a batch's key, so that a new batch can be created under it.
UPDATE penstock.batches SET idempotency_key = NULL WHERE id = %(id)s
