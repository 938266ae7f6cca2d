-- name: read_quota
-- Reads the limits that were set for an owner; NULL where none was.
SELECT owner, max_open_batches, max_stored_bytes, requests_per_minute, max_priority
  FROM penstock.quotas
 WHERE owner = %(owner)s

-- name: list_quotas
-- Lists the owners with limits of their own.
SELECT owner, max_open_batches, max_stored_bytes, requests_per_minute, max_priority
  FROM penstock.quotas
 WHERE num_nonnulls(max_open_batches, max_stored_bytes, requests_per_minute, max_priority) > 0
 ORDER BY owner

-- name: set_quota
-- Sets the limits of an owner, all of them.
INSERT INTO penstock.quotas (owner, max_open_batches, max_stored_bytes, requests_per_minute, max_priority)
VALUES (%(owner)s, %(max_open_batches)s, %(max_stored_bytes)s, %(requests_per_minute)s, %(max_priority)s)
ON CONFLICT (owner) DO UPDATE
   SET max_open_batches = excluded.max_open_batches, max_stored_bytes = excluded.max_stored_bytes,
       requests_per_minute = excluded.requests_per_minute, max_priority = excluded.max_priority

-- name: add_owner
-- Makes the row that is locked for an owner, if it has none.
INSERT INTO penstock.quotas (owner) VALUES (%(owner)s) ON CONFLICT (owner) DO NOTHING

-- name: hold_owner
-- Locks an owner: until the commit no other transaction checks its limits. What is counted next sees all that was written
-- under them.
SELECT owner FROM penstock.quotas WHERE owner = %(owner)s FOR NO KEY UPDATE

-- name: count_open_batches
-- Counts an owner's batches and jobs that have not ended, as far as `most`. Runs from the command line do not count.
SELECT count(*)::int4
  FROM unnest(ARRAY['openai', 'anthropic', 'job']) AS d (dialect)
 CROSS JOIN unnest(ARRAY['validating', 'in_progress', 'paused', 'cancelling']) AS s (state)
 CROSS JOIN LATERAL (
   SELECT b.id FROM penstock.batches b
    WHERE b.owner = %(owner)s AND b.dialect = d.dialect AND b.state = s.state AND b.deleted_at IS NULL
    ORDER BY b.id DESC  -- as the index of owners is: otherwise one over everybody's batches looks as good
    LIMIT %(most)s) AS open

-- name: read_stored_bytes
-- Reads how many bytes count against an owner's limit.
SELECT penstock.stored_bytes(%(owner)s, @now)

-- name: reserve_if_room
-- Reserves room for a file on its way in: what it needs now, and as much as it is said to need in all, so that of files that
-- come at once some fit and not all of them fail half-way. If that is not said, up to `ahead` more, at most a sixteenth of
-- what is left, so that others find room too. Under the owner's lock. A file that was stored before under the same
-- idempotency key does not count: the two will be one.
WITH others AS MATERIALIZED (
  SELECT penstock.stored_bytes(%(owner)s, @now)
         - coalesce((SELECT bytes FROM penstock.reservations WHERE file_id = %(file_id)s), 0)
         - coalesce((SELECT bytes FROM penstock.files
                      WHERE owner = %(owner)s AND idempotency_key = %(key)s::text AND state = 'ready'
                        AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > @now)), 0) AS bytes
)
INSERT INTO penstock.reservations (file_id, owner, bytes)
SELECT %(file_id)s, %(owner)s,
       %(need)s + least(left_over, greatest(%(expected)s - %(need)s, least(%(ahead)s, left_over / 16)))
  FROM others
 CROSS JOIN LATERAL (SELECT %(most)s - others.bytes - %(need)s AS left_over) AS room
 WHERE others.bytes + %(need)s <= %(most)s
ON CONFLICT (file_id) DO UPDATE SET bytes = excluded.bytes
RETURNING bytes

-- name: take_requests
-- Takes some of the requests that an owner may make this minute, by the database's clock. Returns how many were taken before,
-- by all servers, and how long the minute lasts.
INSERT INTO penstock.request_counts AS c (owner, minute, taken)
VALUES (%(owner)s, date_trunc('minute', @now), %(step)s)
ON CONFLICT (owner) DO UPDATE
   SET minute = excluded.minute,
       taken = CASE WHEN c.minute = excluded.minute THEN c.taken ELSE 0 END + excluded.taken
RETURNING taken - %(step)s, extract(epoch FROM minute + interval '1 minute' - @now)::float8

-- name: read_use
-- Reads what an owner uses: items in flight of its batches and jobs, stored bytes, and requests that servers have taken of
-- this minute.
SELECT (SELECT coalesce(sum(size), 0)::int8 FROM penstock.leases WHERE owner = %(owner)s AND NOT session),
       penstock.stored_bytes(%(owner)s, @now),
       coalesce((SELECT taken FROM penstock.request_counts
                  WHERE owner = %(owner)s AND minute = date_trunc('minute', @now)), 0)
