-- Limits of calls to providers: what processes report, what follows from it, and how an operator's limit is shared out.

-- name: report_and_list
-- Records this process's reports, and lists those of the other processes that are alive.
WITH mine AS (
  INSERT INTO penstock.limit_reports AS r (provider, model, process, wanted, in_flight, report, seen_at)
  SELECT m.provider, m.model, %(process)s, m.wanted, m.in_flight, m.report::json, @now
    FROM unnest(%(providers)s::text[], %(models)s::text[], %(wanted)s::int4[], %(in_flight)s::int4[], %(reports)s::text[])
         AS m (provider, model, wanted, in_flight, report)
  ON CONFLICT (provider, model, process) DO UPDATE
     SET wanted = excluded.wanted, in_flight = excluded.in_flight, report = excluded.report, seen_at = excluded.seen_at
)
SELECT provider, model, process, wanted, in_flight, report
  FROM penstock.limit_reports
 WHERE provider = ANY(%(of)s::text[]) AND process <> %(process)s
   AND seen_at > @now - make_interval(secs => %(grace_s)s)
 ORDER BY provider, model, process

-- name: list_limits
-- Lists the limits of some providers, and the time.
SELECT provider, model, state, version, reason, extract(epoch FROM @now)::float8,
       extract(epoch FROM @now - adjusted_at)::float8
  FROM penstock.limits
 WHERE provider = ANY(%(of)s::text[])

-- name: now
-- The time, in seconds.
SELECT extract(epoch FROM @now)::float8

-- name: move_if_unchanged
-- Records a limit, unless another process has moved it since it was read.
INSERT INTO penstock.limits AS l
       (provider, model, calls, floor, ceiling, per_s, state, reason, moved_at, adjusted_at, version)
VALUES (%(provider)s, %(model)s, %(calls)s, %(floor)s, %(ceiling)s, %(per_s)s, %(state)s::json,
        coalesce(%(reason)s, 'the start'), @now, @now, %(version)s + 1)
ON CONFLICT (provider, model) DO UPDATE
   SET calls = excluded.calls, floor = excluded.floor, ceiling = excluded.ceiling, per_s = excluded.per_s,
       state = excluded.state, reason = coalesce(%(reason)s, l.reason),
       moved_at = CASE WHEN %(reason)s::text IS NULL THEN l.moved_at ELSE excluded.moved_at END,
       adjusted_at = excluded.adjusted_at, version = excluded.version
 WHERE l.version = %(version)s
RETURNING version

-- name: read_limits
-- Reads the limits of some providers, or of all, as people see them.
SELECT l.provider, l.model, l.calls, l.floor, l.ceiling, l.per_s, l.reason, l.moved_at,
       coalesce((SELECT sum(r.in_flight) FROM penstock.limit_reports r
                  WHERE r.provider = l.provider AND r.model = l.model
                    AND r.seen_at > @now - make_interval(secs => %(grace_s)s)), 0)::int4
  FROM penstock.limits l
 WHERE %(of)s::text[] IS NULL OR l.provider = ANY(%(of)s::text[])
 ORDER BY l.provider, l.model

-- name: make_slots
-- Makes the row that counts what is given out of a provider's limit.
INSERT INTO penstock.provider_slots (provider, granted)
SELECT unnest(%(of)s::text[]), 0
ON CONFLICT (provider) DO NOTHING

-- name: list_shares
-- Lists how many calls of some providers the other processes that are alive want.
SELECT provider, process, wanted
  FROM penstock.provider_shares
 WHERE provider = ANY(%(of)s::text[]) AND process <> %(process)s
   AND seen_at > @now - make_interval(secs => %(grace_s)s)
 ORDER BY provider, process

-- name: take_share_if_free
-- Takes up to `target` of a provider's slots for this process, as many as others leave of the limit, and frees those of
-- processes that are silent. The counter is locked first: two processes never take the same slot, and its value is the
-- one after all who came before, whatever this statement's snapshot says of the shares.
WITH held AS MATERIALIZED (
  SELECT s.granted FROM penstock.provider_slots s WHERE s.provider = %(provider)s FOR UPDATE
),
gone AS (
  DELETE FROM penstock.provider_shares s
   WHERE s.provider = %(provider)s AND s.process <> %(process)s
     AND s.seen_at < @now - make_interval(secs => %(grace_s)s)
     AND (SELECT count(*) FROM held) = 1
  RETURNING s.granted
),
others AS (
  SELECT h.granted - coalesce((SELECT sum(g.granted) FROM gone g), 0)
         - coalesce((SELECT s.granted FROM penstock.provider_shares s
                      WHERE s.provider = %(provider)s AND s.process = %(process)s), 0) AS granted
    FROM held h
),
mine AS (
  SELECT greatest(0, least(%(target)s, %(cap)s - o.granted))::int4 AS granted, o.granted AS by_others FROM others o
),
counted AS (
  UPDATE penstock.provider_slots s SET granted = m.by_others + m.granted FROM mine m WHERE s.provider = %(provider)s
),
taken AS (
  INSERT INTO penstock.provider_shares AS s (provider, process, wanted, granted, seen_at)
  SELECT %(provider)s, %(process)s, %(wanted)s, m.granted, @now FROM mine m
  ON CONFLICT (provider, process) DO UPDATE
     SET wanted = excluded.wanted, granted = excluded.granted, seen_at = excluded.seen_at
)
SELECT granted FROM mine

-- name: leave
-- Frees the slots of this process, and removes its reports.
WITH held AS MATERIALIZED (
  SELECT s.provider FROM penstock.provider_slots s
   WHERE s.provider = ANY(%(of)s::text[]) ORDER BY s.provider FOR UPDATE
),
gone AS (
  DELETE FROM penstock.provider_shares s
   WHERE s.provider IN (SELECT h.provider FROM held h) AND s.process = %(process)s
  RETURNING s.provider, s.granted
),
freed AS (
  UPDATE penstock.provider_slots s SET granted = s.granted - g.granted FROM gone g WHERE s.provider = g.provider
)
DELETE FROM penstock.limit_reports r WHERE r.provider = ANY(%(of)s::text[]) AND r.process = %(process)s

-- name: remove_silent
-- Removes the reports of processes that are silent, and limits of models that were not called for long.
WITH unused AS (
  DELETE FROM penstock.limits WHERE adjusted_at < @now - make_interval(secs => %(keep_s)s)
)
DELETE FROM penstock.limit_reports WHERE seen_at < @now - make_interval(secs => 10 * %(grace_s)s)
