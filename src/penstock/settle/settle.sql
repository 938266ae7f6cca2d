-- name: settle_if_leased
-- Records what became of leased ordinals, in one statement: outcomes, deferrals, history, counters, the lease.
-- Only ordinals that a lease of this worker still holds are written; the others were fenced and change nothing.
-- Counters come from the rows written: an outcome that exists already would fail the statement. Leases are locked in
-- id order, so two settles cannot deadlock.
-- Rows are addressed by id = ANY(...), which stays an index probe however many dead versions surround them, and what
-- belongs to them is found in arrays sorted by id (width_bucket halves its way there). Joins in its place depend on
-- estimates: for a thousand sessions they became loops within loops.
WITH held AS MATERIALIZED (
  SELECT id, lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims,
         ordinals - (%(gone)s::int4multirange[])[width_bucket(id, %(leases)b::int8[])] AS remaining
    FROM penstock.leases
   WHERE id = ANY (%(leases)b::int8[]) AND worker_id = %(worker)b::uuid
   ORDER BY id
     FOR UPDATE
),
final AS MATERIALIZED (
  SELECT h.lane_id, h.batch_id, h.limited, h.attempt AS attempts, f.*
    FROM unnest(%(f_lease)b::int8[], %(f_ordinal)b::int4[], %(f_line)b::int4[], %(f_state)b::text[],
                %(f_status)b::int4[], %(f_custom_id)b::text[], %(f_request_id)b::text[], %(f_error_code)b::text[],
                %(f_error_message)b::text[], %(f_duration_ms)b::int4[], %(f_response)b::bytea[])
         AS f (lease_id, ordinal, line, state, status_code, custom_id, request_id, error_code, error_message,
               duration_ms, response)
    JOIN held h ON h.id = f.lease_id AND h.ordinals @> f.ordinal
),
again AS MATERIALIZED (
  SELECT h.lane_id, h.batch_id, h.pool, h.route, h.limited, h.attempt, h.reclaims, a.*,
         coalesce(%(now)s::timestamptz, now()) + make_interval(secs => a.delay_s) AS due_at
    FROM unnest(%(a_lease)b::int8[], %(a_ordinal)b::int4[], %(a_status)b::int4[], %(a_code)b::text[],
                %(a_message)b::text[], %(a_delay_s)b::float8[], %(a_counted)b::bool[], %(a_duration_ms)b::int4[])
         AS a (lease_id, ordinal, status_code, code, message, delay_s, counted, duration_ms)
    JOIN held h ON h.id = a.lease_id AND h.ordinals @> a.ordinal
),
back AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.pool, h.route, h.limited, h.attempt, h.reclaims,
         h.ordinals * b.ordinals AS ordinals
    FROM unnest(%(b_lease)b::int8[], %(b_ordinals)s::int4multirange[]) AS b (lease_id, ordinals)
    JOIN held h ON h.id = b.lease_id AND h.ordinals && b.ordinals
),
written AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, line, state, status_code, attempts, lease_id, finished_at, custom_id, request_id,
     error_code, error_message, response)
  SELECT lane_id, ordinal, line, state::penstock.outcome_state, status_code, attempts, lease_id,
         coalesce(%(now)s::timestamptz, now()), custom_id, request_id, error_code, error_message, response
    FROM final
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims, reason, due_at)
  SELECT lane_id, batch_id, pool, route, limited, int4multirange(int4range(ordinal, ordinal + 1)),
         attempt + counted::int4, reclaims, 'retry', due_at
    FROM again
  UNION ALL
  SELECT lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims, 'given_back',
         coalesce(%(now)s::timestamptz, now())
    FROM back
),
noted AS (
  INSERT INTO penstock.attempts
    (lane_id, ordinal, attempt, lease_id, worker_id, ended_at, duration_ms, counted, status_code, error_code,
     error_message, not_before)
  SELECT lane_id, ordinal, attempt, lease_id, %(worker)b::uuid, coalesce(%(now)s::timestamptz, now()), duration_ms,
         counted, status_code, code, message, due_at
    FROM again
  UNION ALL
  SELECT lane_id, ordinal, attempts, lease_id, %(worker)b::uuid, coalesce(%(now)s::timestamptz, now()), duration_ms,
         true, status_code, coalesce(error_code, state), coalesce(error_message, ''), NULL
    FROM final
   WHERE state <> 'completed'
),
shrunk AS (
  UPDATE penstock.leases
     SET ordinals = ordinals - (%(gone)s::int4multirange[])[width_bucket(id, %(leases)b::int8[])],
         progressed_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = ANY (ARRAY(SELECT id FROM held WHERE NOT isempty(remaining)))
),
ended AS (
  DELETE FROM penstock.leases
   WHERE id = ANY (ARRAY(SELECT id FROM held WHERE isempty(remaining)))
),
room AS MATERIALIZED (
  SELECT array_agg(lane_id ORDER BY lane_id) AS lanes, array_agg(count ORDER BY lane_id) AS counts
    FROM (SELECT lane_id, count(*)::int4 FROM final WHERE limited GROUP BY lane_id) AS n
),
-- In id order, as whoever pauses or cancels takes them.
roomy AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE id = ANY (ARRAY(SELECT lane_id FROM final WHERE limited))
   ORDER BY id
     FOR UPDATE
),
freed AS (
  UPDATE penstock.lanes
     SET busy = busy - (SELECT counts FROM room)[width_bucket(id, (SELECT lanes FROM room))]
   WHERE id = ANY (ARRAY(SELECT id FROM roomy))
),
counted AS (
  INSERT INTO penstock.progress (batch_id, completed, failed, not_found, skipped, retried)
  SELECT batch_id,
         count(*) FILTER (WHERE what = 'completed'), count(*) FILTER (WHERE what = 'failed'),
         count(*) FILTER (WHERE what = 'not_found'), count(*) FILTER (WHERE what = 'skipped'),
         count(*) FILTER (WHERE what = 'retry')
    FROM (SELECT batch_id, state AS what FROM final
          UNION ALL
          SELECT batch_id, 'retry' FROM again) AS moved
   GROUP BY batch_id
)
SELECT (SELECT count(*) FROM final)::int4 AS outcomes,
       (SELECT count(*) FROM again)::int4 AS retries,
       (SELECT coalesce(sum(penstock.ordinal_count(ordinals)), 0) FROM back)::int4 AS given_back

-- name: count_applied
-- How many of some items were recorded under the very lease they carry: tells a settle that was applied, although its
-- answer was lost, from one that was fenced.
SELECT count(*)
  FROM unnest(%(leases)b::int8[], %(lanes)b::int8[], %(ordinals)b::int4[]) AS mine (lease_id, lane_id, ordinal)
 WHERE EXISTS (SELECT FROM penstock.outcomes o
                WHERE o.lane_id = mine.lane_id AND o.ordinal = mine.ordinal AND o.lease_id = mine.lease_id)
    OR EXISTS (SELECT FROM penstock.attempts a
                WHERE a.lane_id = mine.lane_id AND a.ordinal = mine.ordinal AND a.lease_id = mine.lease_id)
