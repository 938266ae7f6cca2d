-- name: claim_job
-- Leases up to `want` rows of one job: those to be tried again that are due, then those beyond the cursor, as far as its
-- width lets. It stands in no line, and its owner is charged nothing: whoever calls works for this job alone.
-- The lane is locked as by any claim: a pause, cancel or delete takes the same lock. A lane that is locked is left alone,
-- and the claim simply made again. A job's rows are all in its source's first lane. At most one suspect, on a lease of
-- its own, as by any claim.
WITH lane AS MATERIALIZED (
  SELECT l.id, l.batch_id, l.owner, l.session, l.band, l.weight * l.nearness AS weight, l.pool, l.route, l.endpoint,
         l.source_id, l.source_lane, l.next, l.total, l.width, l.busy
    FROM penstock.lanes l
   WHERE l.batch_id = %(batch_id)s
     AND (l.source_lane = 0 AND l.pool = %(pool)s AND l.open AND l.deadline > @now) IS TRUE
     AND NOT EXISTS (
       SELECT FROM penstock.gates g
        WHERE g.pool = l.pool AND g.route = l.route AND (g.halted_at IS NOT NULL OR g.not_before > @now))
     FOR UPDATE OF l SKIP LOCKED
),
plain_due AS MATERIALIZED (
  SELECT d.id, d.ordinals, d.size, d.attempt, d.reclaims, d.generation, d.spent, d.suspect, d.limited, d.due_at
    FROM penstock.deferrals d
   WHERE d.batch_id = (SELECT batch_id FROM lane)
     AND (d.lane_id = (SELECT id FROM lane) AND NOT d.held AND NOT d.suspect AND d.due_at <= @now) IS TRUE
   ORDER BY d.due_at, d.id
   LIMIT %(want)s
     FOR UPDATE SKIP LOCKED
),
suspect_due AS MATERIALIZED (
  SELECT d.id, d.ordinals, d.size, d.attempt, d.reclaims, d.generation, d.spent, d.suspect, d.limited, d.due_at
    FROM penstock.deferrals d
   WHERE d.batch_id = (SELECT batch_id FROM lane) AND %(suspect_ok)s::boolean
     AND (d.lane_id = (SELECT id FROM lane) AND NOT d.held AND d.suspect AND d.due_at <= @now) IS TRUE
   ORDER BY d.due_at, d.id
   LIMIT 1
     FOR UPDATE SKIP LOCKED
),
taken AS MATERIALIZED (
  SELECT d.*, CASE WHEN size <= %(want)s - before THEN ordinals
                   ELSE penstock.first_ordinals(ordinals, %(want)s - before) END AS taken
    FROM (SELECT due.*, (sum(size) OVER (ORDER BY suspect DESC, due_at, id) - size)::int4 AS before
            FROM (SELECT * FROM plain_due UNION ALL SELECT * FROM suspect_due) AS due) AS d
   WHERE before < %(want)s
),
gone AS (
  DELETE FROM penstock.deferrals WHERE id = ANY (ARRAY(SELECT id FROM taken WHERE taken = ordinals))
),
shrunk AS (
  UPDATE penstock.deferrals d SET ordinals = d.ordinals - t.taken
    FROM (SELECT id, taken FROM taken WHERE taken <> ordinals) AS t
   WHERE d.id = t.id AND d.id = ANY (ARRAY(SELECT id FROM taken WHERE taken <> ordinals))
),
granted AS MATERIALIZED (
  SELECT lane.*, least(total - next, width - busy,
                       %(want)s - (SELECT coalesce(sum(penstock.ordinal_count(taken)), 0)::int4 FROM taken)) AS take
    FROM lane
),
-- The values to store, not what to add, as in every claim.
advanced AS (
  UPDATE penstock.lanes
     SET next = (SELECT next + take FROM granted),
         busy = (SELECT busy + CASE WHEN width IS NULL THEN 0 ELSE take END FROM granted)
   WHERE id = (SELECT id FROM granted WHERE take > 0)
),
leased AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, owner, session, band, weight, pool, route, limited, worker_id, ordinals, attempt, reclaims,
     generation, spent, claimed_at, progressed_at)
  SELECT id, batch_id, owner, session, band, weight, pool, route, width IS NOT NULL, %(worker)s::uuid,
         int4multirange(int4range(next, next + take)), 1, 0, 0, 0, @now, @now
    FROM granted
   WHERE take > 0
  UNION ALL
  SELECT lane.id, lane.batch_id, lane.owner, lane.session, lane.band, lane.weight, lane.pool, lane.route, t.limited,
         %(worker)s::uuid, range_agg(t.taken), t.attempt, t.reclaims, t.generation, t.spent, @now, @now
    FROM lane, taken t
   GROUP BY lane.id, lane.batch_id, lane.owner, lane.session, lane.band, lane.weight, lane.pool, lane.route, t.limited,
            t.attempt, t.reclaims, t.generation, t.spent, CASE WHEN t.suspect THEN t.id END
  RETURNING id, nonce, lane_id, batch_id, route, session, ordinals, attempt, reclaims, generation, spent
)
SELECT leased.id, leased.nonce, leased.lane_id, leased.batch_id, leased.route, lane.endpoint, lane.source_id,
       lane.source_lane, leased.attempt, leased.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(leased.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(leased.ordinals) r) AS stops, leased.session, leased.generation, leased.spent
  FROM leased, lane

-- name: read_work
-- Reads what there is to do for a job now: where its rows are, whether any is to be claimed now or is in flight, seconds
-- until the next is to be tried again, seconds for which its route must wait, and whether an operation is to put rows back.
SELECT l.pool, l.route,
       l.open AND l.deadline > @now AS open, l.runnable,
       (SELECT true FROM penstock.leases WHERE batch_id = l.batch_id LIMIT 1) IS NOT NULL AS in_flight,
       (SELECT extract(epoch FROM min(d.due_at) - @now)::float8 FROM penstock.deferrals d
         WHERE d.batch_id = l.batch_id AND NOT d.held) AS due_in_s,
       (SELECT CASE WHEN g.halted_at IS NOT NULL THEN 'infinity' ELSE extract(epoch FROM g.not_before - @now) END::float8
          FROM penstock.gates g
         WHERE g.pool = l.pool AND g.route = l.route AND (g.halted_at IS NOT NULL OR g.not_before > @now)) AS closed_for_s,
       (SELECT true FROM penstock.operations
         WHERE batch_id = l.batch_id AND (state = 'running') IS TRUE LIMIT 1) IS NOT NULL AS operating
  FROM penstock.lanes l
 WHERE l.batch_id = %(batch_id)s AND (l.source_lane = 0) IS TRUE
