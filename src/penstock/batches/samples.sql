-- name: read_samples
-- Reads a batch's samples in order of time, each with the interval of the chart that it belongs to. Samples that were
-- summed up coarser than is asked for stay as coarse as they are. They are summed by the caller: 24 buckets of 900 samples
-- took 5 ms here, and half a millisecond are read.
SELECT date_bin(make_interval(secs => width_s), at, 'epoch') AS start, width_s,
       date_bin(make_interval(secs => width_s), at, 'epoch') + make_interval(secs => width_s)
         <= @now - make_interval(secs => %(late_s)s),
       at, completed, failed, not_found, skipped, retried, refused, input_tokens, output_tokens, latency, limit_now, in_flight
  FROM (SELECT *, greatest(resolution_s, %(resolution_s)s::int4) AS width_s
          FROM penstock.samples
         WHERE batch_id = %(batch_id)s AND resolution_s = ANY (%(resolutions)s::int4[])
           AND at >= %(from)s AND at < %(to)s) AS samples
 ORDER BY start, width_s, at

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
