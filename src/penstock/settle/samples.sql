-- name: append_samples_if_there
-- Appends a process's samples of some batches, all in one statement, unless the batch was deleted. Nothing is updated, so
-- no two workers wait for each other. A batch whose erasure ends this very moment may be left with some: a walk finds them.
INSERT INTO penstock.samples
  (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused, input_tokens, output_tokens,
   latency, limit_now, in_flight)
SELECT b.id, 0, to_timestamp(s.second), s.completed, s.failed, s.not_found, s.skipped, s.retried, s.refused,
       s.input_tokens, s.output_tokens, (%(latency)b::int8[])[(s.n - 1) * %(buckets)s + 1 : s.n * %(buckets)s],
       s.limit_now, s.in_flight
  FROM unnest(%(batches)s::uuid[], %(seconds)b::int8[], %(completed)b::int4[], %(failed)b::int4[],
              %(not_found)b::int4[], %(skipped)b::int4[], %(retried)b::int4[], %(refused)b::int4[],
              %(input_tokens)b::int8[], %(output_tokens)b::int8[], %(limit_now)b::int4[], %(in_flight)b::int4[])
       WITH ORDINALITY
       AS s (batch_id, second, completed, failed, not_found, skipped, retried, refused, input_tokens, output_tokens,
             limit_now, in_flight, n)
 CROSS JOIN LATERAL (
   SELECT id FROM penstock.batches WHERE id = s.batch_id AND (deleted_at IS NULL) IS TRUE LIMIT 1) AS b
