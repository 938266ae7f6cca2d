-- name: find_work
-- Finds the next batches and jobs, newest first, of one owner or of all, and whether each has a text in its name, type or
-- id: one walk of an index for each dialect and state, so that the cost is the number that is looked at.
WITH ways AS MATERIALIZED (
  SELECT d.dialect, s.state FROM unnest(%(dialects)s::text[]) AS d (dialect), unnest(%(states)s::text[]) AS s (state)
),
looked AS MATERIALIZED (
  SELECT id FROM (
    SELECT its.id
      FROM ways
     CROSS JOIN LATERAL (
       SELECT id FROM penstock.batches
        WHERE owner = %(owner)s::text AND dialect = ways.dialect AND state = ways.state AND deleted_at IS NULL
          AND id < %(below)s
        ORDER BY id DESC
        LIMIT %(look)s) AS its
     WHERE %(owner)s::text IS NOT NULL
    UNION ALL
    SELECT everybodys.id
      FROM ways
     CROSS JOIN LATERAL (
       SELECT id FROM penstock.batches
        WHERE dialect = ways.dialect AND state = ways.state AND deleted_at IS NULL
          AND uuid_send(id) < uuid_send(%(below)s::uuid)
        ORDER BY uuid_send(id) DESC
        LIMIT %(look)s) AS everybodys
     WHERE %(owner)s::text IS NULL) AS met
   ORDER BY id DESC
   LIMIT %(look)s
)
SELECT k.id,
       %(text)s::text IS NULL OR EXISTS (
         SELECT FROM (SELECT file_id, metadata FROM penstock.batches WHERE id = k.id LIMIT 1) AS b
          WHERE strpos(lower(concat_ws(' ', b.metadata ->> 'name', replace(k.id::text, '-', ''),
                                       (SELECT job_type FROM penstock.jobs WHERE batch_id = k.id LIMIT 1),
                                       (SELECT filename FROM penstock.files WHERE id = b.file_id LIMIT 1))),
                       lower(%(text)s::text)) > 0) AS fits
  FROM looked k
 ORDER BY k.id DESC

-- name: read_work
-- Reads the figures of some batches and jobs in one snapshot: they add up at every read, and are never counted from rows.
-- Rows that wait for another try are summed over their deferrals, as many of these as the bound allows.
SELECT b.id, b.owner, b.dialect, b.state, coalesce(m.pool, b.pool) AS pool, b.metadata ->> 'name' AS name,
       b.metadata ->> 'map' AS map, b.created_at,
       coalesce(b.completed_at, b.cancelled_at, b.expired_at, b.failed_at) AS ended_at, b.total,
       coalesce(l.in_flight, 0)::int4 AS in_flight,
       coalesce(b.completed, p.completed, 0)::int4 AS completed, coalesce(b.failed, p.failed, 0)::int4 AS failed,
       coalesce(b.not_found, p.not_found, 0)::int4 AS not_found, coalesce(b.skipped, p.skipped, 0)::int4 AS skipped,
       coalesce(d.waiting, 0)::int4 AS retrying, coalesce(b.input_tokens, p.input_tokens, 0)::int8 AS input_tokens,
       coalesce(b.output_tokens, p.output_tokens, 0)::int8 AS output_tokens,
       coalesce(b.retried, p.retried, 0)::int4 AS retried, b.reruns,
       j.job_type, j.ingested_at, j.rows, j.problem, f.filename, m.route
  FROM unnest(%(ids)s::uuid[]) AS asked (id)
 CROSS JOIN LATERAL (SELECT * FROM penstock.batches WHERE id = asked.id LIMIT 1) AS b
  LEFT JOIN LATERAL (
    SELECT sum(completed) AS completed, sum(failed) AS failed, sum(not_found) AS not_found, sum(skipped) AS skipped,
           sum(retried) AS retried, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens
      FROM penstock.progress WHERE batch_id = b.id AND b.completed IS NULL) AS p ON true
  LEFT JOIN LATERAL (
    SELECT sum(size) AS in_flight FROM penstock.leases WHERE batch_id = b.id AND b.completed IS NULL) AS l ON true
  LEFT JOIN LATERAL (
    SELECT sum(size) AS waiting
      FROM (SELECT size, reason FROM penstock.deferrals WHERE batch_id = b.id AND b.completed IS NULL
             LIMIT %(deferrals)s) AS waits
     WHERE reason = 'retry') AS d ON true
  LEFT JOIN LATERAL (
    SELECT max(route) AS route, max(pool) AS pool
      FROM (SELECT route, pool FROM penstock.lanes WHERE batch_id = b.id LIMIT 2) AS two
    HAVING count(*) = 1) AS m ON true
  LEFT JOIN LATERAL (
    SELECT job_type, ingested_at, rows, problem FROM penstock.jobs WHERE batch_id = b.id LIMIT 1) AS j ON true
  LEFT JOIN LATERAL (SELECT filename FROM penstock.files WHERE id = b.file_id LIMIT 1) AS f ON true
 WHERE (b.deleted_at IS NULL AND (%(owner)s::text IS NULL OR b.owner = %(owner)s::text)) IS TRUE
 ORDER BY b.id DESC

-- name: is_any_worker_alive
-- Whether a worker of a pool has a heartbeat within the grace. The table has a row per worker.
SELECT EXISTS (
  SELECT FROM penstock.workers
   WHERE pool = %(pool)s AND heartbeat_at > @now - make_interval(secs => %(grace_s)s))

-- name: read_rates
-- Reads how much of some batches was decided in the last minute, and for how long of it they were at work.
SELECT batch_id, sum(completed + failed + not_found + skipped)::int8 AS decided,
       extract(epoch FROM @now - min(at))::float8 AS seconds
  FROM penstock.samples
 WHERE batch_id = ANY (%(ids)s::uuid[]) AND resolution_s = ANY ('{0,1}'::int4[])
   AND at > @now - interval '1 minute'
 GROUP BY batch_id

-- name: read_latency
-- Reads how long a batch's calls took in the minute before its last sample, in buckets.
SELECT ARRAY(
  SELECT sum(c.calls)::int8
    FROM penstock.samples s
   CROSS JOIN LATERAL unnest(s.latency) WITH ORDINALITY AS c (calls, place)
   WHERE s.batch_id = %(id)s AND s.resolution_s = ANY ('{0,1,10,60,600,3600,86400}'::int4[])
     AND s.at > (SELECT max(at) FROM penstock.samples
                  WHERE batch_id = %(id)s AND resolution_s = ANY ('{0,1,10,60,600,3600,86400}'::int4[]))
                - interval '1 minute'
   GROUP BY c.place
   ORDER BY c.place)

-- name: read_limit
-- Reads the limit of a provider's model, and the gate that is closed to it now.
SELECT l.calls, l.floor, l.ceiling, l.per_s, l.reason, l.moved_at, g.not_before, g.halted_at, g.code, g.message
  FROM (SELECT 1) AS one
  LEFT JOIN LATERAL (
    SELECT * FROM penstock.limits WHERE provider = %(provider)s::text AND model = %(route)s::text) AS l ON true
  LEFT JOIN LATERAL (
    SELECT * FROM penstock.gates
     WHERE pool = %(pool)s AND route = %(route)s::text AND (halted_at IS NOT NULL OR not_before > @now)) AS g ON true
