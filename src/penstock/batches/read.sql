-- name: read_batch
-- Reads a batch's figures in one snapshot: they add up at every read. Ended batches have frozen figures.
SELECT b.id, b.owner, b.dialect, b.state, b.pool, b.target, b.file_id, b.endpoint, m.model, b.completion_window,
       b.window_s, b.metadata, b.priority, nullif(b.deadline, 'infinity') AS deadline, b.created_at, b.validated_at,
       b.paused_at, b.cancelling_at, b.completed_at, b.cancelled_at, b.expired_at, b.failed_at, b.problems,
       b.fingerprint, b.reruns, b.output_file_id, b.error_file_id, b.total,
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
-- Reads how many lines of a batch were decided each second: by its last hundred settles, or in the last minute. Read
-- after the figures, which need not add up with it.
SELECT sum(done) FILTER (WHERE written_at > began) / nullif(extract(epoch FROM at - min(began)), 0) AS per_s
  FROM (SELECT done, written_at, at,
               CASE WHEN count(*) OVER () = 100 THEN greatest(min(written_at) OVER (), at - interval '1 minute')
                    ELSE greatest(%(validated_at)s::timestamptz, at - interval '1 minute') END AS began
          FROM (SELECT completed_count + others_count AS done, written_at, @now AS at
                  FROM penstock.journal
                 WHERE batch_id = %(id)s
                 ORDER BY id DESC
                 LIMIT 100) AS latest) AS lately
 GROUP BY at

-- name: list_batches
-- Reads a page of an owner's batches with their figures, in one snapshot: newest first, or, going back, those just after
-- a place, newest first as well. By state, one walk of the index for each, so that the cost is the page's size. By
-- metadata, all batches that have it are found first: the cost is their number.
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
       b.fingerprint, b.reruns, b.output_file_id, b.error_file_id, b.total,
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
-- Finds the batch whose output or error file has this id: while it is running, or as long as the file is there.
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
                      AND (f.expires_at IS NULL OR f.expires_at > @now)))
