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
    (id, owner, file_id, pool, idempotency_key, target, metadata, priority, deadline, total, created_at, validated_at)
  SELECT %(id)s, %(owner)s, id, %(pool)s, %(key)s, %(target)s, %(metadata)s::jsonb, %(priority)s,
         coalesce(%(deadline)s::timestamptz, 'infinity'), lines, coalesce(%(now)s::timestamptz, now()),
         coalesce(%(now)s::timestamptz, now())
    FROM source
  RETURNING id, owner, priority, deadline
),
-- Behind whom it comes in line, as 0009 says: each lane behind the one before, if that is for the same route. Nobody
-- knows yet how much its first turn will be: it is charged for 250, or for what there is.
lane AS (
  SELECT f.*, %(pool)s AS pool, coalesce(%(route)s::text, f.route) AS goes_to, batch.id AS batch_id, batch.owner,
         batch.priority, batch.deadline, w.weight, n.nearness,
         least(f.total, 250) / (w.weight * n.nearness) AS step
    FROM batch, source
    JOIN penstock.file_lanes f ON f.source_id = source.source_id
   CROSS JOIN LATERAL (
     SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = %(owner)s) AS w
   CROSS JOIN LATERAL (
     SELECT penstock.nearness(coalesce(%(deadline)s::timestamptz, 'infinity'), coalesce(%(now)s::timestamptz, now()))
              AS nearness) AS n
)
INSERT INTO penstock.lanes
  (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total, priority, deadline, weight,
   nearness, step, tag)
SELECT batch_id, owner, coalesce(%(now)s::timestamptz, now()), pool, goes_to, endpoint, source_id, source_lane, total,
       priority, deadline, weight, nearness, step,
       penstock.line_end(pool, goes_to, -priority, owner, nearness)
         + sum(step) OVER (PARTITION BY goes_to ORDER BY source_lane)
  FROM lane
 ORDER BY source_lane
RETURNING id, batch_id, route, total

-- name: find_batch_by_key
-- The batch a key already made, with the file it runs over.
SELECT b.id, b.state, b.total, b.pool, f.id AS file_id, f.digest, b.metadata
  FROM penstock.batches b
  JOIN penstock.files f ON f.id = b.file_id
 WHERE b.owner = %(owner)s AND b.idempotency_key = %(key)s AND (b.deleted_at IS NULL) IS TRUE

-- name: release_key
-- Frees a batch's key, so that a new batch can be made under it.
UPDATE penstock.batches SET idempotency_key = NULL WHERE id = %(id)s

-- name: read_batch
-- A batch's figures in one snapshot: they add up at every read. Ended batches answer from their frozen figures.
SELECT b.id, b.owner, b.dialect, b.state, b.pool, b.target, b.file_id, b.endpoint, m.model, b.completion_window,
       b.window_s, b.metadata, b.priority, nullif(b.deadline, 'infinity') AS deadline, b.created_at, b.validated_at,
       b.paused_at, b.cancelling_at, b.completed_at, b.cancelled_at, b.expired_at, b.failed_at, b.problems,
       b.fingerprint, b.reruns, b.output_file_id, b.error_file_id, b.output_expires_after_s, b.total,
       coalesce(l.in_flight, 0)::int4 AS in_flight,
       coalesce(b.completed, p.completed, 0)::int4 AS completed, coalesce(b.failed, p.failed, 0)::int4 AS failed,
       coalesce(b.not_found, p.not_found, 0)::int4 AS not_found, coalesce(b.skipped, p.skipped, 0)::int4 AS skipped,
       coalesce(b.retried, p.retried, 0)::int4 AS retried,
       coalesce(b.output_bytes, p.output_bytes, 0)::int8 AS output_bytes,
       coalesce(b.error_bytes, p.error_bytes, 0)::int8 AS error_bytes,
       coalesce(b.input_tokens, p.input_tokens, 0)::int8 AS input_tokens,
       coalesce(b.cached_tokens, p.cached_tokens, 0)::int8 AS cached_tokens,
       coalesce(b.output_tokens, p.output_tokens, 0)::int8 AS output_tokens,
       coalesce(b.reasoning_tokens, p.reasoning_tokens, 0)::int8 AS reasoning_tokens
  FROM penstock.batches b
  LEFT JOIN LATERAL (
    SELECT sum(completed) AS completed, sum(failed) AS failed, sum(not_found) AS not_found, sum(skipped) AS skipped,
           sum(retried) AS retried, sum(output_bytes) AS output_bytes, sum(error_bytes) AS error_bytes,
           sum(input_tokens) AS input_tokens, sum(cached_tokens) AS cached_tokens,
           sum(output_tokens) AS output_tokens, sum(reasoning_tokens) AS reasoning_tokens
      FROM penstock.progress WHERE batch_id = b.id AND b.completed IS NULL) AS p ON true
  LEFT JOIN LATERAL (
    SELECT sum(size) AS in_flight FROM penstock.leases WHERE batch_id = b.id AND b.completed IS NULL) AS l ON true
  LEFT JOIN LATERAL (
    SELECT max(route) AS model FROM (SELECT route FROM penstock.lanes WHERE batch_id = b.id LIMIT 2) AS two
    HAVING count(*) = 1) AS m ON true
 WHERE b.id = %(id)s AND (b.deleted_at IS NULL AND (%(owner)s::text IS NULL OR b.owner = %(owner)s::text)) IS TRUE

-- name: read_pace
-- How many lines of a batch were decided each second: by its last hundred settles, or in the last minute. Read after
-- its figures, with which it has nothing to add up to.
SELECT sum(done) FILTER (WHERE written_at > began) / nullif(extract(epoch FROM at - min(began)), 0) AS per_s
  FROM (SELECT done, written_at, at,
               CASE WHEN count(*) OVER () = 100 THEN greatest(min(written_at) OVER (), at - interval '1 minute')
                    ELSE greatest(%(validated_at)s::timestamptz, at - interval '1 minute') END AS began
          FROM (SELECT completed_count + others_count AS done, written_at, coalesce(%(now)s::timestamptz, now()) AS at
                  FROM penstock.journal
                 WHERE batch_id = %(id)s
                 ORDER BY id DESC
                 LIMIT 100) AS latest) AS lately
 GROUP BY at

-- name: list_batches
-- A page of an owner's batches with their figures, in one snapshot: newest first, or, going back, those just after a
-- place, newest first as well. By state, one walk of the index for each, so that the page's size is what counts. By
-- metadata, whatever has it is found first: that many there are, that much it costs.
WITH ways AS MATERIALIZED (
  SELECT d.dialect, s.state FROM unnest(%(dialects)s::text[]) AS d (dialect), unnest(%(states)s::text[]) AS s (state)
),
page AS MATERIALIZED (
  SELECT older.id
    FROM ways
   CROSS JOIN LATERAL (
     SELECT b.id FROM penstock.batches b
      WHERE b.owner = %(owner)s AND b.dialect = ways.dialect AND b.state = ways.state AND b.deleted_at IS NULL
        AND b.id < %(below)s AND b.id > %(above)s
        AND b.created_at >= %(created_after)s AND b.created_at < %(created_before)s
      ORDER BY b.id DESC
      LIMIT %(limit)s) AS older
   WHERE %(metadata)s::jsonb IS NULL AND NOT %(backwards)s::boolean
  UNION ALL
  SELECT newer.id
    FROM ways
   CROSS JOIN LATERAL (
     SELECT b.id FROM penstock.batches b
      WHERE b.owner = %(owner)s AND b.dialect = ways.dialect AND b.state = ways.state AND b.deleted_at IS NULL
        AND b.id < %(below)s AND b.id > %(above)s
        AND b.created_at >= %(created_after)s AND b.created_at < %(created_before)s
      ORDER BY b.id
      LIMIT %(limit)s) AS newer
   WHERE %(metadata)s::jsonb IS NULL AND %(backwards)s::boolean
  UNION ALL
  SELECT marked.id
    FROM (SELECT b.id, b.owner, b.dialect, b.state, b.created_at, b.deleted_at FROM penstock.batches b
           WHERE b.metadata @> %(metadata)s::jsonb
          OFFSET 0) AS marked
   WHERE marked.deleted_at IS NULL AND marked.owner = %(owner)s AND marked.id < %(below)s AND marked.id > %(above)s
     AND (marked.dialect, marked.state) IN (SELECT dialect, state FROM ways)
     AND marked.created_at >= %(created_after)s AND marked.created_at < %(created_before)s
),
chosen AS MATERIALIZED (
  SELECT id FROM page
   ORDER BY CASE WHEN %(backwards)s::boolean THEN id END, CASE WHEN NOT %(backwards)s::boolean THEN id END DESC
   LIMIT %(limit)s
)
SELECT b.id, b.owner, b.dialect, b.state, b.pool, b.target, b.file_id, b.endpoint, m.model, b.completion_window,
       b.window_s, b.metadata, b.priority, nullif(b.deadline, 'infinity') AS deadline, b.created_at, b.validated_at,
       b.paused_at, b.cancelling_at, b.completed_at, b.cancelled_at, b.expired_at, b.failed_at, b.problems,
       b.fingerprint, b.reruns, b.output_file_id, b.error_file_id, b.output_expires_after_s, b.total,
       coalesce(l.in_flight, 0)::int4 AS in_flight,
       coalesce(b.completed, p.completed, 0)::int4 AS completed, coalesce(b.failed, p.failed, 0)::int4 AS failed,
       coalesce(b.not_found, p.not_found, 0)::int4 AS not_found, coalesce(b.skipped, p.skipped, 0)::int4 AS skipped,
       coalesce(b.retried, p.retried, 0)::int4 AS retried,
       coalesce(b.output_bytes, p.output_bytes, 0)::int8 AS output_bytes,
       coalesce(b.error_bytes, p.error_bytes, 0)::int8 AS error_bytes,
       coalesce(b.input_tokens, p.input_tokens, 0)::int8 AS input_tokens,
       coalesce(b.cached_tokens, p.cached_tokens, 0)::int8 AS cached_tokens,
       coalesce(b.output_tokens, p.output_tokens, 0)::int8 AS output_tokens,
       coalesce(b.reasoning_tokens, p.reasoning_tokens, 0)::int8 AS reasoning_tokens
  FROM penstock.batches b
  LEFT JOIN LATERAL (
    SELECT sum(completed) AS completed, sum(failed) AS failed, sum(not_found) AS not_found, sum(skipped) AS skipped,
           sum(retried) AS retried, sum(output_bytes) AS output_bytes, sum(error_bytes) AS error_bytes,
           sum(input_tokens) AS input_tokens, sum(cached_tokens) AS cached_tokens,
           sum(output_tokens) AS output_tokens, sum(reasoning_tokens) AS reasoning_tokens
      FROM penstock.progress WHERE batch_id = b.id AND b.completed IS NULL) AS p ON true
  LEFT JOIN LATERAL (
    SELECT sum(size) AS in_flight FROM penstock.leases WHERE batch_id = b.id AND b.completed IS NULL) AS l ON true
  LEFT JOIN LATERAL (
    SELECT max(route) AS model FROM (SELECT route FROM penstock.lanes WHERE batch_id = b.id LIMIT 2) AS two
    HAVING count(*) = 1) AS m ON true
 WHERE b.id = ANY (ARRAY(SELECT id FROM chosen))
 ORDER BY b.id DESC

-- name: find_batch_of_result
-- The batch whose output or errors go by this id: while it is running, or as long as the file is there.
SELECT b.id, CASE WHEN b.output_file_id = %(file_id)s THEN 'output' ELSE 'errors' END AS which
  FROM penstock.batches b
 WHERE b.id = ANY (ARRAY(
         SELECT id FROM penstock.batches WHERE output_file_id = %(file_id)s
         UNION ALL
         SELECT id FROM penstock.batches WHERE error_file_id = %(file_id)s))
   AND (b.deleted_at IS NULL AND (%(owner)s::text IS NULL OR b.owner = %(owner)s::text)
        AND b.validated_at IS NOT NULL) IS TRUE
   AND (b.completed IS NULL
        OR EXISTS (SELECT FROM penstock.files f
                    WHERE f.id = %(file_id)s AND f.deleted_at IS NULL
                      AND (f.expires_at IS NULL OR f.expires_at > coalesce(%(now)s::timestamptz, now()))))

-- name: request_batch_if_ready
-- Notes that somebody wants a batch over a sealed file. A key that made one before makes no second.
WITH source AS MATERIALIZED (
  SELECT id FROM penstock.files
   WHERE id = %(file_id)s
     AND (owner = %(owner)s AND state = 'ready' AND kind = 'input' AND deleted_at IS NULL
          AND purpose = CASE %(dialect)s WHEN 'anthropic' THEN 'message_batch' ELSE 'batch' END
          AND (expires_at IS NULL OR expires_at > coalesce(%(now)s::timestamptz, now()))) IS TRUE
     FOR KEY SHARE
)
INSERT INTO penstock.batches
  (id, owner, file_id, pool, dialect, idempotency_key, fingerprint, endpoint, completion_window, window_s, metadata,
   priority, output_file_id, error_file_id, output_expires_after_s, deadline, total, created_at)
SELECT %(id)s, %(owner)s, id, 'serve', %(dialect)s, %(key)s, %(fingerprint)s, %(endpoint)s, %(completion_window)s,
       %(window_s)s, %(metadata)s::jsonb, %(priority)s, %(output_file_id)s, %(error_file_id)s,
       %(output_expires_after_s)s,
       coalesce(coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(window_s)s), 'infinity'), 0,
       coalesce(%(now)s::timestamptz, now())
  FROM source
ON CONFLICT (owner, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING id

-- name: find_id_by_key
-- The batch a key already made.
SELECT id FROM penstock.batches
 WHERE owner = %(owner)s AND idempotency_key = %(key)s AND (deleted_at IS NULL) IS TRUE

-- name: list_unvalidated
-- Batches that were asked for and not looked at yet, oldest first.
SELECT id FROM penstock.batches WHERE state = 'validating' AND deleted_at IS NULL ORDER BY id LIMIT %(limit)s

-- name: read_wish
-- What a batch that is to be validated would run: its endpoint, and its file's problems and lanes.
SELECT b.endpoint, f.id, f.source_id, f.lines, f.problems,
       ARRAY(SELECT source_lane FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS lanes,
       ARRAY(SELECT route FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS routes,
       ARRAY(SELECT endpoint FROM penstock.file_lanes WHERE source_id = f.source_id ORDER BY source_lane) AS endpoints
  FROM penstock.batches b
  JOIN penstock.files f ON f.id = b.file_id
 WHERE b.id = %(id)s AND (b.state = 'validating' AND b.deleted_at IS NULL) IS TRUE

-- name: read_first_lines
-- The first lines of some of a file's lanes: what to name as wrong. Lines grow with ordinals.
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
     SET validated_at = coalesce(%(now)s::timestamptz, now()), total = %(total)s
   WHERE id = %(id)s AND (state = 'validating' AND file_id = %(file_id)s AND deleted_at IS NULL) IS TRUE
  RETURNING id, owner, priority, deadline
),
-- Behind whom it comes in line, as 0009 says: each lane behind the one before, if that is for the same route. Nobody
-- knows yet how much its first turn will be: it is charged for 250, or for what there is.
lane AS (
  SELECT f.*, p.pool, batch.id AS batch_id, batch.owner, batch.priority, batch.deadline, w.weight, n.nearness,
         least(f.total, 250) / (w.weight * n.nearness) AS step
    FROM batch, unnest(%(lanes)s::int4[], %(pools)s::text[]) AS p (source_lane, pool)
    JOIN penstock.file_lanes f ON f.source_id = %(source_id)s AND f.source_lane = p.source_lane
   CROSS JOIN LATERAL (
     SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = batch.owner) AS w
   CROSS JOIN LATERAL (
     SELECT penstock.nearness(batch.deadline, coalesce(%(now)s::timestamptz, now())) AS nearness) AS n
)
INSERT INTO penstock.lanes
  (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total, priority, deadline, weight,
   nearness, step, tag)
SELECT batch_id, owner, coalesce(%(now)s::timestamptz, now()), pool, route, endpoint, source_id, source_lane, total,
       priority, deadline, weight, nearness, step,
       penstock.line_end(pool, route, -priority, owner, nearness)
         + sum(step) OVER (PARTITION BY pool, route ORDER BY source_lane)
  FROM lane
 ORDER BY source_lane
RETURNING id

-- name: hold_batch
-- Locks a batch, before the next statement.
SELECT id FROM penstock.batches WHERE id = %(id)s FOR UPDATE

-- name: pause_if_running
-- Closes the lanes and holds the deferrals. What is in flight finishes. Statements that wait for several lanes take them
-- in id order (steering, and settles that make room), and after these deferrals, in id order too.
WITH batch AS (
  UPDATE penstock.batches
     SET paused_at = coalesce(%(now)s::timestamptz, now()), steered_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = %(id)s
     AND (state = 'in_progress' AND deleted_at IS NULL AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
closed AS (
  UPDATE penstock.lanes SET open = false WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
SELECT id FROM batch

-- name: resume_if_paused
-- Opens the lanes again and releases the deferrals. Both go to the end of the line: nothing was due to them meanwhile.
WITH batch AS (
  UPDATE penstock.batches SET paused_at = NULL, steered_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = %(id)s
     AND (state = 'paused' AND deleted_at IS NULL AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
opened AS (
  UPDATE penstock.lanes SET open = true, tag = penstock.line_end(pool, route, band, owner, nearness) + step
   WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
parked AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
released AS (
  UPDATE penstock.deferrals SET held = false, tag = NULL WHERE id = ANY (ARRAY(SELECT id FROM parked))
)
SELECT id, pg_notify('penstock_work', '') FROM batch

-- name: cancel_if_unfinished
-- Stamps the batch and closes its lanes, whatever the number of lines. What is in flight finishes and is kept.
WITH batch AS (
  UPDATE penstock.batches
     SET cancelling_at = coalesce(%(now)s::timestamptz, now()), steered_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = %(id)s
     AND (state IN ('validating', 'in_progress', 'paused') AND deleted_at IS NULL
          AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
closed AS (
  UPDATE penstock.lanes SET open = false WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
SELECT id FROM batch

-- name: close_if_past_deadline
-- Closes the lanes of those of some batches whose deadline has passed, and holds their deferrals.
WITH late AS MATERIALIZED (
  SELECT id FROM penstock.batches
   WHERE id = ANY (%(ids)s::uuid[]) AND deadline <= coalesce(%(now)s::timestamptz, now())
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE batch_id = ANY (ARRAY(SELECT id FROM late)) AND open
   ORDER BY id
     FOR UPDATE
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = ANY (ARRAY(SELECT id FROM late)) AND NOT held AND EXISTS (SELECT FROM lane)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
UPDATE penstock.lanes SET open = false
 WHERE id = ANY (ARRAY(SELECT id FROM lane))
RETURNING id

-- name: hold_strays
-- Holds deferrals that were written while their batch was being paused or cancelled, and releases those that were held
-- while it was being resumed: this very statement may do that, since it waits for nobody and believes its snapshot.
-- Deferrals that a statement holds are left for the next round.
UPDATE penstock.deferrals SET held = NOT held, tag = NULL
 WHERE id = ANY (ARRAY(
   SELECT id FROM penstock.deferrals
    WHERE id = ANY (ARRAY(
            SELECT d.id
              FROM penstock.lanes l
             CROSS JOIN LATERAL (
               SELECT id FROM penstock.deferrals
                WHERE batch_id = l.batch_id AND held = l.open AND lane_id = l.id
               OFFSET 0) AS d
             WHERE l.batch_id = ANY (%(ids)s::uuid[])))
      FOR UPDATE SKIP LOCKED))

-- name: list_unfinished
-- Batches that were started and have not ended, for the housekeeping round: the next some of them.
SELECT id FROM penstock.batches
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
   AND id > %(after)s AND deleted_at IS NULL AND state <> 'validating'
 ORDER BY id
 LIMIT %(limit)s

-- name: list_changed
-- Batches with deltas that no fold has seen: one probe for each.
WITH RECURSIVE changed AS (
  SELECT '00000000-0000-0000-0000-000000000000'::uuid AS batch_id
  UNION ALL
  SELECT (SELECT p.batch_id FROM penstock.progress p
           WHERE NOT p.folded AND p.batch_id > c.batch_id ORDER BY p.batch_id LIMIT 1)
    FROM changed c WHERE c.batch_id IS NOT NULL
)
SELECT batch_id FROM changed WHERE batch_id IS NOT NULL OFFSET 1 LIMIT %(limit)s

-- name: list_closing
-- Batches that are to end although inputs are left: past their deadline, or being cancelled. The earliest first.
SELECT id FROM penstock.batches
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
   AND (cancelling_at IS NOT NULL OR deadline < 'infinity')
   AND CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END <= coalesce(%(now)s::timestamptz, now())
   AND deleted_at IS NULL AND state <> 'validating'
 ORDER BY CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
 LIMIT %(limit)s

-- name: list_steered
-- Batches that were paused, resumed, cancelled or reopened within the last seconds, or, by a clock since set back, later.
SELECT id FROM penstock.batches
 WHERE steered_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(within_s)s) AND deleted_at IS NULL
 LIMIT %(limit)s

-- name: set_weight
-- Says how much of the work an owner gets beside the others. Its lanes that wait keep their place for this turn.
WITH owner AS (
  INSERT INTO penstock.owners (owner, weight) VALUES (%(owner)s, %(weight)s)
  ON CONFLICT (owner) DO UPDATE SET weight = excluded.weight
  RETURNING owner, weight
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE owner = (SELECT owner FROM owner) AND NOT session AND next < total
   ORDER BY id
     FOR UPDATE
)
UPDATE penstock.lanes SET weight = (SELECT weight FROM owner) WHERE id = ANY (ARRAY(SELECT id FROM lane))

-- name: list_weights
-- The owners of whom something was said.
SELECT owner, weight::float8 FROM penstock.owners WHERE coalesce(%(owner)s = owner, true) ORDER BY owner

-- name: line_up_lanes
-- Gives lanes a place in line that code from before there was one has made, or made runnable.
UPDATE penstock.lanes
   SET tag = CASE WHEN session THEN extract(epoch FROM coalesce(%(now)s::timestamptz, now()))
                  ELSE penstock.line_end(pool, route, band, owner, nearness) + step END
 WHERE id = ANY (ARRAY(
   SELECT id FROM penstock.lanes
    WHERE tag IS NULL AND runnable AND id > 0
    ORDER BY id
    LIMIT %(limit)s
      FOR UPDATE SKIP LOCKED))

-- name: weigh_near
-- Counts batches for more as their deadline comes nearer. What a lane still waits for shrinks as its share grows.
WITH near AS MATERIALIZED (
  SELECT l.id, penstock.nearness(l.deadline, coalesce(%(now)s::timestamptz, now())) AS nearness
    FROM (SELECT id FROM penstock.batches
           WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
             AND (cancelling_at IS NOT NULL OR deadline < 'infinity')
             AND CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
                 BETWEEN coalesce(%(now)s::timestamptz, now())
                     AND coalesce(%(now)s::timestamptz, now()) + interval '1 hour'
           ORDER BY CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
           LIMIT %(limit)s) AS b
   CROSS JOIN LATERAL (
     SELECT id, deadline, nearness, runnable FROM penstock.lanes WHERE batch_id = b.id OFFSET 0) AS l
   WHERE l.runnable AND l.nearness <> penstock.nearness(l.deadline, coalesce(%(now)s::timestamptz, now()))
),
nearer AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE id = ANY (ARRAY(SELECT id FROM near)) AND runnable
   ORDER BY id
     FOR UPDATE SKIP LOCKED
)
UPDATE penstock.lanes l
   SET nearness = n.nearness, step = l.step * l.nearness / n.nearness,
       tag = n.at + (l.tag - n.at) * l.nearness / n.nearness
  FROM (SELECT near.id, near.nearness,
               least(l.tag - l.step, penstock.line_start(l.pool, l.route, l.band, '-infinity')) AS at
          FROM near
          JOIN penstock.lanes l ON l.id = near.id) AS n
 WHERE l.id = n.id AND l.id = ANY (ARRAY(SELECT id FROM nearer))

-- name: fold_progress
-- Sums the deltas of some batches into one row each, where there are new ones, so many of each at the most; returns the
-- batches that may have more. Deltas that a settle or another fold holds are left for the next time. Rows here are never
-- updated, so that their place holds still.
WITH seen AS MATERIALIZED (
  SELECT p.place, b.id
    FROM unnest(%(ids)s::uuid[]) AS b (id)
   CROSS JOIN LATERAL (
     SELECT ctid AS place FROM penstock.progress
      WHERE batch_id = b.id
      ORDER BY id
      LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED) AS p
   WHERE EXISTS (SELECT FROM penstock.progress WHERE batch_id = b.id AND NOT folded)
),
folded AS (
  DELETE FROM penstock.progress WHERE ctid = ANY (ARRAY(SELECT place FROM seen))
  RETURNING batch_id, completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens,
            cached_tokens, output_tokens, reasoning_tokens
),
behind AS MATERIALIZED (
  SELECT id FROM seen GROUP BY id HAVING count(*) >= %(limit)s
)
INSERT INTO penstock.progress
  (batch_id, folded, completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens,
   cached_tokens, output_tokens, reasoning_tokens)
SELECT batch_id, true, sum(completed), sum(failed), sum(not_found), sum(skipped), sum(retried), sum(output_bytes),
       sum(error_bytes), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(reasoning_tokens)
  FROM folded
 GROUP BY batch_id
RETURNING CASE WHEN batch_id IN (SELECT id FROM behind) THEN batch_id END

-- name: take_turn_if_due
-- Takes the turn at a duty that one process does for all, unless one has had it within the interval. A time in the future
-- was written before the clock was set back, and says nothing.
UPDATE penstock.duties SET done_at = coalesce(%(now)s::timestamptz, now())
 WHERE name = (
   SELECT name FROM penstock.duties
    WHERE name = %(name)s
      AND (done_at <= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(every_s)s)
           OR done_at > coalesce(%(now)s::timestamptz, now()))
      FOR UPDATE SKIP LOCKED)
RETURNING name

-- name: hold_if_known
-- Locks a batch whose failures are to be run again, and says what there is of it: until the commit nobody ends it,
-- steers it or deletes it.
SELECT b.state, b.file_id IS NOT NULL AS has_inputs,
       b.dialect <> 'openai' OR num_nulls(b.output_file_id, b.error_file_id) = 0 AS has_results,
       EXISTS (SELECT FROM penstock.lanes WHERE batch_id = b.id AND width IS NOT NULL) AS limited,
       b.total - coalesce(b.completed + b.failed + b.not_found + b.skipped, b.total) AS not_run,
       b.deadline <= coalesce(%(now)s::timestamptz, now()) AS late
  FROM penstock.batches b
 WHERE b.id = %(id)s AND (b.deleted_at IS NULL AND (%(owner)s::text IS NULL OR b.owner = %(owner)s::text)) IS TRUE
   FOR UPDATE

-- name: reopen_if_ended
-- Lets an ended batch go on: its figures move again, its lanes are open, what was deferred is due, its result files are
-- to be written anew. What an earlier end may have left of its deltas is part of its figures already.
WITH batch AS MATERIALIZED (
  SELECT * FROM penstock.batches WHERE id = %(id)s AND completed IS NOT NULL AND failed_at IS NULL
),
stale AS (
  DELETE FROM penstock.progress WHERE batch_id = (SELECT id FROM batch)
),
seeded AS (
  INSERT INTO penstock.progress
    (batch_id, completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens,
     output_tokens, reasoning_tokens)
  SELECT id, completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens,
         output_tokens, reasoning_tokens
    FROM batch
),
opened AS (
  UPDATE penstock.batches b
     SET reruns = reruns + 1, steered_at = coalesce(%(now)s::timestamptz, now()),
         completed_at = NULL, cancelled_at = NULL, expired_at = NULL, cancelling_at = NULL, paused_at = NULL,
         completed = NULL, failed = NULL, not_found = NULL, skipped = NULL, retried = NULL, output_bytes = NULL,
         error_bytes = NULL, input_tokens = NULL, cached_tokens = NULL, output_tokens = NULL, reasoning_tokens = NULL,
         deadline = coalesce(coalesce(%(now)s::timestamptz, now()) + make_interval(secs => b.window_s), 'infinity')
   WHERE b.id = (SELECT id FROM batch)
  RETURNING b.id, b.deadline
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = (SELECT id FROM batch) ORDER BY id FOR UPDATE
),
lanes AS (
  UPDATE penstock.lanes
     SET open = true, deadline = (SELECT deadline FROM opened), nearness = 1,
         tag = penstock.line_end(pool, route, band, owner, nearness) + step
   WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
parked AS MATERIALIZED (
  SELECT id FROM penstock.deferrals WHERE batch_id = (SELECT id FROM batch) AND held ORDER BY id FOR UPDATE
),
released AS (
  UPDATE penstock.deferrals SET held = false, tag = NULL WHERE id = ANY (ARRAY(SELECT id FROM parked))
),
unpublished AS (
  DELETE FROM penstock.files WHERE batch_id = (SELECT id FROM batch) AND kind <> 'input'
)
SELECT id FROM opened

-- name: list_lanes_of_batch
-- The lanes of a batch.
SELECT id FROM penstock.lanes WHERE batch_id = %(id)s ORDER BY id

-- name: list_lanes_with_failures
-- Those of some lanes that have outcomes to be had again. It reads the keys of all that are, from an index that has
-- nothing else: whoever asks goes on to read all of them whole.
SELECT lane_id FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[]) AND state <> 'completed'
 GROUP BY lane_id
 ORDER BY lane_id

-- name: list_failures
-- The next failures of a lane: all, or those with certain custom ids or lines.
SELECT ordinal
  FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND state <> 'completed' AND ordinal > %(after)s
   AND (%(custom_ids)s::text[] IS NULL OR custom_id = ANY (%(custom_ids)s::text[]))
   AND (%(lines)s::int4[] IS NULL OR line = ANY (%(lines)s::int4[]))
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_rerunning
-- Those of some ordinals of a lane that are being run again, as ranges.
SELECT lower(r), upper(r)
  FROM (SELECT unnest(h.ordinals * wanted.ordinals) AS r
          FROM (SELECT range_agg(int4range(o, o + 1)) AS ordinals FROM unnest(%(ordinals)s::int4[]) AS o) AS wanted
         CROSS JOIN (
           SELECT ordinals FROM penstock.leases
            WHERE batch_id = %(id)s AND lane_id = %(lane)s AND generation > 0
           UNION ALL
           SELECT ordinals FROM penstock.deferrals
            WHERE batch_id = %(id)s AND lane_id = %(lane)s AND generation > 0) AS h) AS running

-- name: read_failures
-- Some failures of a lane, as they are now. Looked up one by one: with ordinal = ANY(...), servers before 17 may walk the
-- whole lane.
SELECT o.*
  FROM unnest(%(ordinals)s::int4[]) AS wanted (ordinal)
 CROSS JOIN LATERAL (
   SELECT ordinal, generation, attempts, line, state::text, custom_id, status_code, request_id, error_code,
          error_message, response
     FROM penstock.outcomes
    WHERE lane_id = %(lane)s AND ordinal = wanted.ordinal AND state <> 'completed'
    LIMIT 1) AS o

-- name: find_named_failures
-- Those of some custom ids or lines that are failures of these lanes.
SELECT custom_id, line, attempts FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[]) AND state <> 'completed'
   AND (custom_id = ANY (%(custom_ids)s::text[]) OR line = ANY (%(lines)s::int4[]))

-- name: rerun_if_held
-- Turns outcomes of one lane into work again, as their next generation: their ordinals are deferred and due, and the
-- figures forget them. The outcomes stay until the new ones take their place. The batch is locked by this transaction,
-- and nothing but a rerun makes a generation. A batch that was reopened is marked already: a second update in one
-- transaction would look at the file once more, for the foreign key's sake, and that may be held by a deletion which
-- waits for the batch.
WITH marked AS (
  UPDATE penstock.batches SET reruns = reruns + 1 WHERE id = %(id)s AND NOT %(reopened)s::boolean
),
again AS MATERIALIZED (
  SELECT range_agg(int4range(ordinal, ordinal + 1)) AS ordinals, generation, spent
    FROM unnest(%(ordinals)s::int4[], %(generations)s::int4[], %(spent)s::int4[]) AS a (ordinal, generation, spent)
   GROUP BY generation, spent
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, owner, band, weight, pool, route, limited, ordinals, attempt, generation, spent, reason,
     deferred_at, due_at, held)
  SELECT l.id, l.batch_id, l.owner, l.band, l.weight, l.pool, l.route, false, again.ordinals, 1, again.generation,
         again.spent, 'reprocess', coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now()),
         NOT l.open
    FROM again, penstock.lanes l
   WHERE l.id = %(lane)s
),
counted AS (
  INSERT INTO penstock.progress (batch_id, failed, not_found, skipped, error_bytes)
  VALUES (%(id)s, -%(failed)s::int4, -%(not_found)s::int4, -%(skipped)s::int4, -%(bytes)s::int8)
)
SELECT pg_notify('penstock_work', '')

-- name: list_unrun
-- Those of some batches that are to end although something waits to be run again, and nothing is in flight.
SELECT b.id
  FROM penstock.batches b
 WHERE b.id = ANY (%(ids)s::uuid[])
   AND (b.cancelling_at IS NOT NULL OR b.deadline <= coalesce(%(now)s::timestamptz, now()))
   AND (b.state IN ('in_progress', 'paused', 'cancelling')) IS TRUE
   AND (SELECT true FROM penstock.deferrals WHERE batch_id = b.id AND generation > 0 LIMIT 1)
   AND (SELECT true FROM penstock.leases WHERE batch_id = b.id LIMIT 1) IS NULL
   AND (SELECT true FROM penstock.lanes WHERE batch_id = b.id AND open LIMIT 1) IS NULL

-- name: hold_first_unrun
-- Locks a batch that is to end, if it still is, and the next of its deferrals of what is to be run again; some ordinals
-- of it.
WITH batch AS MATERIALIZED (
  SELECT id FROM penstock.batches
   WHERE id = %(id)s
     AND ((cancelling_at IS NOT NULL OR deadline <= coalesce(%(now)s::timestamptz, now()))
          AND state IN ('in_progress', 'paused', 'cancelling') AND deleted_at IS NULL) IS TRUE
     FOR UPDATE SKIP LOCKED
)
SELECT d.id, d.lane_id, ARRAY(
         SELECT o FROM unnest(penstock.first_ordinals(d.ordinals, %(limit)s)) AS r,
                       generate_series(lower(r), upper(r) - 1) AS o) AS ordinals
  FROM penstock.deferrals d
 WHERE d.id = (SELECT id FROM penstock.deferrals
                WHERE batch_id = (SELECT id FROM batch) AND generation > 0
                ORDER BY id LIMIT 1)
   FOR UPDATE

-- name: give_up_unrun
-- Leaves some outcomes as they are that were to be had again: the figures count them once more. The batch is locked by
-- this transaction, and its lanes are closed: nobody claims.
WITH rest AS MATERIALIZED (
  SELECT id, ordinals - (SELECT range_agg(int4range(o, o + 1)) FROM unnest(%(ordinals)s::int4[]) AS o) AS ordinals
    FROM penstock.deferrals
   WHERE id = %(deferral)s
),
gone AS (
  DELETE FROM penstock.deferrals WHERE id = (SELECT id FROM rest WHERE isempty(ordinals))
),
shrunk AS (
  UPDATE penstock.deferrals SET ordinals = (SELECT ordinals FROM rest)
   WHERE id = (SELECT id FROM rest WHERE NOT isempty(ordinals))
)
INSERT INTO penstock.progress (batch_id, failed, not_found, skipped, error_bytes)
VALUES (%(id)s, %(failed)s::int4, %(not_found)s::int4, %(skipped)s::int4, %(bytes)s::int8)
