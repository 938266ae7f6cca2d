-- name: insert_file
-- Opens a file: from here to its seal it belongs to one worker and nobody else can see its rows.
INSERT INTO penstock.files (id, owner, filename, worker_id, created_at)
VALUES (%(file_id)s, %(owner)s, %(filename)s, %(worker_id)s, now())
RETURNING source_id;

-- name: hold_if_ingesting
-- Starts a batch of rows. The row lock is the fence: a sweep that fails the file waits for the batch under
-- way, and no batch starts afterwards. Batches need not be flushed one by one: the seal's commit,
-- which is, flushes all WAL before it.
SELECT set_config('synchronous_commit', 'off', true)
  FROM penstock.files
 WHERE id = %(file_id)s AND state = 'ingesting'
   FOR SHARE;

-- name: copy_templates
-- Takes rows packed by the parser.
COPY penstock.templates (source_id, source_lane, ordinal, line, custom_id, summary, body)
FROM STDIN (FORMAT BINARY);

-- name: copy_chunks
-- Takes pieces of an upload as they came, each compressed.
COPY penstock.file_chunks (source_id, chunk, size, bytes) FROM STDIN (FORMAT BINARY);

-- name: read_chunk
-- One piece of an upload.
SELECT size, bytes FROM penstock.file_chunks WHERE source_id = %(source_id)s AND chunk = %(chunk)s;

-- name: seal_if_ingesting
-- Makes the file whole and visible, with one row per lane, or does nothing. Who comes second with an idempotency key
-- waits here for the first, and fails on its uniqueness.
WITH sealed AS (
  UPDATE penstock.files
     SET state = 'ready', lines = %(lines)s, bytes = %(bytes)s, digest = %(digest)s, sealed_at = now(),
         purpose = %(purpose)s, chunks = %(chunks)s, problems = %(problems)s::jsonb,
         idempotency_key = %(idempotency_key)s,
         expires_at = created_at + make_interval(secs => %(expires_after_s)s::float8)
   WHERE id = %(file_id)s AND state = 'ingesting'
  RETURNING id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
            problems, digest
), lanes AS (
  INSERT INTO penstock.file_lanes (source_id, source_lane, route, endpoint, total)
  SELECT sealed.source_id, lane.source_lane, lane.route, lane.endpoint, lane.total
    FROM sealed,
         unnest(%(source_lanes)s::int4[], %(routes)s::text[], %(endpoints)s::text[], %(totals)s::int4[])
           AS lane (source_lane, route, endpoint, total)
), freed AS (
  DELETE FROM penstock.reservations WHERE file_id = (SELECT id FROM sealed)
)
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM sealed;

-- name: fail_if_ingesting
-- Gives a file up, unless it was sealed or given up before.
UPDATE penstock.files SET state = 'failed' WHERE id = %(file_id)s AND state = 'ingesting';

-- name: bound_lock_wait
-- Ends the wait for a batch whose connection is gone, but not yet for the server.
SELECT set_config('lock_timeout', %(timeout_ms)s::text, true);

-- name: read_state
-- What became of a file.
SELECT state FROM penstock.files WHERE id = %(file_id)s;

-- name: read_file
-- One file that is there for its owner, or for anybody when no owner is named. Found by its id and then looked at: all at
-- once, a planner without statistics may walk the owner's list.
WITH file AS MATERIALIZED (
  SELECT * FROM penstock.files WHERE id = %(file_id)s
)
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM file
 WHERE (%(owner)s::text IS NULL OR owner = %(owner)s::text)
   AND state = 'ready' AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now());

-- name: read_file_by_key
-- The file that an idempotency key stands for. Found by the key and then looked at, for the same reason.
WITH file AS MATERIALIZED (
  SELECT * FROM penstock.files
   WHERE owner = %(owner)s AND idempotency_key = %(idempotency_key)s AND state = 'ready'
)
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM file
 WHERE deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now());

-- name: free_key_if_gone
-- An idempotency key may be used again once its file is deleted or expired.
UPDATE penstock.files SET idempotency_key = NULL
 WHERE owner = %(owner)s AND idempotency_key = %(idempotency_key)s
   AND state = 'ready' AND (deleted_at IS NOT NULL OR expires_at <= now());

-- name: list_files_before
-- An owner's files, newest first.
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM penstock.files
 WHERE owner = %(owner)s AND state = 'ready' AND deleted_at IS NULL AND purpose <> 'message_batch' AND id < %(after)s
   AND (expires_at IS NULL OR expires_at > now())
 ORDER BY id DESC
 LIMIT %(limit)s;

-- name: list_files_after
-- An owner's files, oldest first.
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM penstock.files
 WHERE owner = %(owner)s AND state = 'ready' AND deleted_at IS NULL AND purpose <> 'message_batch' AND id > %(after)s
   AND (expires_at IS NULL OR expires_at > now())
 ORDER BY id
 LIMIT %(limit)s;

-- name: list_files_of_purpose_before
-- An owner's files of one purpose, newest first.
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM penstock.files
 WHERE owner = %(owner)s AND purpose = %(purpose)s AND state = 'ready' AND deleted_at IS NULL AND id < %(after)s
   AND (expires_at IS NULL OR expires_at > now())
 ORDER BY id DESC
 LIMIT %(limit)s;

-- name: list_files_of_purpose_after
-- An owner's files of one purpose, oldest first.
SELECT id, owner, source_id, filename, purpose, kind, batch_id, bytes, lines, chunks, created_at, expires_at,
       problems, digest
  FROM penstock.files
 WHERE owner = %(owner)s AND purpose = %(purpose)s AND state = 'ready' AND deleted_at IS NULL AND id > %(after)s
   AND (expires_at IS NULL OR expires_at > now())
 ORDER BY id
 LIMIT %(limit)s;

-- name: fail_if_abandoned
-- Gives up files whose worker is gone: named as dead, unknown, or silent longer than the grace.
UPDATE penstock.files SET state = 'failed'
 WHERE state = 'ingesting' AND id = ANY (ARRAY(
   SELECT f.id
     FROM penstock.files f
    WHERE f.state = 'ingesting'
      AND (f.worker_id = ANY (%(dead_workers)s::uuid[])
           OR NOT EXISTS (
             SELECT FROM penstock.workers w
              WHERE w.id = f.worker_id
                AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s)))
      FOR UPDATE OF f SKIP LOCKED))
RETURNING id;

-- name: list_failed
-- Files given up whose rows are still to be deleted.
SELECT id FROM penstock.files WHERE state = 'failed' ORDER BY created_at;

-- name: hold_if_failed
-- Takes the right to delete the next rows of a file that was given up. Another sweep does not wait for it.
SELECT source_id FROM penstock.files WHERE id = %(file_id)s AND state = 'failed' FOR UPDATE SKIP LOCKED;

-- name: purge_templates_after
-- Deletes the next rows of one source, in key order from where the last call ended: starting over
-- would walk past everything deleted before.
WITH page AS MATERIALIZED (
  SELECT source_lane, ordinal
    FROM penstock.templates
   WHERE source_id = %(source_id)s
     AND (source_lane, ordinal) > (%(source_lane)s::int4, %(ordinal)s::int4)
   ORDER BY source_lane, ordinal
   LIMIT %(rows)s
), last AS MATERIALIZED (
  SELECT source_lane, ordinal FROM page ORDER BY source_lane DESC, ordinal DESC LIMIT 1
), gone AS (
  DELETE FROM penstock.templates
   WHERE source_id = %(source_id)s
     AND (source_lane, ordinal) > (%(source_lane)s::int4, %(ordinal)s::int4)
     AND (source_lane, ordinal) <= ((SELECT source_lane FROM last), (SELECT ordinal FROM last))
  RETURNING ordinal
)
SELECT source_lane, ordinal, (SELECT count(*) FROM gone) FROM last;

-- name: purge_chunks_from
-- Deletes the next pieces of one source, in key order, and says where to go on.
WITH page AS MATERIALIZED (
  SELECT chunk
    FROM penstock.file_chunks
   WHERE source_id = %(source_id)s AND chunk >= %(chunk)s::int4
   ORDER BY chunk
   LIMIT %(rows)s
), gone AS (
  DELETE FROM penstock.file_chunks
   WHERE source_id = %(source_id)s AND chunk >= %(chunk)s::int4 AND chunk <= (SELECT max(chunk) FROM page)
  RETURNING chunk
)
SELECT (SELECT max(chunk) + 1 FROM page), (SELECT count(*) FROM gone);

-- name: has_rows
-- Whether templates or chunks of a source are left.
SELECT EXISTS (SELECT FROM penstock.templates WHERE source_id = %(source_id)s)
    OR EXISTS (SELECT FROM penstock.file_chunks WHERE source_id = %(source_id)s);

-- name: forget_if_failed
-- Removes the trace of a file that has no rows left, unless it still uses images.
DELETE FROM penstock.files f
 WHERE f.id = %(file_id)s AND f.state = 'failed'
   AND (SELECT u.ordinal FROM penstock.blob_uses u WHERE u.source_id = f.source_id LIMIT 1) IS NULL;

-- name: insert_upload_if_new
-- Opens an upload in parts, unless its idempotency key was used before.
INSERT INTO penstock.uploads (id, owner, filename, purpose, mime_type, bytes, expires_after_s, idempotency_key,
                              fingerprint, created_at, expires_at)
VALUES (%(id)s, %(owner)s, %(filename)s, %(purpose)s, %(mime_type)s, %(bytes)s, %(expires_after_s)s,
        %(idempotency_key)s, %(fingerprint)s, now(), now() + make_interval(secs => %(ttl_s)s))
ON CONFLICT (owner, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING;

-- name: read_upload
-- An upload in parts as its owner sees it, or anybody when no owner is named.
SELECT id, owner, filename, purpose, mime_type, bytes, expires_after_s, file_id, created_at, expires_at,
       CASE WHEN completed_at IS NOT NULL THEN 'completed'
            WHEN cancelled_at IS NOT NULL THEN 'cancelled'
            WHEN expired_at IS NOT NULL OR expires_at <= @now THEN 'expired'
            ELSE 'pending' END
  FROM penstock.uploads
 WHERE id = %(id)s AND (%(owner)s::text IS NULL OR owner = %(owner)s::text);

-- name: read_upload_key
-- The upload that an idempotency key stands for, and what it was asked for with.
SELECT id, fingerprint FROM penstock.uploads WHERE owner = %(owner)s AND idempotency_key = %(idempotency_key)s;

-- name: read_parts
-- The parts of an upload.
SELECT id, source_id, bytes, chunks FROM penstock.upload_parts WHERE upload_id = %(upload_id)s;

-- name: read_part
-- One part of an upload.
SELECT id, upload_id, bytes, created_at, digest
  FROM penstock.upload_parts WHERE upload_id = %(upload_id)s AND id = %(id)s;

-- name: add_part_if_pending
-- Makes what was stored a part of its upload, or does nothing if the upload has ended or its worker was taken for
-- dead. The lock makes the end of the upload wait, so that no part is added afterwards.
WITH upload AS MATERIALIZED (
  SELECT id
    FROM penstock.uploads
   WHERE id = %(upload_id)s AND completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL
     AND expires_at > now()
     FOR SHARE
), taken AS (
  DELETE FROM penstock.files WHERE id = %(file_id)s AND state = 'ingesting' AND EXISTS (SELECT FROM upload)
  RETURNING source_id
)
INSERT INTO penstock.upload_parts (upload_id, id, source_id, bytes, chunks, digest, created_at)
SELECT %(upload_id)s, %(id)s, source_id, %(bytes)s, %(chunks)s, %(digest)s, now() FROM taken
RETURNING id, upload_id, bytes, created_at, digest;

-- name: hold_upload_if_open
-- Keeps parts from being added while an upload is ended: what is decided next sees all of them.
SELECT id FROM penstock.uploads
 WHERE id = %(id)s AND completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL
   FOR UPDATE;

-- name: complete_upload
-- The upload has become a file.
UPDATE penstock.uploads SET completed_at = now(), file_id = %(file_id)s WHERE id = %(id)s;

-- name: cancel_upload
-- The upload is not wanted any more.
UPDATE penstock.uploads SET cancelled_at = now() WHERE id = %(id)s;

-- name: expire_upload
-- The upload was not completed in time.
UPDATE penstock.uploads SET expired_at = @now WHERE id = %(id)s;

-- name: give_up_parts
-- Turns the parts of an upload that has ended into failed files, whose chunks the purge deletes.
WITH gone AS (
  DELETE FROM penstock.upload_parts WHERE upload_id = %(id)s RETURNING id, source_id
)
INSERT INTO penstock.files (id, source_id, owner, filename, state, created_at)
OVERRIDING SYSTEM VALUE
SELECT gone.id, gone.source_id, uploads.owner, uploads.filename, 'failed', now()
  FROM gone, penstock.uploads
 WHERE uploads.id = %(id)s;

-- name: list_expired_uploads
-- Uploads that nobody completed in time, with some time on top for one who is at it.
SELECT id FROM penstock.uploads
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL
   AND expires_at <= @now - make_interval(secs => %(grace_s)s)
 ORDER BY expires_at
 LIMIT %(limit)s;
