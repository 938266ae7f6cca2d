-- name: list_spans
-- Lists the next spans of pending rows, by the time of the last change, kind and id: rows that were never claimed (kind
-- 0, what is left of a lane, since that was made), rows that wait for another try (1, a deferral, since it was put off)
-- and rows in flight (2, a lease, since it was claimed). A span is one row of a table, however many rows of a job it
-- holds; only those that the page needs are cut out of it, and the rest of the spans has no ordinals. `look` spans are
-- looked at: some may be of other batches, of jobs that have ended, or of another type, and have no ordinals either.
WITH met AS MATERIALIZED (
  (SELECT created_at AS at, 0 AS kind, id FROM penstock.lanes
    WHERE %(scope)s::text = 'all' AND %(waiting)s::boolean AND pending
      AND (created_at, id) >= (%(lanes_at)s::timestamptz, %(lanes_id)s::int8) AND created_at < %(until)s::timestamptz
    ORDER BY created_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT deferred_at, 1, id FROM penstock.deferrals
    WHERE %(scope)s::text = 'all' AND %(waiting)s::boolean AND NOT session
      AND (deferred_at, id) >= (%(deferrals_at)s::timestamptz, %(deferrals_id)s::int8)
      AND deferred_at < %(until)s::timestamptz
    ORDER BY deferred_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT claimed_at, 2, id FROM penstock.leases
    WHERE %(scope)s::text = 'all' AND %(in_flight)s::boolean AND NOT session
      AND (claimed_at, id) >= (%(leases_at)s::timestamptz, %(leases_id)s::int8) AND claimed_at < %(until)s::timestamptz
    ORDER BY claimed_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT created_at AS at, 0 AS kind, id FROM penstock.lanes
    WHERE %(scope)s::text = 'owner' AND %(waiting)s::boolean AND owner = %(owner)s AND pending
      AND (created_at, id) >= (%(lanes_at)s::timestamptz, %(lanes_id)s::int8) AND created_at < %(until)s::timestamptz
    ORDER BY created_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT deferred_at, 1, id FROM penstock.deferrals
    WHERE %(scope)s::text = 'owner' AND %(waiting)s::boolean AND owner = %(owner)s AND NOT session
      AND (deferred_at, id) >= (%(deferrals_at)s::timestamptz, %(deferrals_id)s::int8)
      AND deferred_at < %(until)s::timestamptz
    ORDER BY deferred_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT claimed_at, 2, id FROM penstock.leases
    WHERE %(scope)s::text = 'owner' AND %(in_flight)s::boolean AND owner = %(owner)s AND NOT session
      AND (claimed_at, id) >= (%(leases_at)s::timestamptz, %(leases_id)s::int8) AND claimed_at < %(until)s::timestamptz
    ORDER BY claimed_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT created_at AS at, 0 AS kind, id FROM penstock.lanes
    WHERE %(scope)s::text = 'batch' AND %(waiting)s::boolean AND batch_id = %(batch)s AND NOT session AND next < total
      AND (created_at, id) >= (%(lanes_at)s::timestamptz, %(lanes_id)s::int8) AND created_at < %(until)s::timestamptz
    ORDER BY created_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT deferred_at, 1, id FROM penstock.deferrals
    WHERE %(scope)s::text = 'batch' AND %(waiting)s::boolean AND batch_id = %(batch)s AND NOT session
      AND (deferred_at, id) >= (%(deferrals_at)s::timestamptz, %(deferrals_id)s::int8)
      AND deferred_at < %(until)s::timestamptz
    ORDER BY deferred_at, id LIMIT %(look)s)
  UNION ALL
  (SELECT claimed_at, 2, id FROM penstock.leases
    WHERE %(scope)s::text = 'batch' AND %(in_flight)s::boolean AND batch_id = %(batch)s AND NOT session
      AND (claimed_at, id) >= (%(leases_at)s::timestamptz, %(leases_id)s::int8) AND claimed_at < %(until)s::timestamptz
    ORDER BY claimed_at, id LIMIT %(look)s)
),
looked AS MATERIALIZED (
  SELECT at, kind, id FROM met ORDER BY at, kind, id LIMIT %(look)s
),
span AS MATERIALIZED (
  SELECT k.at, k.kind, k.id, s.*, l.source_id, l.source_lane, j.job_type,
         (k.kind = %(kind)s::int4 AND k.id = %(id)s::int8) AS resumed,
         ((j.job_type IS NOT NULL OR %(scope)s::text = 'batch') AND l.source_id IS NOT NULL
          AND (%(job_type)s::text IS NULL OR j.job_type = %(job_type)s::text)
          AND (k.kind = 2 OR NOT l.ended OR %(scope)s::text = 'batch')) AS shown
    FROM looked k
   CROSS JOIN LATERAL (
     SELECT id AS lane_id, batch_id, owner, NULL::uuid AS worker_id, 0 AS attempts, false AS rerun,
            int4multirange(int4range(next, total)) AS ordinals, total - next AS size
       FROM penstock.lanes WHERE k.kind = 0 AND id = k.id
     UNION ALL
     SELECT lane_id, batch_id, owner, NULL, attempt + spent - 1, generation > 0, ordinals, size
       FROM penstock.deferrals WHERE k.kind = 1 AND id = k.id
     UNION ALL
     SELECT lane_id, batch_id, owner, worker_id, attempt + spent, generation > 0, ordinals, size
       FROM penstock.leases WHERE k.kind = 2 AND id = k.id) AS s
    LEFT JOIN LATERAL (
      SELECT source_id, source_lane, ended FROM penstock.lanes WHERE id = s.lane_id LIMIT 1) AS l ON true
    LEFT JOIN LATERAL (SELECT job_type FROM penstock.jobs WHERE batch_id = s.batch_id LIMIT 1) AS j ON true
),
-- How many rows the spans before have. Of the one where the page before ended, an unknown part is left.
ranked AS (
  SELECT *, coalesce(sum(CASE WHEN shown AND NOT resumed THEN size ELSE 0 END)
                     OVER (ORDER BY at, kind, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before,
         CASE WHEN resumed THEN ordinals * int4multirange(int4range(%(ordinal)s::int4, NULL, '()')) ELSE ordinals END
           AS part
    FROM span
)
SELECT at, kind, id, batch_id, owner, coalesce(job_type, ''), source_id, source_lane, worker_id, attempts, rerun,
       CASE WHEN shown AND before < %(want)s
            THEN CASE WHEN size <= %(want)s THEN part
                      WHEN kind = 0 THEN part * int4multirange(int4range(lower(part), lower(part) + %(want)s::int4))
                      ELSE penstock.first_ordinals(part, %(want)s::int4) END::text END AS ordinals
  FROM ranked
 ORDER BY at, kind, id

-- name: read_summaries
-- Reads the summaries of some stretches of stored rows.
SELECT t.source_id, t.source_lane, t.ordinal, t.line, t.summary
  FROM unnest(%(sources)b::int8[], %(lanes)b::int4[], %(starts)b::int4[], %(stops)b::int4[])
       AS w (source_id, source_lane, start, stop)
 CROSS JOIN LATERAL (
   SELECT source_id, source_lane, ordinal, min(line) AS line, min(summary) AS summary FROM penstock.templates
    WHERE source_id = w.source_id AND source_lane = w.source_lane AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY source_id, source_lane, ordinal) AS t

-- name: measure_inputs
-- Measures the inputs of some stretches of a job's lane. Lengths are known without the bytes.
SELECT t.ordinal, t.size
  FROM unnest(%(starts)b::int4[], %(stops)b::int4[]) AS w (start, stop)
 CROSS JOIN LATERAL (
   SELECT ordinal, octet_length(body) AS size FROM penstock.templates
    WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY source_id, source_lane, ordinal) AS t

-- name: measure_results
-- Measures the results of the same rows.
SELECT o.ordinal, coalesce(o.size, 0)
  FROM unnest(%(starts)b::int4[], %(stops)b::int4[]) AS w (start, stop)
 CROSS JOIN LATERAL (
   SELECT ordinal, octet_length(response) AS size FROM penstock.outcomes
    WHERE lane_id = %(lane_id)s AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY lane_id, ordinal) AS o
