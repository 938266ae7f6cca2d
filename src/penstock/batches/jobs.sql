-- name: insert_job
-- Makes a batch a job: what is to be done with each row, and who asked for it.
INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, client, created_at, ingested_at, columns, images)
VALUES (%(batch_id)s, %(owner)s, %(job_type)s, %(spec)s::json, %(client)s, @now,
        CASE WHEN %(ingested)s::boolean THEN @now END, %(columns)s::text[], %(images)s)

-- name: read_jobs
-- Reads what some batches have as jobs: also when a worker that holds some of their rows was last heard of, and their
-- latest error of which rows are left. Batches that are none are left out. Everything is looked up by its key: as joins,
-- the tables may be read whole.
SELECT j.batch_id, j.owner, j.job_type, j.spec, j.client, j.created_at, j.ingested_at, j.columns, j.rows,
       j.problem, j.images, b.growing, f.filename, coalesce(f.bytes, 0),
       (SELECT max(w.heartbeat_at)
          FROM (SELECT DISTINCT worker_id FROM penstock.leases WHERE batch_id = j.batch_id) AS h
         CROSS JOIN LATERAL (SELECT heartbeat_at FROM penstock.workers WHERE id = h.worker_id LIMIT 1) AS w)
         AS last_heartbeat,
       (SELECT latest.message
          FROM (SELECT fingerprint, message, last_at FROM penstock.job_errors
                 WHERE batch_id = j.batch_id AND last_at IS NOT NULL
                 ORDER BY last_at DESC
                 LIMIT 10) AS latest
         WHERE (SELECT sum(count) FROM penstock.job_errors
                 WHERE batch_id = j.batch_id AND fingerprint = latest.fingerprint) > 0
         ORDER BY latest.last_at DESC
         LIMIT 1) AS last_error
  FROM unnest(%(batches)s::uuid[]) AS asked (id)
 CROSS JOIN LATERAL (SELECT * FROM penstock.jobs WHERE batch_id = asked.id LIMIT 1) AS j
 CROSS JOIN LATERAL (SELECT file_id, growing FROM penstock.batches WHERE id = asked.id LIMIT 1) AS b
  LEFT JOIN LATERAL (SELECT filename, bytes FROM penstock.files WHERE id = b.file_id LIMIT 1) AS f ON true

-- name: create_job
-- Creates a job over an upload that is sealed in the same transaction: a batch that grows as its rows are read. The
-- audit trail begins with it, and keeps nothing that the job was asked.
WITH batch AS (
  INSERT INTO penstock.batches
    (id, owner, dialect, file_id, pool, idempotency_key, fingerprint, priority, total, created_at, validated_at, growing)
  VALUES (%(batch_id)s, %(owner)s, 'job', %(file_id)s, %(pool)s, %(key)s, %(fingerprint)s, %(priority)s, 0, @now, @now,
          true)
),
audited AS (
  INSERT INTO penstock.audit (at, owner, actor, client, action, object_id, details)
  VALUES (@now, %(owner)s, %(actor)s, %(client)s, 'create', %(batch_id)s,
          jsonb_build_object('jobType', %(job_type)s::text))
)
INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, parts, client, created_at)
VALUES (%(batch_id)s, %(owner)s, %(job_type)s, %(spec)s::json, %(parts)s::jsonb, %(client)s, @now)

-- name: take_ingest_if_free
-- Takes the ingest of the oldest job whose rows are to be read and whose reader, if it had one, is dead or is this process
-- and was broken off by an error: that one is taken up again after the others. The reader's id and the rows that it knows
-- of are the fence: every block is stored under both.
UPDATE penstock.jobs SET worker_id = %(worker_id)s
 WHERE batch_id = (
   SELECT j.batch_id FROM penstock.jobs j
    WHERE j.ingested_at IS NULL
      AND j.batch_id <> ALL (%(reading)s::uuid[])
      AND j.owner <> ALL (%(full_owners)s::text[])
      AND (j.worker_id IS NULL OR j.worker_id = %(worker_id)s OR NOT EXISTS (
             SELECT FROM penstock.workers w
              WHERE w.id = j.worker_id AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s)))
    ORDER BY j.worker_id IS NOT DISTINCT FROM %(worker_id)s, j.batch_id
    LIMIT 1
      FOR UPDATE SKIP LOCKED)
RETURNING batch_id

-- name: read_ingest
-- Reads where a job's bytes are, and how many of its rows are stored.
SELECT j.owner, f.source_id, f.filename, b.pool, j.spec, j.parts, j.rows, j.columns
  FROM penstock.jobs j
  JOIN penstock.batches b ON b.id = j.batch_id
  JOIN penstock.files f ON f.id = b.file_id AND f.deleted_at IS NULL
 WHERE j.batch_id = %(batch_id)s

-- name: read_size
-- Reads how many bytes an upload has. The file's own figure is that of all its inputs, and grows with them.
SELECT coalesce(sum(size), 0)::int8 FROM penstock.file_chunks WHERE source_id = %(source_id)s

-- name: count_rows_if_reading
-- Counts rows that this transaction stores, unless another reads the job now. With the first of them it is known
-- whether they stand for images. Columns that only rows have which processors added stay behind the input's.
UPDATE penstock.jobs j
   SET rows = rows + %(rows)s, images = %(images)s,
       columns = %(columns)s::text[] || ARRAY(
         SELECT c.name FROM unnest(j.columns) WITH ORDINALITY AS c (name, n)
          WHERE c.name <> ALL (%(columns)s::text[]) ORDER BY c.n)
 WHERE batch_id = %(batch_id)s AND worker_id = %(worker_id)s AND rows = %(before)s AND ingested_at IS NULL
RETURNING rows

-- name: end_ingest_if_reading
-- Ends the ingest: all rows are stored, or none that follows can be. One that is broken off because its batch has ended
-- goes on if that is open again: the batch is locked by this transaction.
UPDATE penstock.jobs j
   SET ingested_at = @now, worker_id = NULL, problem = %(problem)s,
       columns = %(columns)s::text[] || ARRAY(
         SELECT c.name FROM unnest(j.columns) WITH ORDINALITY AS c (name, n)
          WHERE c.name <> ALL (%(columns)s::text[]) ORDER BY c.n)
 WHERE batch_id = %(batch_id)s AND worker_id = %(worker_id)s AND rows = %(rows)s AND ingested_at IS NULL
   AND NOT (%(broken_off)s::boolean AND EXISTS (
     SELECT FROM penstock.batches
      WHERE id = %(batch_id)s
        AND (growing AND state IN ('in_progress', 'paused') AND deleted_at IS NULL AND deadline > @now) IS TRUE))
RETURNING batch_id

-- name: find_job_by_key
-- Finds the job that was made under an idempotency key.
SELECT id, fingerprint FROM penstock.batches
 WHERE owner = %(owner)s AND idempotency_key = %(key)s AND (dialect = 'job' AND deleted_at IS NULL) IS TRUE
