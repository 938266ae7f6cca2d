-- Webhook endpoints and the deliveries to them, which are written by the statement that ends a batch; and the deliveries
-- of sessions' answers to sinks, which are made from the requests that were marked for it and are answered.
-- A table's name cannot be a parameter: statements that both kinds of deliveries need stand here once for each.

-- name: create_endpoint_if_room
-- Inserts an endpoint, unless its owner has `most` already.
INSERT INTO penstock.webhook_endpoints (id, owner, name, url, event_types, secret, created_at, updated_at)
SELECT %(id)s, %(owner)s, %(name)s, %(url)s, %(event_types)s, %(secret)s,
       now(), now()
 WHERE (SELECT count(*) FROM (SELECT FROM penstock.webhook_endpoints WHERE owner = %(owner)s LIMIT %(most)s) AS mine)
       < %(most)s
RETURNING id, owner, name, url, event_types, secret, created_at, updated_at

-- name: find_endpoint_if_owned
-- One endpoint; no owner given means anybody's.
SELECT id, owner, name, url, event_types, secret, created_at, updated_at
  FROM penstock.webhook_endpoints
 WHERE id = %(id)s AND (%(owner)s::text IS NULL OR owner = %(owner)s)

-- name: list_endpoints
-- An owner's endpoints, newest first, after an id that need not exist any more.
SELECT id, owner, name, url, event_types, secret, created_at, updated_at
  FROM penstock.webhook_endpoints
 WHERE owner = %(owner)s AND id < coalesce(%(after)s::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
 ORDER BY id DESC LIMIT %(limit)s

-- name: update_endpoint_if_owned
-- Changes the given fields. An update that changes nothing leaves `updated_at` alone.
UPDATE penstock.webhook_endpoints e
   SET name = coalesce(%(name)s::text, e.name), url = coalesce(%(url)s::text, e.url),
       event_types = coalesce(%(event_types)s::text[], e.event_types),
       updated_at = CASE WHEN coalesce(%(name)s::text, e.name) = e.name AND coalesce(%(url)s::text, e.url) = e.url
                          AND coalesce(%(event_types)s::text[], e.event_types) = e.event_types
                         THEN e.updated_at ELSE now() END
 WHERE e.id = %(id)s AND (%(owner)s::text IS NULL OR e.owner = %(owner)s)
RETURNING e.id, e.owner, e.name, e.url, e.event_types, e.secret, e.created_at, e.updated_at

-- name: rotate_secret_if_owned
-- Sets a new secret. Messages are signed with the previous one too until `keep_s` have passed, if that is above 0.
UPDATE penstock.webhook_endpoints e
   SET secret = %(secret)s,
       previous_secret = CASE WHEN %(keep_s)s::float8 > 0 THEN e.secret END,
       previous_until = CASE WHEN %(keep_s)s::float8 > 0
                             THEN now() + make_interval(secs => %(keep_s)s) END,
       updated_at = now()
 WHERE e.id = %(id)s AND (%(owner)s::text IS NULL OR e.owner = %(owner)s)
RETURNING e.id, e.owner, e.name, e.url, e.event_types, e.secret, e.created_at, e.updated_at

-- name: delete_endpoint_if_owned
-- Deletes an endpoint with all its deliveries, past and pending.
WITH gone AS (
  DELETE FROM penstock.webhook_endpoints
   WHERE id = %(id)s AND (%(owner)s::text IS NULL OR owner = %(owner)s)
  RETURNING id
),
dropped AS (
  DELETE FROM penstock.webhook_deliveries WHERE endpoint_id = ANY(ARRAY(SELECT id FROM gone))
)
SELECT id FROM gone

-- name: list_deliveries
-- Deliveries to one endpoint, newest first.
SELECT id, event_id, type, batch_id, event_at, attempts, due_at, delivered_at, given_up_at, status_code, error
  FROM penstock.webhook_deliveries
 WHERE endpoint_id = %(endpoint)s AND id < coalesce(%(after)s::int8, 9223372036854775807)
 ORDER BY id DESC LIMIT %(limit)s

-- name: read_signing_keys
-- Keys that sign a message to the endpoint now, sealed for its owner, and the database's time, which the message carries.
SELECT owner, secret, CASE WHEN previous_until > now() THEN previous_secret END, extract(epoch FROM now())::float8
  FROM penstock.webhook_endpoints WHERE id = %(id)s

-- name: list_endpoints_to_seal
-- Endpoints after an id whose secrets are not all sealed with the key that values with this prefix are.
SELECT id, owner, secret, previous_secret
  FROM penstock.webhook_endpoints
 WHERE id > %(after)s
   AND (substr(secret, 1, length(%(prefix)s::bytea)) <> %(prefix)s
        OR substr(previous_secret, 1, length(%(prefix)s::bytea)) <> %(prefix)s)
 ORDER BY id LIMIT %(limit)s

-- name: seal_endpoint_if_unchanged
-- Puts secrets that are sealed anew in the place of those that were read; not if the endpoint's secret has been rotated.
UPDATE penstock.webhook_endpoints
   SET secret = %(secret)s, previous_secret = %(previous_secret)s
 WHERE id = %(id)s AND secret = %(read_secret)s AND previous_secret IS NOT DISTINCT FROM %(read_previous)s

-- name: take_deliveries_if_due
-- Takes deliveries by moving their time ahead: no other process sees them due meanwhile, and if this one dies they come
-- due again by themselves. The attempt that is counted here is the fence for recording the result.
WITH due AS MATERIALIZED (
  SELECT id FROM penstock.webhook_deliveries
   WHERE delivered_at IS NULL AND given_up_at IS NULL AND due_at <= now()
   ORDER BY due_at LIMIT %(limit)s
     FOR UPDATE SKIP LOCKED
),
taken AS (
  UPDATE penstock.webhook_deliveries
     SET attempts = attempts + 1,
         due_at = now() + make_interval(secs => %(hold_s)s::float8)
   WHERE id = ANY(ARRAY(SELECT id FROM due))
  RETURNING id, event_id, endpoint_id, type, batch_id, event_at, attempts
)
SELECT t.id, t.event_id, t.event_at, t.attempts, extract(epoch FROM now())::float8,
       t.endpoint_id, t.type, t.batch_id, e.url, e.owner, e.secret,
       CASE WHEN e.previous_until > now() THEN e.previous_secret END
  FROM taken t
  LEFT JOIN penstock.webhook_endpoints e ON e.id = t.endpoint_id
 ORDER BY t.id

-- name: record_delivery_if_held
-- Records the result of an attempt: delivered, to be tried again, or given up once the event is too old. The condition
-- "not decided yet" is written so that the index over due deliveries does not match it: the row is found by its id.
UPDATE penstock.webhook_deliveries
   SET status_code = %(status_code)s, error = %(error)s,
       delivered_at = CASE WHEN %(delivered)s THEN now() END,
       given_up_at = CASE WHEN NOT %(delivered)s AND (%(final)s OR now()
                               >= event_at + make_interval(secs => %(give_up_s)s::float8))
                          THEN now() END,
       due_at = least(now() + make_interval(secs => %(wait_s)s::float8),
                      event_at + make_interval(secs => %(give_up_s)s::float8))
 WHERE id = %(id)s AND attempts = %(attempt)s AND num_nonnulls(delivered_at, given_up_at) = 0
RETURNING id

-- name: put_back_deliveries_if_held
-- Puts back deliveries that were taken and not tried: due again later, the attempt not counted.
UPDATE penstock.webhook_deliveries d
   SET attempts = d.attempts - 1,
       due_at = now() + make_interval(secs => %(wait_s)s::float8)
  FROM unnest(%(ids)s::int8[], %(attempts)s::int4[]) AS t (id, attempt)
 WHERE d.id = t.id AND d.id = ANY(%(ids)s) AND d.attempts = t.attempt
   AND num_nonnulls(d.delivered_at, d.given_up_at) = 0

-- name: forget_deliveries_if_old
-- Deletes the oldest decided deliveries, those older than `keep_s`. Ids grow with time, so the oldest rows are the first.
WITH old AS MATERIALIZED (
  SELECT id FROM (SELECT id, event_at, delivered_at, given_up_at FROM penstock.webhook_deliveries
                   ORDER BY id LIMIT %(limit)s) AS first
   WHERE event_at < now() - make_interval(secs => %(keep_s)s::float8)
     AND (delivered_at IS NOT NULL OR given_up_at IS NOT NULL)
)
DELETE FROM penstock.webhook_deliveries
 WHERE id = ANY(ARRAY(SELECT d.id FROM penstock.webhook_deliveries d WHERE d.id = ANY(ARRAY(SELECT id FROM old))
                       ORDER BY d.id FOR UPDATE SKIP LOCKED))

-- name: list_to_announce
-- Requests that are marked for a sink and may be answered: of the sessions after `after`, in order, and of each session
-- only those before its cursor. Requests that wait behind the cursor cost nothing. The answers are read after this, and
-- the marks taken away after that.
WITH RECURSIVE lane (id) AS (
  (SELECT lane_id FROM penstock.session_requests WHERE announce AND lane_id > %(after)s ORDER BY lane_id LIMIT 1)
  UNION ALL
  SELECT (SELECT r.lane_id FROM penstock.session_requests r
           WHERE r.announce AND r.lane_id > lane.id ORDER BY r.lane_id LIMIT 1)
    FROM lane
   WHERE lane.id IS NOT NULL
),
page AS MATERIALIZED (
  SELECT id FROM lane WHERE id IS NOT NULL LIMIT %(lanes)s
)
SELECT page.id, a.ordinal, a.id, a.owner, a.session_key,
       -- Not EXISTS, which may be answered by reading all of them.
       (SELECT e.id FROM penstock.incoming_events e WHERE e.request_id = a.id LIMIT 1) IS NOT NULL AS from_event
  FROM page
  LEFT JOIN LATERAL (
    SELECT r.id, r.ordinal, r.owner, (SELECT key FROM penstock.sessions WHERE id = r.session_id) AS session_key
      FROM penstock.session_requests r
     WHERE r.lane_id = page.id AND r.announce
       AND r.ordinal < (SELECT next FROM penstock.lanes WHERE id = page.id)
     ORDER BY r.ordinal
     LIMIT %(most)s) AS a ON true
 ORDER BY page.id, a.ordinal

-- name: read_answers
-- Status and time of the answers to some requests, where there is one.
-- GROUP BY its key keeps each a probe: a join might read the table whole, and a LIMIT for each of many is what a table
-- that is spread over nodes cannot do.
SELECT w.n, o.finished_at, CASE WHEN o.state = 'completed' THEN 'completed'
                                WHEN o.error_code = 'cancelled' THEN 'cancelled' ELSE 'failed' END AS status
  FROM unnest(%(lanes)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS w (lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT state, error_code, finished_at FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal = w.ordinal
    GROUP BY lane_id, ordinal) AS o
 ORDER BY w.n

-- name: announce_if_marked
-- Turns marked answers into deliveries, one for each sink that wants them, and takes their marks away. The transaction
-- that takes the mark makes the deliveries, so that of two that have read the same answer only one does.
WITH marked AS (
  UPDATE penstock.session_requests SET announce = false
   WHERE id = ANY (ARRAY(
     SELECT id FROM penstock.session_requests WHERE id = ANY (%(ids)s::uuid[]) AND announce FOR UPDATE SKIP LOCKED))
  RETURNING id
),
answered AS MATERIALIZED (
  SELECT a.*, gen_random_uuid() AS event_id
    FROM unnest(%(ids)s::uuid[], %(lanes)b::int8[], %(owners)s::text[], %(session_keys)s::text[],
                %(from_events)s::bool[], %(times)s::timestamptz[], %(statuses)s::text[])
         WITH ORDINALITY AS a (id, lane_id, owner, session_key, from_event, finished_at, status, n)
   WHERE (a.id IN (SELECT id FROM marked)) IS TRUE
),
told AS (
  INSERT INTO penstock.sink_deliveries (sink, event_id, lane_id, request_id, session_key, owner, event_at, due_at)
  SELECT s.name, a.event_id, a.lane_id, a.id, a.session_key, a.owner, a.finished_at, now()
    FROM answered a
    JOIN jsonb_to_recordset(%(sinks)s::jsonb) AS s (name text, everything bool, statuses text[], owners text[])
      ON (s.everything OR a.from_event) AND a.status = ANY (s.statuses)
     AND (cardinality(s.owners) = 0 OR a.owner = ANY (s.owners))
   ORDER BY a.n
)
SELECT count(*) FROM answered

-- name: take_sink_deliveries_if_due
-- Takes deliveries that are due for the configured sinks, `most` of each, as webhooks are taken. Returns with each the
-- event that brought its request, if one did, and the database's time.
WITH due AS MATERIALIZED (
  SELECT d.id
    FROM unnest(%(sinks)s::text[]) AS s (name)
   CROSS JOIN LATERAL (
     SELECT id FROM penstock.sink_deliveries
      WHERE sink = s.name AND delivered_at IS NULL AND given_up_at IS NULL
        AND due_at <= now()
      ORDER BY due_at
      LIMIT %(most)s
        FOR UPDATE SKIP LOCKED) AS d
),
taken AS (
  UPDATE penstock.sink_deliveries
     SET attempts = attempts + 1,
         due_at = now() + make_interval(secs => %(hold_s)s::float8)
   WHERE id = ANY (ARRAY(SELECT id FROM due))
  RETURNING id, sink, event_id, lane_id, request_id, session_key, event_at, attempts
)
SELECT t.id, t.event_id, t.event_at, t.attempts, extract(epoch FROM now())::float8,
       t.sink, t.lane_id, t.request_id, t.session_key, e.source, e.event_id
  FROM taken t
  LEFT JOIN LATERAL (
    SELECT source, event_id FROM penstock.incoming_events WHERE request_id = t.request_id LIMIT 1) AS e ON true
 ORDER BY t.id

-- name: record_sink_delivery_if_held
-- Records the result of an attempt, as for webhooks.
UPDATE penstock.sink_deliveries
   SET status_code = %(status_code)s, error = %(error)s,
       delivered_at = CASE WHEN %(delivered)s THEN now() END,
       given_up_at = CASE WHEN NOT %(delivered)s AND (%(final)s OR now()
                               >= event_at + make_interval(secs => %(give_up_s)s::float8))
                          THEN now() END,
       due_at = least(now() + make_interval(secs => %(wait_s)s::float8),
                      event_at + make_interval(secs => %(give_up_s)s::float8))
 WHERE id = %(id)s AND attempts = %(attempt)s AND num_nonnulls(delivered_at, given_up_at) = 0
RETURNING id

-- name: put_back_sink_deliveries_if_held
-- Puts back deliveries that were taken and not tried: due again later, the attempt not counted.
UPDATE penstock.sink_deliveries d
   SET attempts = d.attempts - 1,
       due_at = now() + make_interval(secs => %(wait_s)s::float8)
  FROM unnest(%(ids)s::int8[], %(attempts)s::int4[]) AS t (id, attempt)
 WHERE d.id = t.id AND d.id = ANY(%(ids)s) AND d.attempts = t.attempt
   AND num_nonnulls(d.delivered_at, d.given_up_at) = 0

-- name: forget_sink_deliveries_if_old
-- Deletes the oldest deliveries, those older than `keep_s`; also undecided ones, whose sink is no longer configured.
WITH old AS MATERIALIZED (
  SELECT id FROM (SELECT id, event_at FROM penstock.sink_deliveries ORDER BY id LIMIT %(limit)s) AS first
   WHERE event_at < now() - make_interval(secs => %(keep_s)s::float8)
)
DELETE FROM penstock.sink_deliveries
 WHERE id = ANY(ARRAY(SELECT d.id FROM penstock.sink_deliveries d WHERE d.id = ANY(ARRAY(SELECT id FROM old))
                       ORDER BY d.id FOR UPDATE SKIP LOCKED))

-- name: forget_events_if_old
-- Deletes the oldest incoming events, those older than `keep_s`: the same event sent again counts as a new one.
WITH old AS MATERIALIZED (
  SELECT id FROM (SELECT id, received_at FROM penstock.incoming_events ORDER BY id LIMIT %(limit)s) AS first
   WHERE received_at < now() - make_interval(secs => %(keep_s)s::float8)
)
DELETE FROM penstock.incoming_events
 WHERE id = ANY(ARRAY(SELECT e.id FROM penstock.incoming_events e WHERE e.id = ANY(ARRAY(SELECT id FROM old))
                       ORDER BY e.id FOR UPDATE SKIP LOCKED))
