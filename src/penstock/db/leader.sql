-- Leader election: one advisory lock, held by a session that the server ends when it falls silent.

-- name: whose_session
-- Behind a pooler this is another session than the one that was connected to, and not ours to set anything in.
SELECT pg_backend_pid()

-- name: prepare_candidate
-- A candidate's session. The server ends it after `grace_ms` without a word, and with it the lead: a process that
-- stands still, or is cut off, keeps its connection and would keep the lock for hours.
SELECT set_config('idle_session_timeout', %(grace_ms)s::text, false),
       set_config('statement_timeout', %(grace_ms)s::text, false),
       set_config('tcp_user_timeout', %(grace_ms)s::text, false)

-- name: lead_if_nobody_does
-- Takes the lead if it is free. It does not wait: a statement that waits holds a snapshot, for weeks on a follower.
SELECT pg_try_advisory_lock(hashtextextended('penstock leader ' || %(name)s, 0))

-- name: beat
-- Tells the server that the session is alive.
SELECT 1

-- name: take_round_if_nobody_has
-- Takes one round, until the transaction ends; for those behind a pooler, who have no session of their own. Here it is
-- a transaction that falls silent which the server ends.
SELECT pg_try_advisory_xact_lock(hashtextextended('penstock round ' || %(name)s, 0)),
       set_config('idle_in_transaction_session_timeout', %(grace_ms)s::text, true)
