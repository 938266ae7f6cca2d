-- name: insert_job
-- Makes a batch a job: what is to be done with each row, and who asked for it.
INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, parts, client, created_at, ingested_at, columns)
VALUES (%(batch_id)s, %(owner)s, %(job_type)s, %(spec)s::jsonb, %(parts)s::jsonb, %(client)s, @now,
        CASE WHEN %(ingested)s::boolean THEN @now END, %(columns)s::text[])

-- name: read_jobs
-- Reads what some batches have as jobs. Batches that are none are left out.
SELECT batch_id, owner, job_type, spec, parts, client, created_at, ingested_at, columns
  FROM penstock.jobs
 WHERE batch_id = ANY (%(batches)s::uuid[])
