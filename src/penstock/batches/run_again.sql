-- name: hold_if_known
-- Locks a batch whose failures are to be run again, and reads its state: until the commit no other transaction ends it,
-- steers it or deletes it.
SELECT b.state, b.file_id IS NOT NULL AS has_inputs,
       b.dialect <> 'openai' OR num_nulls(b.output_file_id, b.error_file_id) = 0 AS has_results,
       EXISTS (SELECT FROM penstock.lanes WHERE batch_id = b.id AND width IS NOT NULL) AS limited,
       b.total - coalesce(b.completed + b.failed + b.not_found + b.skipped, b.total) AS not_run,
       b.deadline <= @now AS late, b.growing
  FROM penstock.batches b
 WHERE b.id = %(id)s AND (b.deleted_at IS NULL AND (%(owner)s::text IS NULL OR b.owner = %(owner)s::text)) IS TRUE
   FOR UPDATE

-- name: reopen_if_ended
-- Lets an ended batch go on: its figures move again, its lanes are open, its deferrals are due, its result files are to
-- be written again. Deltas that an earlier end may have left are part of its figures already. An ingest that its end broke
-- off goes on where it was.
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
     SET reruns = reruns + 1, steered_at = @now, completed_before = b.completed_at,
         completed_at = NULL, cancelled_at = NULL, expired_at = NULL, cancelling_at = NULL, paused_at = NULL,
         completed = NULL, failed = NULL, not_found = NULL, skipped = NULL, retried = NULL, output_bytes = NULL,
         error_bytes = NULL, input_tokens = NULL, cached_tokens = NULL, output_tokens = NULL, reasoning_tokens = NULL,
         deadline = coalesce(@now + make_interval(secs => b.window_s), 'infinity')
   WHERE b.id = (SELECT id FROM batch)
  RETURNING b.id, b.deadline
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = (SELECT id FROM batch) ORDER BY id FOR UPDATE
),
lanes AS (
  UPDATE penstock.lanes
     SET open = true, ended = false, deadline = (SELECT deadline FROM opened), nearness = 1,
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
),
unread AS (
  UPDATE penstock.jobs SET ingested_at = NULL WHERE batch_id = (SELECT id FROM batch WHERE growing)
)
SELECT id, pg_notify('penstock_work', '') FROM opened

-- name: list_lanes_of_batch
-- Lists the lanes of a batch.
SELECT id FROM penstock.lanes WHERE batch_id = %(id)s ORDER BY id

-- name: list_lanes_with_failures
-- Lists those of some lanes that have failures. It reads the keys of all failures, from an index that has nothing else:
-- the caller goes on to read all of them whole.
SELECT lane_id FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[]) AND state <> 'completed'
 GROUP BY lane_id
 ORDER BY lane_id

-- name: list_failures
-- Lists the next failures of a lane: all, or those with certain custom ids or lines, or of one group of errors.
SELECT ordinal
  FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND state <> 'completed' AND ordinal > %(after)s
   AND (%(custom_ids)s::text[] IS NULL OR custom_id = ANY (%(custom_ids)s::text[]))
   AND (%(lines)s::int4[] IS NULL OR line = ANY (%(lines)s::int4[]))
   AND (%(fingerprint)s::int8 IS NULL OR fingerprint = %(fingerprint)s::int8)
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_rerunning
-- Lists those of some ordinals of a lane that are being run again, as ranges.
SELECT lower(r), upper(r)
  FROM (SELECT unnest(h.ordinals * wanted.ordinals) AS r
          FROM (SELECT range_agg(int4range(o, o + 1)) AS ordinals FROM unnest(%(ordinals)s::int4[]) AS o) AS wanted
         CROSS JOIN (
           SELECT ordinals FROM penstock.leases
            WHERE batch_id = %(id)s AND lane_id = %(lane)s AND generation > 0
           UNION ALL
           SELECT ordinals FROM penstock.deferrals
            WHERE batch_id = %(id)s AND lane_id = %(lane)s AND generation > 0) AS h) AS running

-- name: count_within_bytes
-- Counts how many of some outcomes of a lane, from the first on, have bodies of so many bytes together. Lengths are known
-- without reading the bodies.
SELECT count(*) FILTER (WHERE bytes <= %(bytes)s)::int4
  FROM (SELECT sum(o.bytes) OVER (ORDER BY wanted.n) AS bytes
          FROM unnest(%(ordinals)s::int4[]) WITH ORDINALITY AS wanted (ordinal, n)
         CROSS JOIN LATERAL (
           SELECT coalesce(max(octet_length(response)), 0) AS bytes
             FROM (SELECT response FROM penstock.outcomes
                    WHERE lane_id = %(lane)s AND ordinal = wanted.ordinal LIMIT 1) AS one) AS o) AS sums

-- name: read_outcomes
-- Reads some outcomes of a lane, as they are now. Looked up one by one: with ordinal = ANY(...), servers before 17 may
-- walk the whole lane.
SELECT o.*
  FROM unnest(%(ordinals)s::int4[]) AS wanted (ordinal)
 CROSS JOIN LATERAL (
   SELECT ordinal, generation, attempts, line, state::text, custom_id, status_code, request_id, error_code,
          error_message, response
     FROM penstock.outcomes
    WHERE lane_id = %(lane)s AND ordinal = wanted.ordinal
    LIMIT 1) AS o

-- name: find_named_failures
-- Finds those of some custom ids or lines that are failures of these lanes.
SELECT custom_id, line, attempts FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[]) AND state <> 'completed'
   AND (custom_id = ANY (%(custom_ids)s::text[]) OR line = ANY (%(lines)s::int4[]))

-- name: rerun_if_held
-- Turns outcomes of one lane into work again, as their next generation: their ordinals are deferred and due, and the
-- figures no longer count them. In a lane of limited width they take up room from here on, as retries do. The outcomes stay until new ones replace them. The batch is locked by this transaction,
-- and nothing but a rerun makes a generation. A batch that was reopened is marked already: a second update in one
-- transaction would look at the file once more, for the foreign key's sake, and that may be held by a deletion which
-- waits for the batch.
WITH marked AS (
  UPDATE penstock.batches SET reruns = reruns + 1 WHERE id = %(id)s AND NOT %(reopened)s::boolean
),
again AS MATERIALIZED (
  SELECT range_agg(int4range(ordinal, ordinal + 1)) AS ordinals, generation, attempt, spent
    FROM unnest(%(ordinals)s::int4[], %(generations)s::int4[], %(attempts)s::int4[], %(spent)s::int4[])
         AS a (ordinal, generation, attempt, spent)
   GROUP BY generation, attempt, spent
),
taken AS (
  UPDATE penstock.lanes SET busy = busy + cardinality(%(ordinals)s::int4[]) WHERE id = %(lane)s AND width IS NOT NULL
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, owner, band, weight, pool, route, limited, ordinals, attempt, generation, spent, reason,
     deferred_at, due_at, held)
  SELECT l.id, l.batch_id, l.owner, l.band, l.weight, l.pool, l.route, l.width IS NOT NULL, again.ordinals,
         again.attempt, again.generation, again.spent, 'reprocess', @now, @now,
         NOT l.open
    FROM again, penstock.lanes l
   WHERE l.id = %(lane)s
),
counted AS (
  INSERT INTO penstock.progress (batch_id, completed, failed, not_found, skipped, output_bytes, error_bytes)
  VALUES (%(id)s, -%(completed)s::int4, -%(failed)s::int4, -%(not_found)s::int4, -%(skipped)s::int4,
          -%(output_bytes)s::int8, -%(error_bytes)s::int8)
)
SELECT pg_notify('penstock_work', '')

-- name: list_unrun
-- Lists those of some batches that are to end although requests wait to be run again, and nothing is in flight.
SELECT b.id
  FROM penstock.batches b
 WHERE b.id = ANY (%(ids)s::uuid[])
   AND (b.cancelling_at IS NOT NULL OR b.deadline <= @now)
   AND (b.state IN ('in_progress', 'paused', 'cancelling')) IS TRUE
   AND (SELECT true FROM penstock.deferrals WHERE batch_id = b.id AND generation > 0 LIMIT 1)
   AND (SELECT true FROM penstock.leases WHERE batch_id = b.id LIMIT 1) IS NULL
   AND (SELECT true FROM penstock.lanes WHERE batch_id = b.id AND open LIMIT 1) IS NULL

-- name: hold_first_unrun
-- Locks a batch that is to end, if it still is, and one of its deferrals for a rerun; returns some ordinals of it. Which
-- one is all the same: in the order of their ids, the planner may walk past those of all other batches.
WITH batch AS MATERIALIZED (
  SELECT id FROM penstock.batches
   WHERE id = %(id)s
     AND ((cancelling_at IS NOT NULL OR deadline <= @now)
          AND state IN ('in_progress', 'paused', 'cancelling') AND deleted_at IS NULL) IS TRUE
     FOR UPDATE SKIP LOCKED
)
SELECT d.id, d.lane_id, ARRAY(
         SELECT o FROM unnest(penstock.first_ordinals(d.ordinals, %(limit)s)) AS r,
                       generate_series(lower(r), upper(r) - 1) AS o) AS ordinals
  FROM penstock.deferrals d
 WHERE d.id = (SELECT id FROM penstock.deferrals
                WHERE batch_id = (SELECT id FROM batch) AND generation > 0
                LIMIT 1)
   FOR UPDATE

-- name: give_up_unrun
-- Gives up some reruns: the old outcomes stay, and the figures count them once more. The batch is locked by this
-- transaction, and its lanes are closed: nothing is claimed.
WITH rest AS MATERIALIZED (
  SELECT id, lane_id, limited,
         ordinals - (SELECT range_agg(int4range(o, o + 1)) FROM unnest(%(ordinals)s::int4[]) AS o) AS ordinals
    FROM penstock.deferrals
   WHERE id = %(deferral)s
),
gone AS (
  DELETE FROM penstock.deferrals WHERE id = (SELECT id FROM rest WHERE isempty(ordinals))
),
shrunk AS (
  UPDATE penstock.deferrals SET ordinals = (SELECT ordinals FROM rest)
   WHERE id = (SELECT id FROM rest WHERE NOT isempty(ordinals))
),
freed AS (
  UPDATE penstock.lanes SET busy = busy - cardinality(%(ordinals)s::int4[])
   WHERE id = (SELECT lane_id FROM rest WHERE limited)
)
INSERT INTO penstock.progress (batch_id, completed, failed, not_found, skipped, output_bytes, error_bytes)
VALUES (%(id)s, %(completed)s::int4, %(failed)s::int4, %(not_found)s::int4, %(skipped)s::int4, %(output_bytes)s::int8,
        %(error_bytes)s::int8)
