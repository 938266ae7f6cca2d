-- name: insert_job
-- Makes a batch a job: what is to be done with each row, and who asked for it.
INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, parts, client, created_at, ingested_at, columns)
VALUES (%(batch_id)s, %(owner)s, %(job_type)s, %(spec)s::jsonb, %(parts)s::jsonb, %(client)s, @now,
        CASE WHEN %(ingested)s::boolean THEN @now END, %(columns)s::text[])

-- name: read_jobs
-- Reads what some batches have as jobs. Batches that are none are left out.
SELECT j.batch_id, j.owner, j.job_type, j.spec, j.parts, j.client, j.created_at, j.ingested_at, j.columns, j.rows,
       j.problem, f.filename
  FROM penstock.jobs j
  JOIN penstock.batches b ON b.id = j.batch_id
  LEFT JOIN penstock.files f ON f.id = b.file_id
 WHERE j.batch_id = ANY (%(batches)s::uuid[])

-- name: create_job
-- Creates a job over an upload that is sealed in the same transaction: a batch that grows as its rows are read.
WITH batch AS (
  INSERT INTO penstock.batches
    (id, owner, dialect, file_id, pool, idempotency_key, fingerprint, priority, total, created_at, validated_at, growing)
  VALUES (%(batch_id)s, %(owner)s, 'job', %(file_id)s, %(pool)s, %(key)s, %(fingerprint)s, %(priority)s, 0, @now, @now,
          true)
)
INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, parts, client, created_at)
VALUES (%(batch_id)s, %(owner)s, %(job_type)s, %(spec)s::jsonb, %(parts)s::jsonb, %(client)s, @now)

-- name: take_ingest_if_free
-- Takes the ingest of the oldest job whose rows are to be read and whose reader, if it had one, is dead. The reader's id
-- is the fence: every block of rows is stored under it.
UPDATE penstock.jobs SET worker_id = %(worker_id)s
 WHERE batch_id = (
   SELECT j.batch_id FROM penstock.jobs j
    WHERE j.ingested_at IS NULL
      AND (j.worker_id IS NULL OR NOT EXISTS (
             SELECT FROM penstock.workers w
              WHERE w.id = j.worker_id AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s)))
    ORDER BY j.batch_id
    LIMIT 1
      FOR UPDATE SKIP LOCKED)
RETURNING batch_id

-- name: read_ingest
-- Reads where a job's bytes are, and how many of its rows are stored.
SELECT f.source_id, f.filename, f.bytes, b.pool, j.spec, j.parts, j.rows, j.columns
  FROM penstock.jobs j
  JOIN penstock.batches b ON b.id = j.batch_id
  JOIN penstock.files f ON f.id = b.file_id AND f.deleted_at IS NULL
 WHERE j.batch_id = %(batch_id)s

-- name: count_rows_if_reading
-- Counts rows that this transaction stores, unless another process reads the job now. Columns that only rows have which
-- processors added stay behind the input's.
UPDATE penstock.jobs j
   SET rows = rows + %(rows)s,
       columns = %(columns)s::text[] || ARRAY(
         SELECT c.name FROM unnest(j.columns) WITH ORDINALITY AS c (name, n)
          WHERE c.name <> ALL (%(columns)s::text[]) ORDER BY c.n)
 WHERE batch_id = %(batch_id)s AND worker_id = %(worker_id)s AND ingested_at IS NULL
RETURNING rows

-- name: end_ingest_if_reading
-- Ends the ingest: all rows are stored, or none that follows can be.
UPDATE penstock.jobs j
   SET ingested_at = @now, worker_id = NULL, problem = %(problem)s,
       columns = %(columns)s::text[] || ARRAY(
         SELECT c.name FROM unnest(j.columns) WITH ORDINALITY AS c (name, n)
          WHERE c.name <> ALL (%(columns)s::text[]) ORDER BY c.n)
 WHERE batch_id = %(batch_id)s AND worker_id = %(worker_id)s AND ingested_at IS NULL
RETURNING batch_id

-- name: find_job_by_key
-- Finds the job that was made under an idempotency key.
SELECT id, fingerprint FROM penstock.batches
 WHERE owner = %(owner)s AND idempotency_key = %(key)s AND (dialect = 'job' AND deleted_at IS NULL) IS TRUE
