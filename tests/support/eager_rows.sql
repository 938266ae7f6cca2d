-- Tables of the eager layout, and rows in every state: eager.batches of eager.lines each, answers of about eager.padding bytes.

CREATE TABLE files (
  id uuid PRIMARY KEY, name text NOT NULL, purpose text, size_bytes bigint NOT NULL DEFAULT 0,
  status text NOT NULL DEFAULT 'processed', uploaded_by text, created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz, deleted_at timestamptz, error_message text
);
CREATE TABLE request_templates (
  id uuid PRIMARY KEY, file_id uuid REFERENCES files ON DELETE SET NULL, line_number int NOT NULL DEFAULT 0,
  custom_id text, endpoint text NOT NULL, method text NOT NULL, path text NOT NULL, body text NOT NULL,
  model text NOT NULL, api_key text NOT NULL, created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON request_templates (file_id, line_number);
CREATE TABLE batches (
  id uuid PRIMARY KEY, file_id uuid REFERENCES files ON DELETE SET NULL, endpoint text NOT NULL,
  completion_window text NOT NULL, metadata jsonb, created_by text, created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz, cancelling_at timestamptz, completed_at timestamptz, failed_at timestamptz,
  cancelled_at timestamptz, deleted_at timestamptz, output_file_id uuid, error_file_id uuid,
  total_requests bigint NOT NULL DEFAULT 0
);
CREATE TABLE requests (
  id uuid PRIMARY KEY, batch_id uuid REFERENCES batches, template_id uuid REFERENCES request_templates ON DELETE SET NULL,
  state text NOT NULL DEFAULT 'pending', retry_attempt int NOT NULL DEFAULT 0, not_before timestamptz, custom_id text,
  model text, response_status smallint, response_body text, error text, daemon_id uuid, claimed_at timestamptz,
  started_at timestamptz, completed_at timestamptz, failed_at timestamptz, canceled_at timestamptz
);
CREATE INDEX ON requests (batch_id, state);
CREATE INDEX ON requests (template_id);

-- A file for each batch, but for 'shared' and 'untouched': they run over the file of 'completed', which is in three batches.
INSERT INTO files (id, name, purpose, size_bytes, uploaded_by, created_at)
SELECT md5('file ' || f)::uuid, 'requests ' || f || '.jsonl', 'batch', 1000 * f, 'owner ' || f % 3,
       now() - interval '20 days' + f * interval '1 minute'
  FROM generate_series(0, current_setting('eager.batches')::int - 1) AS f
 WHERE f % 10 NOT IN (6, 9);

-- Lines count from 0 in every other file, and leave gaps in one of five. One in 17 has no custom id.
INSERT INTO request_templates (id, file_id, line_number, custom_id, endpoint, method, path, body, model, api_key)
SELECT md5('line ' || f || ' ' || n)::uuid, md5('file ' || f)::uuid,
       (n - 1 + f % 2) * CASE WHEN f % 5 = 4 THEN 2 ELSE 1 END,
       CASE WHEN n % 17 > 0 THEN 'r-' || n || CASE n % 5 WHEN 1 THEN ' "ü' || chr(8232) WHEN 2 THEN E'\t\\' ELSE '' END END,
       'https://old.example/v' || f % 2, 'POST', '/v1/chat/completions',
       '{"model":"' || m.model || '", "messages" : [{"role":"user","content":"'
         || CASE n % 6 WHEN 0 THEN 'naïve ' || chr(128512) WHEN 1 THEN '\ud83d' WHEN 2 THEN 'a' || chr(8233) || 'b'
                       WHEN 3 THEN '\u0000 \\ \"' ELSE 'plain ' || n END
         || repeat('x', current_setting('eager.padding')::int) || '"}]'
         || CASE n % 4 WHEN 0 THEN E' \r\n' ELSE '' END || '}',
       m.model, 'sk-secret-' || f
  FROM generate_series(0, current_setting('eager.batches')::int - 1) AS f,
       generate_series(1, current_setting('eager.lines')::int) AS n,
       LATERAL (SELECT CASE WHEN n % 3 = 0 THEN 'large' ELSE 'small' END AS model) AS m
 WHERE f % 10 NOT IN (6, 9);

INSERT INTO batches (id, file_id, endpoint, completion_window, metadata, created_by, created_at, expires_at,
                     output_file_id, error_file_id, total_requests)
SELECT md5('batch ' || b)::uuid, md5('file ' || k.file)::uuid, '/v1/chat/completions', '24h',
       jsonb_build_object('kind', k.kind, 'number', b), CASE WHEN b % 10 < 9 THEN 'owner ' || k.file % 3 END,
       now() - interval '10 days' + b * interval '1 minute',
       CASE WHEN b % 2 = 0 THEN now() + interval '30 days' END, md5('output ' || b)::uuid, md5('errors ' || b)::uuid,
       current_setting('eager.lines')::int
  FROM generate_series(0, current_setting('eager.batches')::int - 1) AS b,
       LATERAL (SELECT (ARRAY['completed', 'halfway', 'scattered', 'cancelled', 'cancelling', 'failed', 'shared',
                              'without_file', 'deleted', 'untouched'])[b % 10 + 1] AS kind,
                       CASE b % 10 WHEN 6 THEN b - 6 WHEN 9 THEN b - 9 ELSE b END AS file) AS k;
-- Files of results are rows too, with nothing in them.
INSERT INTO files (id, name, purpose, uploaded_by)
SELECT f.id, 'results', 'batch_output', created_by FROM batches, LATERAL (VALUES (output_file_id), (error_file_id)) AS f (id);

INSERT INTO requests (id, batch_id, template_id, state, retry_attempt, not_before, custom_id, model, response_status,
                      response_body, error, claimed_at, started_at, completed_at, failed_at, canceled_at)
SELECT md5('request ' || b.id || t.id)::uuid, b.id, t.id, s.state,
       CASE WHEN n % 7 = 0 AND b.kind <> 'untouched' THEN n % 4 ELSE 0 END,
       CASE WHEN s.state = 'pending' AND n % 14 = 0 THEN b.created_at END, t.custom_id, t.model,
       CASE WHEN s.state = 'completed' THEN 200 WHEN s.state = 'failed' AND n % 2 = 0 THEN 400 END,
       CASE WHEN s.state = 'completed' THEN
              CASE WHEN n % 97 = 0 THEN 'no JSON at all: é' WHEN n % 89 = 0 THEN ''
                   ELSE '{"id":"chat-' || n || '","object":"chat.completion","choices":[{"index":0,"message":{"content":"'
                     || CASE n % 5 WHEN 0 THEN chr(128512) || '\ud83d' WHEN 1 THEN 'a' || chr(8232) || 'b'
                                   WHEN 2 THEN '\u0000 \\ \"' ELSE 'answer ' || n END
                     || repeat('y', current_setting('eager.padding')::int) || '"}}],'
                     || CASE n % 4 WHEN 0 THEN E' \r\n' ELSE '' END
                     || '"usage":{"prompt_tokens":' || n % 11 || ',"completion_tokens":' || n % 13 || '}}' END
            WHEN s.state = 'failed' AND n % 2 = 0 THEN '{"error":{"message":"bad ' || n || '"}}' END,
       CASE WHEN s.state = 'failed' THEN 'upstream said no: ' || n || ' "é' || chr(8232) || '"' END,
       CASE WHEN s.state <> 'pending' THEN b.created_at + interval '1 hour' END,
       CASE WHEN s.state IN ('processing', 'completed', 'failed') THEN b.created_at + interval '61 minutes' END,
       CASE WHEN s.state = 'completed' THEN b.created_at + interval '62 minutes' + n * interval '1 ms' END,
       CASE WHEN s.state = 'failed' THEN b.created_at + interval '63 minutes' END,
       CASE WHEN s.state = 'canceled' THEN b.created_at + interval '64 minutes' END
  FROM (SELECT *, metadata ->> 'kind' AS kind FROM batches) AS b
  JOIN request_templates t ON t.file_id = b.file_id,
       LATERAL (SELECT ('x' || substr(md5(t.id::text), 1, 6))::bit(24)::int AS chance,
                       row_number() OVER () AS n0) AS c,
       LATERAL (SELECT substring(t.custom_id FROM '^r-(\d+)')::int AS named) AS i,
       LATERAL (SELECT coalesce(i.named, c.chance) AS n) AS k,
       LATERAL (SELECT CASE WHEN n % 10 = 3 THEN 'failed' ELSE 'completed' END AS answered) AS a,
       LATERAL (SELECT CASE b.kind
         WHEN 'untouched' THEN 'pending'
         WHEN 'failed' THEN 'failed'
         WHEN 'halfway' THEN CASE WHEN t.line_number < current_setting('eager.lines')::int / 2 THEN a.answered
                                  WHEN n % 9 = 0 THEN 'claimed' WHEN n % 9 = 1 THEN 'processing' ELSE 'pending' END
         WHEN 'scattered' THEN CASE n % 3 WHEN 0 THEN 'pending' WHEN 1 THEN a.answered
                                          ELSE CASE WHEN n % 4 = 0 THEN 'canceled' ELSE 'completed' END END
         WHEN 'cancelled' THEN CASE WHEN n % 2 = 0 THEN 'canceled' ELSE a.answered END
         WHEN 'cancelling' THEN CASE n % 4 WHEN 0 THEN 'canceled' WHEN 1 THEN 'processing' WHEN 2 THEN 'pending'
                                           ELSE a.answered END
         ELSE a.answered END AS state) AS s;

UPDATE batches SET completed_at = created_at + interval '2 hours' WHERE metadata ->> 'kind' IN ('completed', 'shared');
UPDATE batches SET cancelling_at = created_at + interval '1 hour', cancelled_at = created_at + interval '2 hours'
 WHERE metadata ->> 'kind' = 'cancelled';
UPDATE batches SET cancelling_at = created_at + interval '1 hour' WHERE metadata ->> 'kind' = 'cancelling';
UPDATE batches SET failed_at = created_at + interval '2 hours' WHERE metadata ->> 'kind' = 'failed';
UPDATE batches SET deleted_at = now() WHERE metadata ->> 'kind' = 'deleted';

-- Files of batches 'without_file' were deleted: some templates are purged, the others are orphans.
UPDATE batches SET completed_at = created_at + interval '2 hours' WHERE metadata ->> 'kind' = 'without_file' AND (metadata ->> 'number')::int > 10;
DELETE FROM request_templates t USING batches b
 WHERE t.file_id = b.file_id AND b.metadata ->> 'kind' = 'without_file' AND t.line_number % 3 = 0;
DELETE FROM files f USING batches b WHERE f.id = b.file_id AND b.metadata ->> 'kind' = 'without_file';
-- A request of a batch with a file may have lost its template alone.
DELETE FROM request_templates t USING batches b
 WHERE t.file_id = b.file_id AND (b.metadata ->> 'kind') IN ('scattered') AND t.line_number = 5;
-- A row that was never made, or purged.
DELETE FROM requests r USING batches b, request_templates t
 WHERE r.batch_id = b.id AND t.id = r.template_id AND (b.metadata ->> 'kind') IN ('halfway', 'completed') AND t.line_number = 3;
UPDATE files SET deleted_at = now() WHERE id IN (SELECT file_id FROM batches WHERE metadata ->> 'kind' = 'failed' AND (metadata ->> 'number')::int > 10);
INSERT INTO requests (id, state, custom_id, model) SELECT gen_random_uuid(), 'pending', 'alone', 'small' FROM generate_series(1, 3);
INSERT INTO request_templates (id, endpoint, method, path, body, model, api_key)
SELECT gen_random_uuid(), 'https://old.example', 'POST', '/v1/chat/completions', '{}', 'small', 'sk' FROM generate_series(1, 2);
ANALYZE;
