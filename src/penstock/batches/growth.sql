-- name: create_growing_batch
-- Creates a batch that has no inputs yet, and the file that will hold them.
WITH file AS (
  INSERT INTO penstock.files (id, owner, filename, state, created_at, sealed_at)
  VALUES (%(file_id)s, %(owner)s, %(filename)s, 'ready', @now,
          @now)
)
INSERT INTO penstock.batches
  (id, owner, file_id, pool, idempotency_key, metadata, priority, deadline, total, created_at, validated_at, growing)
VALUES (%(id)s, %(owner)s, %(file_id)s, %(pool)s, %(key)s, %(metadata)s::jsonb, %(priority)s,
        coalesce(%(deadline)s::timestamptz, 'infinity'), 0, @now,
        @now, true)

-- name: hold_file_of_batch
-- Locks the file that a batch grows with, before the batch, as a deletion does.
SELECT id, source_id FROM penstock.files
 WHERE id = (SELECT file_id FROM penstock.batches WHERE id = %(id)s)
   FOR NO KEY UPDATE

-- name: hold_if_growing
-- Locks a batch that takes more inputs: until the commit no other adds any, steers it, ends it or deletes it. One that is
-- sealed takes those that its own processors discover, for as long as it runs.
SELECT total FROM penstock.batches
 WHERE id = %(id)s
   AND ((growing OR %(sealed_too)s::boolean) AND file_id = %(file_id)s AND state IN ('in_progress', 'paused') AND deleted_at IS NULL
        AND deadline > @now) IS TRUE
   FOR UPDATE

-- name: list_file_lanes
-- Lists a file's lanes and their totals.
SELECT source_lane, route, endpoint, total FROM penstock.file_lanes WHERE source_id = %(source_id)s

-- name: add_templates
-- Stores inputs beyond the totals, where none is seen yet: the next statement moves the totals.
INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, summary, body)
SELECT %(source_id)s, t.*
  FROM unnest(%(lanes)s::int4[], %(ordinals)s::int4[], %(lines)s::int4[], %(custom_ids)s::text[], %(summaries)s::text[],
              %(bodies)s::bytea[]) AS t (source_lane, ordinal, line, custom_id, summary, body)

-- name: grow_if_held
-- Moves the totals of a batch, its file and its lanes, under the batch's lock. A lane that had nothing left to claim goes
-- to the end of the line, where those come in that are new, as when a batch is created.
WITH added AS MATERIALIZED (
  SELECT * FROM unnest(%(lanes)s::int4[], %(routes)s::text[], %(endpoints)s::text[], %(counts)s::int4[])
           AS a (source_lane, route, endpoint, count)
),
batch AS (
  UPDATE penstock.batches SET total = total + (SELECT sum(count) FROM added)::int4
   WHERE id = %(id)s AND EXISTS (SELECT FROM added)
  RETURNING id, owner, pool, priority, deadline, state
),
file AS (
  UPDATE penstock.files SET lines = lines + (SELECT sum(count) FROM added)::int4, bytes = bytes + %(bytes)s
   WHERE source_id = %(source_id)s AND EXISTS (SELECT FROM added)
),
file_lane AS (
  INSERT INTO penstock.file_lanes AS f (source_id, source_lane, route, endpoint, total)
  SELECT %(source_id)s, source_lane, route, endpoint, count FROM added
  ON CONFLICT (source_id, source_lane) DO UPDATE SET total = f.total + excluded.total
),
known AS MATERIALIZED (
  SELECT id, source_lane FROM penstock.lanes
   WHERE batch_id = %(id)s AND source_lane = ANY (%(lanes)s::int4[])
   ORDER BY id
     FOR UPDATE
),
grown AS (
  UPDATE penstock.lanes l
     SET total = l.total + added.count,
         tag = CASE WHEN l.next < l.total THEN l.tag
                    ELSE penstock.line_end(l.pool, l.route, l.band, l.owner, l.nearness) + l.step END
    FROM known, added
   WHERE l.id = known.id AND added.source_lane = known.source_lane
),
fresh AS (
  SELECT a.*, batch.*, w.weight, n.nearness, least(a.count, 250) / (w.weight * n.nearness) AS step
    FROM batch
   CROSS JOIN added a
   CROSS JOIN LATERAL (SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = batch.owner) AS w
   CROSS JOIN LATERAL (
     SELECT penstock.nearness(batch.deadline, @now) AS nearness) AS n
   WHERE a.source_lane NOT IN (SELECT source_lane FROM known)
),
made AS (
  INSERT INTO penstock.lanes
    (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total, width, priority, deadline, open,
     weight, nearness, step, tag)
  SELECT id, owner, @now, pool, route, endpoint, %(source_id)s, source_lane, count, %(width)s::int4,
         priority, deadline, state = 'in_progress', weight, nearness, step,
         penstock.line_end(pool, route, -priority, owner, nearness)
           + sum(step) OVER (PARTITION BY route ORDER BY source_lane)
    FROM fresh
   ORDER BY source_lane
)
SELECT pg_notify('penstock_work', pool) FROM batch

-- name: find_row_keys
-- Finds which of some keys a job's rows have already.
SELECT key FROM penstock.row_keys WHERE source_id = %(source_id)s AND key = ANY (%(keys)s::text[])

-- name: add_row_keys
-- Stores the keys of rows that this transaction adds, under the batch's lock.
INSERT INTO penstock.row_keys (source_id, key, ordinal)
SELECT %(source_id)s, k.* FROM unnest(%(keys)s::text[], %(ordinals)s::int4[]) AS k (key, ordinal)

-- name: read_discovered
-- Reads how many rows processors have added to a job, and its columns.
SELECT discovered, columns FROM penstock.jobs WHERE batch_id = %(id)s

-- name: count_discovered
-- Counts rows that this transaction adds to a job, and the columns that only they have.
UPDATE penstock.jobs SET discovered = discovered + %(rows)s, columns = columns || %(columns)s::text[]
 WHERE batch_id = %(id)s

-- name: seal_if_growing
-- Seals a growing batch: no more inputs will come.
UPDATE penstock.batches SET growing = false WHERE id = %(id)s AND growing RETURNING id
