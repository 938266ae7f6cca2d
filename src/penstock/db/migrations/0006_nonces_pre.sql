-- Leases that no restore can give out again. An id comes from a sequence, which goes back with the data: after a restore,
-- or on a standby that had not seen the last of the primary, the same id is given out for other work while a worker
-- still holds the old lease. The nonce is random, and compared wherever a lease is trusted.
-- One small table is written anew for it, that of what is in flight. Code from before leaves the nonce to the default.
ALTER TABLE penstock.leases
  ADD COLUMN nonce int8 NOT NULL DEFAULT hashtextextended(gen_random_uuid()::text, 0);
ALTER TABLE penstock.outcomes ADD COLUMN lease_nonce int8;
ALTER TABLE penstock.attempts ADD COLUMN lease_nonce int8;
ALTER TABLE penstock.session_stream ADD COLUMN lease_nonce int8 NOT NULL DEFAULT 0;

-- As before, with the nonce in the place of the lease's id: it tells whether pieces and answer are of the same call.
CREATE OR REPLACE VIEW penstock.session_answers AS
  SELECT r.id, r.session_id, s.owner, s.key AS session_key, s.deleted_at AS session_deleted_at, r.lane_id, r.ordinal,
         r.endpoint, r.route, r.stream,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'cancelled'
              WHEN o.state = 'completed' THEN 'completed'
              WHEN o.state IS NOT NULL THEN 'failed'
              WHEN l.id IS NOT NULL THEN 'processing'
              ELSE 'pending' END AS status,
         o.status_code, o.response,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'cancelled' ELSE o.error_code END AS error_code,
         CASE WHEN r.cancelled_at IS NOT NULL THEN 'It was cancelled before it was sent.'
              ELSE o.error_message END AS error_message,
         coalesce(o.attempts - (r.cancelled_at IS NOT NULL)::int4, l.attempt, d.attempt - 1, 0) AS attempts,
         r.accepted_at,
         coalesce(o.finished_at, r.cancelled_at) AS completed_at, r.fingerprint, coalesce(o.lease_id, l.id) AS lease_id,
         CASE WHEN o.state IS NULL THEN l.nonce ELSE o.lease_nonce END AS lease_nonce
    FROM penstock.session_requests r
   CROSS JOIN LATERAL (
     SELECT owner, key, deleted_at FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s
    LEFT JOIN LATERAL (
     SELECT state, status_code, response, error_code, error_message, attempts, finished_at, lease_id, lease_nonce
       FROM penstock.outcomes WHERE lane_id = r.lane_id AND ordinal = r.ordinal LIMIT 1) AS o ON true
    LEFT JOIN LATERAL (
     SELECT id, nonce, attempt FROM penstock.leases
      WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS l ON true
    LEFT JOIN LATERAL (
     SELECT attempt FROM penstock.deferrals WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS d ON true;
