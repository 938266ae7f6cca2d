-- name: request_batch_if_ready
-- Records a requested batch over a sealed file. A key that created one before creates no second.
WITH source AS MATERIALIZED (
  SELECT id FROM penstock.files
   WHERE id = %(file_id)s
     AND (owner = %(owner)s AND state = 'ready' AND kind = 'input' AND deleted_at IS NULL
          AND purpose = CASE %(dialect)s WHEN 'anthropic' THEN 'message_batch' ELSE 'batch' END
          AND (expires_at IS NULL OR expires_at > @now)) IS TRUE
     FOR KEY SHARE
)
INSERT INTO penstock.batches
  (id, owner, file_id, pool, dialect, idempotency_key, fingerprint, endpoint, completion_window, window_s, metadata,
   priority, output_file_id, error_file_id, output_expires_after_s, deadline, total, created_at)
SELECT %(id)s, %(owner)s, id, 'serve', %(dialect)s, %(key)s, %(fingerprint)s, %(endpoint)s, %(completion_window)s,
       %(window_s)s, %(metadata)s::jsonb, %(priority)s, %(output_file_id)s, %(error_file_id)s,
       %(output_expires_after_s)s,
       coalesce(@now + make_interval(secs => %(window_s)s), 'infinity'), 0,
       @now
  FROM source
ON CONFLICT (owner, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING id

-- name: find_id_by_key
-- Finds the batch that a key already created.
SELECT id FROM penstock.batches
 WHERE owner = %(owner)s AND idempotency_key = %(key)s AND (deleted_at IS NULL) IS TRUE

-- name: list_unvalidated
-- Lists batches that were requested and not validated yet, oldest first.
SELECT id FROM penstock.batches WHERE state = 'validating' AND deleted_at IS NULL ORDER BY id LIMIT %(limit)s

-- name: read_wish
-- Reads what a batch to be validated would run: its endpoint, and its file's problems and lanes.
SELECT b.endpoint, f.id, f.source_id, f.lines, f.problems,
       ARRAY(SELECT source_lane FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS lanes,
       ARRAY(SELECT route FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS routes,
       ARRAY(SELECT endpoint FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS endpoints
  FROM penstock.batches b
  JOIN penstock.files f ON f.id = b.file_id
 WHERE b.id = %(id)s AND (b.state = 'validating' AND b.deleted_at IS NULL) IS TRUE

-- name: read_first_lines
-- Reads the first lines of some of a file's lanes, to be named as wrong. Lines grow with ordinals.
SELECT t.line, t.source_lane
  FROM unnest(%(lanes)s::int4[]) AS lane (source_lane)
 CROSS JOIN LATERAL (
   SELECT line, source_lane FROM penstock.templates
    WHERE source_id = %(source_id)s AND source_lane = lane.source_lane
    ORDER BY ordinal
    LIMIT %(limit)s) AS t
 ORDER BY t.line
 LIMIT %(limit)s

-- name: validate_if_validating
-- Makes the lanes of a batch, each for the pool that serves its route, and starts it; unless that is decided already, or
-- its file was deleted since.
WITH batch AS (
  UPDATE penstock.batches
     SET validated_at = @now, total = %(total)s
   WHERE id = %(id)s AND (state = 'validating' AND file_id = %(file_id)s AND deleted_at IS NULL) IS TRUE
  RETURNING id, owner, priority, deadline
),
-- The lanes' places in line, as 0009 says: each lane behind the one before, if that is for the same route. How much its
-- first turn will be is not known yet: it is charged for 250 ordinals, or for all if there are fewer.
lane AS (
  SELECT f.*, p.pool, batch.id AS batch_id, batch.owner, batch.priority, batch.deadline, w.weight, n.nearness,
         least(f.total, 250) / (w.weight * n.nearness) AS step
    FROM batch, unnest(%(lanes)s::int4[], %(pools)s::text[]) AS p (source_lane, pool)
    JOIN penstock.file_lanes f ON f.source_id = %(source_id)s AND f.source_lane = p.source_lane
   CROSS JOIN LATERAL (
     SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = batch.owner) AS w
   CROSS JOIN LATERAL (
     SELECT penstock.nearness(batch.deadline, @now) AS nearness) AS n
)
INSERT INTO penstock.lanes
  (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total, priority, deadline, weight,
   nearness, step, tag)
SELECT batch_id, owner, @now, pool, route, endpoint, source_id, source_lane, total,
       priority, deadline, weight, nearness, step,
       penstock.line_end(pool, route, -priority, owner, nearness)
         + sum(step) OVER (PARTITION BY pool, route ORDER BY source_lane)
  FROM lane
 ORDER BY source_lane
RETURNING id
