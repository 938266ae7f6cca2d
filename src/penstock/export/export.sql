-- name: list_lanes
-- The lanes of a batch, for merging their outcomes back into input order.
SELECT id, source_id, source_lane, total FROM penstock.lanes WHERE batch_id = %(batch)s ORDER BY id

-- name: read_outcomes
-- One lane's outcomes from an ordinal on: at least one, and no more than a byte budget.
SELECT o.ordinal, o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code, o.error_message,
       o.response
  FROM (SELECT ordinal, line, state, custom_id, status_code, request_id, error_code, error_message, response,
               sum(coalesce(octet_length(response), 0)) OVER (ORDER BY ordinal)
                 - coalesce(octet_length(response), 0) AS before
          FROM penstock.outcomes
         WHERE lane_id = %(lane)s AND ordinal >= %(from)s
         ORDER BY ordinal
         LIMIT %(rows)s) AS o
 WHERE o.before < %(bytes)s
 ORDER BY o.ordinal

-- name: read_inputs_missing
-- One lane's inputs that have no outcome, from an ordinal on: the lines a cancelled or expired batch never ran.
-- The inner LIMIT keeps this one probe per input: as an anti-join, stale statistics made it read all of the lane's
-- outcomes for each page, or even for each input.
SELECT t.ordinal, t.line, t.custom_id
  FROM penstock.templates t
  LEFT JOIN LATERAL (
    SELECT true AS found FROM penstock.outcomes WHERE lane_id = %(lane)s AND ordinal = t.ordinal LIMIT 1) AS o ON true
 WHERE t.source_id = %(source_id)s AND t.source_lane = %(source_lane)s AND t.ordinal >= %(from)s
   AND o.found IS NULL
 ORDER BY t.ordinal
 LIMIT %(rows)s

-- name: read_ended
-- How and when a batch ended, and how many lines of each kind its results have.
SELECT state, coalesce(completed_at, cancelled_at, expired_at) AS ended_at, completed,
       failed + not_found + skipped AS others
  FROM penstock.batches
 WHERE id = %(batch)s AND (deleted_at IS NULL) IS TRUE

-- name: list_lanes_with_inputs
-- The lanes of a batch and whether their inputs can still be read: those of a deleted file cannot, purged or not.
SELECT l.id, l.source_id, l.source_lane, l.total, f.id IS NOT NULL AS readable
  FROM penstock.lanes l
  LEFT JOIN penstock.files f ON f.source_id = l.source_id AND f.deleted_at IS NULL
 WHERE l.batch_id = %(batch)s
 ORDER BY l.id

-- name: read_keys
-- What is needed to put the outcomes of many lanes in order and to fill a page, without their payload.
SELECT w.n, o.ordinal, o.line, o.completed, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[]) WITH ORDINALITY AS w (lane_id, start, n)
 CROSS JOIN LATERAL (
    SELECT ordinal, line, state = 'completed' AS completed, coalesce(octet_length(response), 0) AS size
      FROM penstock.outcomes
     WHERE lane_id = w.lane_id AND ordinal >= w.start
     ORDER BY ordinal
     LIMIT %(rows)s) AS o
 ORDER BY w.n, o.ordinal

-- name: read_keys_not_completed
-- The same of outcomes that did not complete, which have an index of their own.
SELECT w.n, o.ordinal, o.line, false AS completed, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[]) WITH ORDINALITY AS w (lane_id, start, n)
 CROSS JOIN LATERAL (
    SELECT ordinal, line, coalesce(octet_length(response), 0) AS size
      FROM penstock.outcomes
     WHERE lane_id = w.lane_id AND ordinal >= w.start AND state <> 'completed'
     ORDER BY ordinal
     LIMIT %(rows)s) AS o
 ORDER BY w.n, o.ordinal

-- name: read_keys_missing
-- The inputs without an outcome among the next so many of each lane. A stretch of inputs, not a number of answers: a
-- million lines that did run must not be searched through in one statement.
SELECT w.n, t.ordinal, t.line, t.custom_id
  FROM unnest(%(lanes)b::int8[], %(sources)b::int8[], %(source_lanes)b::int4[], %(starts)b::int4[])
       WITH ORDINALITY AS w (lane_id, source_id, source_lane, start, n)
 CROSS JOIN LATERAL (
    SELECT ordinal, line, custom_id
      FROM penstock.templates
     WHERE source_id = w.source_id AND source_lane = w.source_lane
       AND ordinal >= w.start AND ordinal < w.start + %(rows)s
     ORDER BY ordinal
     LIMIT %(rows)s) AS t
  LEFT JOIN LATERAL (
    SELECT true AS found FROM penstock.outcomes WHERE lane_id = w.lane_id AND ordinal = t.ordinal LIMIT 1) AS o ON true
 WHERE o.found IS NULL
 ORDER BY w.n, t.ordinal

-- name: read_outcomes_at
-- Some outcomes, in the order asked for.
SELECT w.n, o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code, o.error_message, o.response
  FROM unnest(%(lanes)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS w (lane_id, ordinal, n)
 CROSS JOIN LATERAL (
    SELECT line, state, custom_id, status_code, request_id, error_code, error_message, response
      FROM penstock.outcomes
     WHERE lane_id = w.lane_id AND ordinal = w.ordinal
     LIMIT 1) AS o
 ORDER BY w.n

-- name: begin_journal
-- Makes the row that counts the numbers given to a batch's lines.
INSERT INTO penstock.journal_heads (batch_id) VALUES (%(batch)s) ON CONFLICT DO NOTHING

-- name: number_journal
-- Gives the lines of a batch's journal entries their numbers, if the entries have none yet: after all that have one, some
-- entries at a time. Returns how many lines have one then, and whether to ask again: there may be more entries, or this
-- statement has waited for another whose numbers its snapshot does not show.
WITH seen AS MATERIALIZED (
  SELECT outputs, errors FROM penstock.journal_heads WHERE batch_id = %(batch)s
),
head AS MATERIALIZED (
  SELECT outputs, errors FROM penstock.journal_heads WHERE batch_id = %(batch)s FOR UPDATE
),
fresh AS MATERIALIZED (
  SELECT f.xact, f.id, f.completed_count, f.others_count,
         head.outputs + sum(f.completed_count) OVER entries - f.completed_count AS outputs_before,
         head.errors + sum(f.others_count) OVER entries - f.others_count AS errors_before
    FROM head
    JOIN seen ON seen.outputs = head.outputs AND seen.errors = head.errors
   CROSS JOIN (
     SELECT xact, id, completed_count, others_count FROM penstock.journal
      WHERE batch_id = %(batch)s AND outputs_before IS NULL
      ORDER BY xact, id
      LIMIT %(limit)s) AS f
  WINDOW entries AS (ORDER BY f.xact, f.id)
),
numbered AS (
  UPDATE penstock.journal j SET outputs_before = f.outputs_before, errors_before = f.errors_before
    FROM fresh f
   WHERE j.batch_id = %(batch)s AND j.xact = f.xact AND j.id = f.id
),
moved AS (
  UPDATE penstock.journal_heads
     SET outputs = outputs + (SELECT sum(completed_count) FROM fresh),
         errors = errors + (SELECT sum(others_count) FROM fresh)
   WHERE batch_id = %(batch)s AND EXISTS (SELECT FROM fresh)
)
SELECT head.outputs + coalesce((SELECT sum(completed_count) FROM fresh), 0) AS outputs,
       head.errors + coalesce((SELECT sum(others_count) FROM fresh), 0) AS errors,
       (SELECT count(*) FROM fresh) = %(limit)s
         OR NOT EXISTS (SELECT FROM seen WHERE seen.outputs = head.outputs AND seen.errors = head.errors) AS more
  FROM head

-- name: read_journal_outputs
-- The journal entries with completed lines from a number on, until they have enough of them.
SELECT j.lane_id, j.completed::text, j.outputs_before, j.written_at
  FROM (SELECT lane_id, completed, outputs_before, completed_count, written_at
          FROM penstock.journal
         WHERE batch_id = %(batch)s AND completed_count > 0
           AND outputs_before >= (
             SELECT outputs_before FROM penstock.journal
              WHERE batch_id = %(batch)s AND completed_count > 0 AND outputs_before <= %(offset)s
              ORDER BY outputs_before DESC
              LIMIT 1)
         ORDER BY outputs_before
         LIMIT %(rows)s) AS j
 WHERE j.outputs_before + j.completed_count > %(offset)s AND j.outputs_before < %(offset)s::int8 + %(lines)s
 ORDER BY j.outputs_before

-- name: read_journal_errors
-- The same of lines that were decided otherwise.
SELECT j.lane_id, j.others::text, j.errors_before, j.written_at
  FROM (SELECT lane_id, others, errors_before, others_count, written_at
          FROM penstock.journal
         WHERE batch_id = %(batch)s AND others_count > 0
           AND errors_before >= (
             SELECT errors_before FROM penstock.journal
              WHERE batch_id = %(batch)s AND others_count > 0 AND errors_before <= %(offset)s
              ORDER BY errors_before DESC
              LIMIT 1)
         ORDER BY errors_before
         LIMIT %(rows)s) AS j
 WHERE j.errors_before + j.others_count > %(offset)s AND j.errors_before < %(offset)s::int8 + %(lines)s
 ORDER BY j.errors_before

-- name: read_keys_written
-- The outcomes that some journal entries speak of and that are still the ones they were written as: what ran again
-- since has another time.
SELECT w.n, o.ordinal, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[], %(stops)b::int4[], %(times)s::timestamptz[])
       WITH ORDINALITY AS w (lane_id, start, stop, written_at, n)
 CROSS JOIN LATERAL (
    SELECT ordinal, coalesce(octet_length(response), 0) AS size
      FROM penstock.outcomes
     WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.stop
       AND finished_at = w.written_at AND (state = 'completed') = %(completed)s
     ORDER BY ordinal
     LIMIT %(rows)s) AS o
 ORDER BY w.n, o.ordinal

-- name: find_lines
-- Per lane of a batch: its cursor, and the ordinals of the lines after one and up to another. Nothing of lanes whose
-- file was deleted: the merged view shows inputs.
SELECT l.id, l.source_id, l.source_lane, l.route, l.endpoint, l.next, l.total,
       penstock.ordinal_after_line(l.source_id, l.source_lane, l.total, %(after_line)s) AS start,
       penstock.ordinal_after_line(l.source_id, l.source_lane, l.total, %(last_line)s) AS stop
  FROM penstock.lanes l
  JOIN penstock.files f ON f.source_id = l.source_id AND f.deleted_at IS NULL
 WHERE l.batch_id = %(batch)s
 ORDER BY l.id

-- name: list_undecided
-- What a batch has in flight and what waits to be run again, by lane.
SELECT lane_id, true AS leased, ordinals::text FROM penstock.leases WHERE batch_id = %(batch)s
UNION ALL
SELECT lane_id, false, ordinals::text FROM penstock.deferrals WHERE batch_id = %(batch)s

-- name: read_merged
-- Inputs of some stretches with what became of them, in line order, of the states asked for ('' is no outcome): so many
-- rows, and no more than a byte budget, but at least one.
SELECT m.n, m.ordinal, m.line, m.custom_id, m.body, m.state, m.status_code, m.request_id, m.error_code,
       m.error_message, m.response, m.attempts, m.finished_at
  FROM (SELECT w.n, t.ordinal, t.line, t.custom_id, t.body, coalesce(o.state::text, '') AS state, o.status_code,
               o.request_id, o.error_code, o.error_message, o.response, o.attempts, o.finished_at,
               sum(octet_length(t.body) + coalesce(octet_length(o.response), 0))
                 OVER (ORDER BY t.line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM unnest(%(lanes)b::int8[], %(sources)b::int8[], %(source_lanes)b::int4[], %(starts)b::int4[],
                      %(stops)b::int4[])
               WITH ORDINALITY AS w (lane_id, source_id, source_lane, start, stop, n)
         CROSS JOIN LATERAL (
            SELECT ordinal, line, custom_id, body
              FROM penstock.templates
             WHERE source_id = w.source_id AND source_lane = w.source_lane
               AND ordinal >= w.start AND ordinal < w.stop
             ORDER BY ordinal
             LIMIT w.stop - w.start) AS t
          LEFT JOIN LATERAL (
            SELECT state, status_code, request_id, error_code, error_message, response, attempts, finished_at
              FROM penstock.outcomes
             WHERE lane_id = w.lane_id AND ordinal = t.ordinal
             LIMIT 1) AS o ON true
         WHERE coalesce(o.state::text, '') = ANY (%(states)s::text[])
         ORDER BY t.line
         LIMIT %(rows)s) AS m
 WHERE coalesce(m.before, 0) < %(bytes)s
 ORDER BY m.line

-- name: read_attempts
-- The failed attempts of some lanes' stretches, in order, from a place on; lines are known while inputs or outcomes are.
SELECT w.n, a.ordinal, a.id, coalesce(o.line, t.line) AS line, coalesce(o.custom_id, t.custom_id) AS custom_id,
       a.attempt, a.worker_id, a.ended_at, a.duration_ms, a.counted, a.status_code, a.error_code, a.error_message,
       a.not_before
  FROM unnest(%(lanes)b::int8[], %(sources)b::int8[], %(source_lanes)b::int4[], %(starts)b::int4[], %(ids)b::int8[],
              %(stops)b::int4[])
       WITH ORDINALITY AS w (lane_id, source_id, source_lane, start, after_id, stop, n)
 CROSS JOIN LATERAL (
    SELECT ordinal, id, attempt, worker_id, ended_at, duration_ms, counted, status_code, error_code, error_message,
           not_before
      FROM penstock.attempts
     WHERE lane_id = w.lane_id AND (ordinal, id) > (w.start, w.after_id) AND ordinal < w.stop
     ORDER BY ordinal, id
     LIMIT %(rows)s) AS a
  LEFT JOIN LATERAL (
    SELECT line, custom_id FROM penstock.outcomes WHERE lane_id = w.lane_id AND ordinal = a.ordinal LIMIT 1) AS o ON true
  LEFT JOIN LATERAL (
    SELECT line, custom_id FROM penstock.templates
     WHERE source_id = w.source_id AND source_lane = w.source_lane AND ordinal = a.ordinal
     LIMIT 1) AS t ON true
 ORDER BY w.n, a.ordinal, a.id
 LIMIT %(rows)s
