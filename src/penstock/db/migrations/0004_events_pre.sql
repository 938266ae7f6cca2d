-- CloudEvents: those that came in, each once, and those that go out with the answers.
ALTER TABLE penstock.session_requests
  -- The answer is to be told to sinks, and has not been turned into deliveries yet.
  ADD COLUMN announce boolean NOT NULL DEFAULT false;
CREATE INDEX session_requests_to_announce ON penstock.session_requests (lane_id, ordinal) WHERE announce;

-- An event is known by its source and its id. What it asked for is a request; the same event again is the same request.
CREATE TABLE penstock.incoming_events (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  owner        text NOT NULL,
  digest       bytea NOT NULL,
  source       text NOT NULL,
  event_id     text NOT NULL,
  fingerprint  bytea NOT NULL,
  request_id   uuid NOT NULL,
  session_key  text NOT NULL,
  received_at  timestamptz NOT NULL,
  UNIQUE (owner, digest)
);
CREATE INDEX incoming_events_of_request ON penstock.incoming_events (request_id);

-- One answer for one sink. Written by the statement that takes the request's mark away, so that none is lost.
CREATE TABLE penstock.sink_deliveries (
  id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  sink          text NOT NULL,
  event_id      uuid NOT NULL,
  lane_id       bigint NOT NULL,
  request_id    uuid NOT NULL,
  session_key   text NOT NULL,
  owner         text NOT NULL,
  event_at      timestamptz NOT NULL,
  attempts      int4 NOT NULL DEFAULT 0,
  due_at        timestamptz NOT NULL,
  delivered_at  timestamptz,
  given_up_at   timestamptz,
  status_code   int4,
  error         text
) WITH (fillfactor = 70);
CREATE INDEX sink_deliveries_due ON penstock.sink_deliveries (sink, due_at)
  WHERE delivered_at IS NULL AND given_up_at IS NULL;
