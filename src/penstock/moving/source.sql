-- Statements on a database of the eager layout. Each is sent with a prelude by which `old_files` and so on have the columns
-- of the layout, whatever tables and columns are called in the database at hand (layout.py).

-- name: begin_snapshot
-- Sets what the reading of one step needs. Sorts of a large batch go to the source's temporary files beyond this memory.
SELECT set_config('work_mem', '64MB', true), set_config('TimeZone', 'UTC', true), set_config('jit', 'off', true),
       set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true)

-- name: read_activity
-- Whether workers seem alive: what is in flight, when anything was last claimed, begun or ended, and the source's clock.
SELECT count(*) FILTER (WHERE state = 'claimed'), count(*) FILTER (WHERE state = 'processing'),
       max(claimed_at), max(started_at), max(greatest(completed_at, failed_at)), now()
  FROM old_requests

-- name: list_files
-- Every file, with how many lines it has, how many bytes, and how many of them carry a key.
SELECT f.id, coalesce(f.name, ''), coalesce(f.purpose, 'batch'), coalesce(f.size_bytes, 0), f.status, f.uploaded_by,
       f.created_at, f.expires_at, f.deleted_at IS NOT NULL, f.expires_at <= now() IS TRUE, coalesce(t.lines, 0),
       coalesce(t.bytes, 0)::int8, coalesce(t.keys, 0)
  FROM old_files f
  LEFT JOIN (SELECT file_id, count(*) AS lines, sum(octet_length(body)) AS bytes, count(api_key) AS keys
               FROM old_request_templates
              WHERE file_id IS NOT NULL
              GROUP BY file_id) AS t ON t.file_id = f.id
 ORDER BY f.created_at, f.id

-- name: list_batches
-- Every batch, with its requests by state and the bytes of its answers.
SELECT b.id, b.file_id, b.created_by, b.created_at, b.deleted_at IS NOT NULL, b.output_file_id, b.error_file_id,
       coalesce(r.pending, 0), coalesce(r.claimed, 0), coalesce(r.processing, 0), coalesce(r.completed, 0),
       coalesce(r.failed, 0), coalesce(r.canceled, 0), coalesce(r.others, 0), coalesce(r.bytes, 0)::int8
  FROM old_batches b
  LEFT JOIN (SELECT batch_id, count(*) FILTER (WHERE state = 'pending') AS pending,
                    count(*) FILTER (WHERE state = 'claimed') AS claimed,
                    count(*) FILTER (WHERE state = 'processing') AS processing,
                    count(*) FILTER (WHERE state = 'completed') AS completed,
                    count(*) FILTER (WHERE state = 'failed') AS failed,
                    count(*) FILTER (WHERE state = 'canceled') AS canceled,
                    count(*) FILTER (WHERE state NOT IN
                      ('pending', 'claimed', 'processing', 'completed', 'failed', 'canceled')) AS others,
                    sum(octet_length(response_body)) AS bytes
               FROM old_requests
              WHERE batch_id IS NOT NULL
              GROUP BY batch_id) AS r ON r.batch_id = b.id
 ORDER BY b.created_at, b.id

-- name: read_batch
-- One batch, with its requests by state, as the same snapshot has them.
SELECT b.id, b.file_id, b.endpoint, b.completion_window, b.metadata, b.created_by, b.created_at, b.expires_at,
       b.cancelling_at, b.completed_at, b.failed_at, b.cancelled_at, b.output_file_id, b.error_file_id,
       b.total_requests, o.expires_at AS output_expires_at, o.deleted_at IS NOT NULL AS output_deleted,
       e.expires_at AS error_expires_at, e.deleted_at IS NOT NULL AS error_deleted,
       r.pending, r.claimed, r.processing, r.completed, r.failed, r.canceled, r.requests
  FROM old_batches b
  LEFT JOIN old_files o ON o.id = b.output_file_id
  LEFT JOIN old_files e ON e.id = b.error_file_id
 CROSS JOIN (SELECT count(*) FILTER (WHERE state = 'pending') AS pending,
                    count(*) FILTER (WHERE state = 'claimed') AS claimed,
                    count(*) FILTER (WHERE state = 'processing') AS processing,
                    count(*) FILTER (WHERE state = 'completed') AS completed,
                    count(*) FILTER (WHERE state = 'failed') AS failed,
                    count(*) FILTER (WHERE state = 'canceled') AS canceled,
                    count(*) AS requests
               FROM old_requests
              WHERE batch_id = %(batch)s) AS r
 WHERE b.id = %(batch)s AND b.deleted_at IS NULL

-- name: count_left_behind
-- What has no place in Penstock: requests outside batches or of batches that are not there, templates without a file.
SELECT (SELECT count(*) FROM old_requests WHERE batch_id IS NULL),
       (SELECT count(*) FROM old_requests r
         WHERE r.batch_id IS NOT NULL AND NOT EXISTS (SELECT FROM old_batches b WHERE b.id = r.batch_id)),
       (SELECT count(*) FROM old_request_templates WHERE file_id IS NULL)

-- name: list_open_models
-- Models of the requests that are still to be run.
SELECT coalesce(t.model, r.model, ''), count(*)
  FROM old_requests r
  JOIN old_batches b ON b.id = r.batch_id AND b.deleted_at IS NULL
  LEFT JOIN old_request_templates t ON t.id = r.template_id
 WHERE r.state IN ('pending', 'claimed', 'processing') AND b.cancelling_at IS NULL AND b.cancelled_at IS NULL
 GROUP BY 1
 ORDER BY 1

-- name: copy_lines
-- The lines of a file in order: number, id, where it goes (path, model, method), custom id, body.
SELECT coalesce(t.line_number, 0)::int4, t.id,
       concat(t.path, chr(31), t.model, chr(31), coalesce(t.method, 'POST')), t.custom_id, coalesce(t.body, '')
  FROM old_request_templates t
 WHERE t.file_id = %(file)s
 ORDER BY t.line_number, t.id

-- name: copy_requests_of_file
-- The lines of a file in the same order, each with what a batch made of it. Of a line that a batch has twice, the row that
-- is furthest comes first. A line without a row has state 0.
SELECT coalesce(t.line_number, 0)::int4, t.id,
       CASE r.state WHEN 'completed' THEN 1 WHEN 'failed' THEN 2 WHEN 'canceled' THEN 3 WHEN 'processing' THEN 4
                    WHEN 'claimed' THEN 5 WHEN 'pending' THEN 6 ELSE CASE WHEN r.id IS NULL THEN 0 ELSE 9 END END::int4,
       coalesce(r.retry_attempt, 0)::int4, coalesce(r.response_status, -1)::int4,
       least(coalesce(r.completed_at, r.failed_at, r.canceled_at, r.started_at, r.claimed_at, now()), now()),
       CASE WHEN r.not_before > now() THEN date_trunc('second', r.not_before) + interval '1 s' ELSE '-infinity' END,
       CASE WHEN r.started_at <= coalesce(r.completed_at, r.failed_at)
            THEN least(extract(epoch FROM coalesce(r.completed_at, r.failed_at) - r.started_at) * 1000, 2147483647)
            ELSE 0 END::int4,
       concat(t.path, chr(31), t.model, chr(31), coalesce(t.method, 'POST')), coalesce(r.custom_id, t.custom_id),
       CASE WHEN r.state IN ('completed', 'failed') THEN r.response_body END,
       CASE WHEN r.state IN ('completed', 'failed') THEN r.error END
  FROM old_request_templates t
  LEFT JOIN old_requests r ON r.template_id = t.id AND r.batch_id = %(batch)s
 WHERE t.file_id = %(file)s
 ORDER BY t.line_number, t.id, 3, r.id

-- name: copy_requests_without_line
-- Requests of a batch whose line is in no file that was taken over: what is known of them is in their own rows.
SELECT coalesce(t.line_number, 0)::int4, r.id,
       CASE r.state WHEN 'completed' THEN 1 WHEN 'failed' THEN 2 WHEN 'canceled' THEN 3 WHEN 'processing' THEN 4
                    WHEN 'claimed' THEN 5 WHEN 'pending' THEN 6 ELSE 9 END::int4,
       coalesce(r.retry_attempt, 0)::int4, coalesce(r.response_status, -1)::int4,
       least(coalesce(r.completed_at, r.failed_at, r.canceled_at, r.started_at, r.claimed_at, now()), now()),
       CASE WHEN r.not_before > now() THEN date_trunc('second', r.not_before) + interval '1 s' ELSE '-infinity' END,
       CASE WHEN r.started_at <= coalesce(r.completed_at, r.failed_at)
            THEN least(extract(epoch FROM coalesce(r.completed_at, r.failed_at) - r.started_at) * 1000, 2147483647)
            ELSE 0 END::int4,
       concat(coalesce(t.path, %(endpoint)s::text), chr(31), coalesce(r.model, t.model), chr(31), 'POST'),
       coalesce(r.custom_id, t.custom_id),
       CASE WHEN r.state IN ('completed', 'failed') THEN r.response_body END,
       CASE WHEN r.state IN ('completed', 'failed') THEN r.error END
  FROM old_requests r
  LEFT JOIN old_request_templates t ON t.id = r.template_id
 WHERE r.batch_id = %(batch)s AND (t.id IS NULL OR %(file)s::uuid IS NULL OR t.file_id IS DISTINCT FROM %(file)s::uuid)
 ORDER BY t.line_number, r.id
