-- name: take_turn_if_due
-- Takes the turn at a duty, unless a process has had it within the interval. A time in the future was written before the
-- clock was set back, and does not count. A row that another process is just writing is its turn.
WITH taken AS (
  UPDATE penstock.duties SET done_at = @now
   WHERE name = (
     SELECT name FROM penstock.duties
      WHERE name = %(name)s
        AND (done_at <= @now - make_interval(secs => %(every_s)s) OR done_at > @now)
        FOR UPDATE SKIP LOCKED)
  RETURNING name
),
first AS (
  INSERT INTO penstock.duties (name, done_at)
  SELECT %(name)s, @now WHERE NOT EXISTS (SELECT FROM penstock.duties WHERE name = %(name)s)
  ON CONFLICT DO NOTHING
  RETURNING name
)
SELECT name FROM taken UNION ALL SELECT name FROM first
