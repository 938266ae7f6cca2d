-- Limits of calls to providers, over all processes.

-- How much of a model is called at a time, and how often, as the calls have shown.
CREATE TABLE penstock.limits (
  provider     text NOT NULL,
  model        text NOT NULL,
  -- Calls in flight at a time, over all processes, and the bounds within which that moves.
  calls        float8 NOT NULL,
  floor        float8 NOT NULL,
  ceiling      float8 NOT NULL,
  -- Calls a second; NULL if nothing is known to limit them.
  per_s        float8,
  -- What the controllers remember.
  state        json NOT NULL,
  -- Why it last moved, in words, and when.
  reason       text NOT NULL,
  moved_at     timestamptz NOT NULL,
  adjusted_at  timestamptz NOT NULL,
  version      bigint NOT NULL,
  PRIMARY KEY (provider, model)
) WITH (fillfactor = 50);

-- What each process has seen of a model's calls, in running totals, and how many it could have in flight.
CREATE TABLE penstock.limit_reports (
  provider   text NOT NULL,
  model      text NOT NULL,
  process    uuid NOT NULL,
  wanted     int4 NOT NULL,
  in_flight  int4 NOT NULL,
  report     json NOT NULL,
  seen_at    timestamptz NOT NULL,
  PRIMARY KEY (provider, model, process)
) WITH (fillfactor = 50);

-- Of a provider whose calls at a time are limited by the operator: how many are given out, and to which process.
CREATE TABLE penstock.provider_slots (
  provider  text PRIMARY KEY,
  granted   int4 NOT NULL CONSTRAINT provider_slots_not_negative CHECK (granted >= 0)
) WITH (fillfactor = 50);

CREATE TABLE penstock.provider_shares (
  provider  text NOT NULL,
  process   uuid NOT NULL,
  wanted    int4 NOT NULL,
  granted   int4 NOT NULL CONSTRAINT provider_shares_not_negative CHECK (granted >= 0),
  seen_at   timestamptz NOT NULL,
  PRIMARY KEY (provider, process)
) WITH (fillfactor = 50);
