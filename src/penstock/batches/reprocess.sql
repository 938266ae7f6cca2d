-- name: insert_operation
-- Stores an operation on a job; not one that was asked for before under the same key.
INSERT INTO penstock.operations (id, batch_id, kind, wish, idempotency_key, created_at)
VALUES (%(id)s, %(batch_id)s, 'reprocess', %(wish)s::jsonb, %(key)s, @now)
ON CONFLICT (batch_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING id

-- name: find_operation_by_key
-- Finds the operation on a job that was asked for under a key.
SELECT id, wish FROM penstock.operations WHERE batch_id = %(batch_id)s AND idempotency_key = %(key)s

-- name: list_operations
-- Lists operations on a job, newest first: one of them, or those below an id.
SELECT id, state, place, requeued, worn_out, error, created_at, ended_at
  FROM penstock.operations
 WHERE batch_id = %(batch_id)s AND id < %(below)s AND id >= %(from)s
 ORDER BY id DESC
 LIMIT %(limit)s

-- name: take_operation_if_free
-- Takes the next operation after an id that no server alive does, or that is this server's without its knowing: the answer
-- to an earlier take was lost, or a chunk failed. The server's id is the fence: every chunk is done under it.
UPDATE penstock.operations SET worker_id = %(worker_id)s
 WHERE id = (
   SELECT o.id FROM penstock.operations o
    WHERE o.state = 'running' AND o.id > %(after)s
      AND o.id <> ALL (%(besides)s::uuid[])
      AND (o.worker_id IS NULL OR o.worker_id = %(worker_id)s OR NOT EXISTS (
             SELECT FROM penstock.workers w
              WHERE w.id = o.worker_id AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s)))
    ORDER BY o.id
    LIMIT 1
      FOR UPDATE SKIP LOCKED)
RETURNING id, batch_id

-- name: hold_if_doing
-- Locks an operation that this server does, after its job.
SELECT wish, place FROM penstock.operations
 WHERE id = %(id)s AND (state = 'running' AND worker_id = %(worker_id)s) IS TRUE
   FOR UPDATE

-- name: give_back_if_held
-- Gives an operation back for which there is no room: any server may take it when its turn comes.
UPDATE penstock.operations SET worker_id = NULL WHERE id = %(id)s

-- name: advance_if_held
-- Moves an operation on by a chunk, which this transaction has done, and perhaps to its end.
UPDATE penstock.operations
   SET place = %(place)s, requeued = requeued + %(requeued)s, worn_out = worn_out + %(worn_out)s,
       state = %(state)s, error = %(error)s,
       worker_id = CASE WHEN %(state)s = 'running' THEN worker_id END,
       ended_at = CASE WHEN %(state)s <> 'running' THEN @now END
 WHERE id = %(id)s

-- name: cancel_operation_if_running
-- Ends an operation. Rows that it has put back stay put back; a chunk that is being done is waited for, and counts.
UPDATE penstock.operations SET state = 'cancelled', worker_id = NULL, ended_at = @now
 WHERE id = %(id)s
   AND (batch_id = %(batch_id)s AND state = 'running'
        AND EXISTS (SELECT FROM penstock.batches b
                     WHERE b.id = %(batch_id)s AND (%(owner)s::text IS NULL OR owner = %(owner)s::text))) IS TRUE
RETURNING id

-- name: hold_room
-- Locks a job's lane and tells how many more of its rows may be in flight. No row if the job has no limit: then its lane
-- is not locked, and claims go on.
SELECT width - busy FROM penstock.lanes WHERE id = %(lane)s AND width IS NOT NULL FOR UPDATE

-- name: list_outcomes_of_states
-- Lists the next ordinals of a lane whose outcome has one of some states. IS TRUE: by the state alone, all failures would
-- be found first and then sorted.
SELECT ordinal
  FROM ((SELECT ordinal FROM penstock.outcomes
          WHERE lane_id = %(lane)s AND ordinal > %(after)s AND state <> 'completed'
            AND (state = ANY (%(states)s::penstock.outcome_state[])) IS TRUE
          ORDER BY ordinal
          LIMIT %(limit)s)
        UNION ALL
        (SELECT ordinal FROM penstock.outcomes
          WHERE lane_id = %(lane)s AND ordinal > %(after)s AND state = 'completed'
            AND 'completed' = ANY (%(states)s::penstock.outcome_state[])
          ORDER BY ordinal
          LIMIT %(limit)s)) AS found
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_live
-- Lists those of some ordinals of a lane that are in flight or wait to be tried again, as ranges.
SELECT lower(r), upper(r)
  FROM (SELECT unnest(h.ordinals * wanted.ordinals) AS r
          FROM (SELECT range_agg(int4range(o, o + 1)) AS ordinals FROM unnest(%(ordinals)s::int4[]) AS o) AS wanted
         CROSS JOIN (
           SELECT ordinals FROM penstock.leases WHERE batch_id = %(batch_id)s AND lane_id = %(lane)s
           UNION ALL
           SELECT ordinals FROM penstock.deferrals WHERE batch_id = %(batch_id)s AND lane_id = %(lane)s) AS h) AS live

-- name: read_states
-- Reads the states of some outcomes of a lane, and how many attempts they took.
SELECT o.*
  FROM unnest(%(ordinals)s::int4[]) AS wanted (ordinal)
 CROSS JOIN LATERAL (
   SELECT ordinal, state::text, attempts FROM penstock.outcomes
    WHERE lane_id = %(lane)s AND ordinal = wanted.ordinal
    LIMIT 1) AS o

-- name: find_lane
-- Finds the one lane of a job, if it has rows yet.
SELECT id, next, total FROM penstock.lanes WHERE batch_id = %(batch_id)s AND (source_lane = 0) IS TRUE
