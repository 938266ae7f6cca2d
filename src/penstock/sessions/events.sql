-- name: note_events_if_new
-- Records events, each with the request it is to become; of a known event, returns the request it became. Events that
-- another transaction is recording at the same moment are waited for. Rows go in key order, so that two transactions
-- with the same events do not wait for each other.
INSERT INTO penstock.incoming_events
  (owner, digest, source, event_id, fingerprint, request_id, session_key, received_at)
SELECT %(owner)s, e.digest, e.source, e.event_id, e.fingerprint, e.request_id, e.session_key,
       @now
  FROM unnest(%(digests)b::bytea[], %(sources)b::text[], %(event_ids)b::text[], %(fingerprints)b::bytea[],
              %(request_ids)s::uuid[], %(session_keys)b::text[])
       AS e (digest, source, event_id, fingerprint, request_id, session_key)
 ORDER BY e.digest
ON CONFLICT (owner, digest) DO UPDATE SET received_at = incoming_events.received_at
RETURNING digest, fingerprint, request_id
