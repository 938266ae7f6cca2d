-- name: list_failures_of
-- Lists the next ordinals of a lane whose outcome has a fingerprint.
SELECT ordinal FROM penstock.outcomes
 WHERE lane_id = %(lane_id)s AND fingerprint = %(fingerprint)s::int8 AND ordinal > %(after)s
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_error_groups
-- Lists the next groups of a batch's errors. Each is a sum of deltas: settles add to it, reruns take away, and of some
-- nothing may be left. What a group looks like is told by the latest delta that has it. Fingerprints are found first, by
-- their index alone, so that other groups are not read, whatever the statistics say.
WITH page AS MATERIALIZED (
  SELECT fingerprint FROM penstock.job_errors
   WHERE batch_id = %(batch)s AND fingerprint > %(after)s::int8
   GROUP BY fingerprint
   ORDER BY fingerprint
   LIMIT %(limit)s
)
SELECT page.fingerprint, e.*
  FROM page
 CROSS JOIN LATERAL (
   SELECT sum(count)::int4 AS count, min(first_at) AS first_at, max(last_at) AS last_at,
          (array_agg(code ORDER BY last_at DESC NULLS LAST, id))[1] AS code,
          (array_agg(status_code ORDER BY last_at DESC NULLS LAST, id))[1] AS status_code,
          (array_agg(line ORDER BY last_at DESC NULLS LAST, id))[1] AS line,
          (array_agg(message ORDER BY last_at DESC NULLS LAST, id))[1] AS message
     FROM penstock.job_errors
    WHERE batch_id = %(batch)s AND fingerprint = page.fingerprint) AS e
 ORDER BY page.fingerprint

-- name: group_failures
-- Groups some outcomes of a lane by their fingerprint, as the settle did that wrote them. Looked up one by one: with
-- ordinal = ANY(...), servers before 17 may walk the whole lane.
SELECT o.fingerprint, count(*)::int4, min(o.finished_at), max(o.finished_at),
       (array_agg(coalesce(o.error_code, o.state::text) ORDER BY o.finished_at DESC, o.line DESC))[1],
       (array_agg(o.status_code ORDER BY o.finished_at DESC, o.line DESC))[1],
       (array_agg(o.line ORDER BY o.finished_at DESC, o.line DESC))[1],
       (array_agg(coalesce(o.error_message, '') ORDER BY o.finished_at DESC, o.line DESC))[1]
  FROM unnest(%(ordinals)b::int4[]) AS w (ordinal)
 CROSS JOIN LATERAL (
   SELECT fingerprint, finished_at, error_code, state, status_code, line, error_message FROM penstock.outcomes
    WHERE lane_id = %(lane_id)s AND ordinal = w.ordinal AND fingerprint IS NOT NULL
    LIMIT 1) AS o
 GROUP BY o.fingerprint

-- name: take_from_groups
-- Takes so many failures out of their groups.
INSERT INTO penstock.job_errors (batch_id, fingerprint, count)
SELECT %(batch)s, g.fingerprint, -g.count
  FROM unnest(%(fingerprints)b::int8[], %(counts)b::int4[]) AS g (fingerprint, count)

-- name: put_into_groups
-- Adds so many failures to their groups, with what is known of them: a fold may have left nothing of a group but this.
INSERT INTO penstock.job_errors (batch_id, fingerprint, count, first_at, last_at, code, status_code, line, message)
SELECT %(batch)s, g.*
  FROM unnest(%(fingerprints)b::int8[], %(counts)b::int4[], %(first_at)s::timestamptz[], %(last_at)s::timestamptz[],
              %(codes)s::text[], %(statuses)b::int4[], %(lines)b::int4[], %(messages)s::text[]) AS g

-- name: fold_error_groups
-- Sums up the groups of some batches that have new deltas, one row each; a group of which nothing is left has none. Deltas
-- that another fold holds are left for the next time. Rows here are never updated, so that their place holds still.
WITH seen AS MATERIALIZED (
  SELECT e.place
    FROM unnest(%(ids)s::uuid[]) AS b (id)
   CROSS JOIN LATERAL (
     SELECT fingerprint FROM penstock.job_errors
      WHERE batch_id = b.id AND NOT folded
      GROUP BY fingerprint
      ORDER BY fingerprint
      LIMIT %(limit)s) AS changed
   CROSS JOIN LATERAL (
     SELECT ctid AS place FROM penstock.job_errors
      WHERE batch_id = b.id AND fingerprint = changed.fingerprint
      ORDER BY id
      LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED) AS e
   LIMIT %(limit)s
),
folded AS (
  DELETE FROM penstock.job_errors WHERE ctid = ANY (ARRAY(SELECT place FROM seen)) RETURNING *
)
INSERT INTO penstock.job_errors
  (batch_id, fingerprint, count, folded, first_at, last_at, code, status_code, line, message)
SELECT batch_id, fingerprint, sum(count), true, min(first_at), max(last_at),
       (array_agg(code ORDER BY last_at DESC NULLS LAST, id))[1],
       (array_agg(status_code ORDER BY last_at DESC NULLS LAST, id))[1],
       (array_agg(line ORDER BY last_at DESC NULLS LAST, id))[1],
       (array_agg(message ORDER BY last_at DESC NULLS LAST, id))[1]
  FROM folded
 GROUP BY batch_id, fingerprint
HAVING sum(count) <> 0
