-- name: hold_strays
-- Holds deferrals that were written while their batch was being paused or cancelled, and releases those that were held
-- while it was being resumed. This statement may itself hold some wrongly, by a snapshot older than a resume: the next
-- round releases them. Locked deferrals are left for the next round.
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
-- Lists the next batches that were started and have not ended, for the maintenance round.
SELECT id FROM penstock.batches
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
   AND id > %(after)s AND deleted_at IS NULL AND state <> 'validating'
 ORDER BY id
 LIMIT %(limit)s

-- name: list_changed
-- Lists batches with deltas that no fold has seen: one probe for each.
WITH RECURSIVE changed AS (
  SELECT '00000000-0000-0000-0000-000000000000'::uuid AS batch_id
  UNION ALL
  SELECT (SELECT p.batch_id FROM penstock.progress p
           WHERE NOT p.folded AND p.batch_id > c.batch_id ORDER BY p.batch_id LIMIT 1)
    FROM changed c WHERE c.batch_id IS NOT NULL
)
SELECT batch_id FROM changed WHERE batch_id IS NOT NULL OFFSET 1 LIMIT %(limit)s

-- name: list_closing
-- Lists batches that are to end although inputs are left: past their deadline, or being cancelled. The earliest first.
SELECT id FROM penstock.batches
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
   AND (cancelling_at IS NOT NULL OR deadline < 'infinity')
   AND CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END <= @now
   AND deleted_at IS NULL AND state <> 'validating'
 ORDER BY CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
 LIMIT %(limit)s

-- name: list_steered
-- Lists batches that were paused, resumed, cancelled or reopened within the last seconds, or, by a clock since set back,
-- later. IS TRUE, and the order: else the planner may walk other indexes past all batches that were not.
SELECT id FROM penstock.batches
 WHERE steered_at > @now - make_interval(secs => %(within_s)s) AND (deleted_at IS NULL) IS TRUE
 ORDER BY steered_at
 LIMIT %(limit)s

-- name: line_up_lanes
-- Gives lanes a place in line that were created, or made runnable, by code from before there were places.
UPDATE penstock.lanes
   SET tag = CASE WHEN session THEN extract(epoch FROM @now)
                  ELSE penstock.line_end(pool, route, band, owner, nearness) + step END
 WHERE id = ANY (ARRAY(
   SELECT id FROM penstock.lanes
    WHERE tag IS NULL AND runnable AND id > 0
    ORDER BY id
    LIMIT %(limit)s
      FOR UPDATE SKIP LOCKED))

-- name: weigh_near
-- Raises the weight of batches as their deadline comes nearer. A lane's remaining wait shrinks as its share grows.
WITH near AS MATERIALIZED (
  SELECT l.id, penstock.nearness(l.deadline, @now) AS nearness
    FROM (SELECT id FROM penstock.batches
           WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND failed_at IS NULL
             AND (cancelling_at IS NOT NULL OR deadline < 'infinity')
             AND CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
                 BETWEEN @now
                     AND @now + interval '1 hour'
           ORDER BY CASE WHEN cancelling_at IS NULL THEN deadline ELSE cancelling_at END
           LIMIT %(limit)s) AS b
   CROSS JOIN LATERAL (
     SELECT id, deadline, nearness, runnable FROM penstock.lanes WHERE batch_id = b.id OFFSET 0) AS l
   WHERE l.runnable AND l.nearness <> penstock.nearness(l.deadline, @now)
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
