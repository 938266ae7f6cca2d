-- name: read_samples
-- Reads a batch's figures by interval, summed over workers. Samples that were summed up coarser than is asked for stay as
-- coarse as they are. An interval in which nothing happened has no row. Limits and calls in flight are summed over the
-- workers of a second; of several seconds, the highest counts. Buckets of latencies are summed one by one: sum_counts is a
-- function in SQL, and 900 samples took 20 ms by it. Of a single row, as most are inside, it costs nothing.
SELECT at, width_s, sum(completed)::int8, sum(failed)::int8, sum(not_found)::int8, sum(skipped)::int8,
       sum(retried)::int8, sum(refused)::int8, sum(input_tokens)::int8, sum(output_tokens)::int8,
       array_remove(ARRAY[
         sum(latency[1]), sum(latency[2]), sum(latency[3]), sum(latency[4]), sum(latency[5]), sum(latency[6]),
         sum(latency[7]), sum(latency[8]), sum(latency[9]), sum(latency[10]), sum(latency[11]), sum(latency[12]),
         sum(latency[13]), sum(latency[14]), sum(latency[15]), sum(latency[16]), sum(latency[17]), sum(latency[18]),
         sum(latency[19]), sum(latency[20]), sum(latency[21]), sum(latency[22]), sum(latency[23]), sum(latency[24])
       ], NULL)::int8[],
       max(limit_now)::int8, max(in_flight)::int8,
       at + make_interval(secs => width_s) <= @now - make_interval(secs => %(late_s)s) AS complete
  FROM (SELECT date_bin(make_interval(secs => width_s), moment, 'epoch') AS at, s.*
          FROM (SELECT at AS moment, greatest(resolution_s, %(resolution_s)s::int4) AS width_s,
                       sum(completed) AS completed, sum(failed) AS failed, sum(not_found) AS not_found,
                       sum(skipped) AS skipped, sum(retried) AS retried, sum(refused) AS refused,
                       sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
                       penstock.sum_counts(latency) AS latency,
                       sum(limit_now) AS limit_now, sum(in_flight) AS in_flight
                  FROM penstock.samples
                 WHERE batch_id = %(batch_id)s AND resolution_s = ANY (%(resolutions)s::int4[])
                   AND at >= %(from)s AND at < %(to)s
                 GROUP BY at, resolution_s) AS s) AS each
 GROUP BY at, width_s
 ORDER BY at, width_s

-- name: find_span
-- Finds the first and the last sample of a batch.
SELECT min(at), max(at)
  FROM penstock.samples WHERE batch_id = %(batch_id)s AND resolution_s = ANY (%(resolutions)s::int4[])

-- name: list_to_roll_up
-- Lists the batches of the oldest samples of a resolution that are older than so many seconds, with the time now.
SELECT batch_id, @now
  FROM penstock.samples
 WHERE resolution_s = %(fine_s)s AND resolution_s <= 10 AND at < @now - make_interval(secs => %(kept_s)s)
 ORDER BY resolution_s, at
 LIMIT %(limit)s

-- name: roll_up_samples
-- Sums the oldest samples of a batch up, a stretch of them, into coarser ones; returns how many those are. Two that do so
-- at once each find their own: a row is deleted once. Samples that come later make a row of their own.
WITH oldest AS MATERIALIZED (
  SELECT date_bin(make_interval(secs => %(coarse_s)s), at, 'epoch') AS at FROM penstock.samples
   WHERE batch_id = %(batch_id)s AND resolution_s = %(fine_s)s AND at < %(before)s
   ORDER BY at
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.samples
   WHERE batch_id = %(batch_id)s AND resolution_s = %(fine_s)s AND at < %(before)s
     AND at < (SELECT at FROM oldest) + make_interval(secs => %(stretch_s)s)
  RETURNING *
)
INSERT INTO penstock.samples
  (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused, input_tokens, output_tokens,
   latency, limit_now, in_flight)
SELECT batch_id, %(coarse_s)s, date_bin(make_interval(secs => %(coarse_s)s), at, 'epoch'),
       sum(completed), sum(failed), sum(not_found), sum(skipped), sum(retried), sum(refused), sum(input_tokens),
       sum(output_tokens), penstock.sum_counts(latency),
       CASE WHEN %(fine_s)s = 0 THEN sum(limit_now) ELSE max(limit_now) END,
       CASE WHEN %(fine_s)s = 0 THEN sum(in_flight) ELSE max(in_flight) END
  FROM gone
 GROUP BY 1, 3
