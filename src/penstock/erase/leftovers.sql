-- Servers that know nothing of jobs, error groups or samples finish erasures of batches, and leave these. Each statement looks at a page
-- of keys, whatever else there is, and says which of them nothing belongs to any more.

-- name: list_jobs_to_check
-- Lists the next jobs, and whether the batch of each is gone.
SELECT page.batch_id, (SELECT id FROM penstock.batches WHERE id = page.batch_id) IS NULL
  FROM (SELECT batch_id FROM penstock.jobs WHERE batch_id > %(after)s ORDER BY batch_id LIMIT %(limit)s) AS page
 ORDER BY page.batch_id

-- name: find_next_batch_with_errors
-- Finds the next batch that has error groups.
SELECT batch_id FROM penstock.job_errors WHERE batch_id > %(after)s ORDER BY batch_id, fingerprint, id LIMIT 1

-- name: erase_errors_of_batch
-- Deletes some error groups of a batch that is gone.
DELETE FROM penstock.job_errors
 WHERE ctid = ANY (ARRAY(SELECT ctid FROM penstock.job_errors WHERE batch_id = %(batch_id)s LIMIT %(limit)s))

-- name: erase_job_if_gone
-- Deletes a job whose batch is gone, and what is left of it.
WITH job AS (
  DELETE FROM penstock.jobs
   WHERE batch_id = %(batch_id)s AND (SELECT id FROM penstock.batches WHERE id = %(batch_id)s) IS NULL
  RETURNING batch_id
),
no_column AS (
  DELETE FROM penstock.job_columns WHERE batch_id = (SELECT batch_id FROM job)
)
DELETE FROM penstock.operations WHERE batch_id = (SELECT batch_id FROM job)

-- name: find_next_sampled_batch
-- Finds the next batch that has samples.
SELECT batch_id FROM penstock.samples WHERE batch_id > %(after)s ORDER BY batch_id, resolution_s, at, id LIMIT 1

-- name: list_batches_there
-- Lists those of some batches that are there.
SELECT id FROM penstock.batches WHERE id = ANY (%(batches)s::uuid[])

-- name: erase_samples_of_batch
-- Deletes some samples of a batch that is gone.
DELETE FROM penstock.samples
 WHERE batch_id = %(batch_id)s
   AND id = ANY (ARRAY(SELECT id FROM penstock.samples WHERE batch_id = %(batch_id)s LIMIT %(limit)s))

-- name: list_uploads_to_check
-- Lists the next files, and whether each is a job's upload whose erasure is finished.
SELECT f.id, f.purpose = 'job' AND f.deleted_at IS NOT NULL
             AND (SELECT e.id FROM penstock.erasures e WHERE e.finished_at IS NULL AND e.owner = f.owner LIMIT 1) IS NULL
  FROM (SELECT id, owner, purpose, deleted_at FROM penstock.files WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) AS f
 ORDER BY f.id

-- name: erase_upload_if_deleted
-- Deletes an upload's last rows.
WITH file AS (
  DELETE FROM penstock.files WHERE id = %(id)s AND (deleted_at IS NOT NULL) IS TRUE RETURNING source_id
)
DELETE FROM penstock.file_lanes WHERE source_id = (SELECT source_id FROM file)

-- name: find_next_keyed_source
-- Finds the next source that has keys of rows.
SELECT source_id FROM penstock.row_keys WHERE source_id > %(after)s ORDER BY source_id LIMIT 1

-- name: list_files_of_sources
-- Lists those of some sources whose files are there.
SELECT source_id FROM penstock.files WHERE source_id = ANY (%(sources)s::int8[])

-- name: erase_row_keys
-- Deletes some keys of a source whose file is gone.
DELETE FROM penstock.row_keys
 WHERE source_id = %(source_id)s
   AND key = ANY (ARRAY(SELECT key FROM penstock.row_keys WHERE source_id = %(source_id)s LIMIT %(limit)s))

-- name: list_image_sources_to_check
-- Lists the next sources whose rows stand for images, and whether the file of each is gone.
WITH RECURSIVE page AS (
  (SELECT source_id, source_lane, 1 AS n FROM penstock.blob_uses WHERE source_id > %(after)s
    ORDER BY source_id, source_lane LIMIT 1)
  UNION ALL
  SELECT u.source_id, u.source_lane, page.n + 1
    FROM page
   CROSS JOIN LATERAL (
     SELECT source_id, source_lane FROM penstock.blob_uses WHERE source_id > page.source_id
      ORDER BY source_id, source_lane LIMIT 1) AS u
   WHERE page.n < %(limit)s
)
SELECT source_id, (SELECT f.id FROM penstock.files f WHERE f.source_id = page.source_id) IS NULL, source_lane FROM page
 ORDER BY source_id
