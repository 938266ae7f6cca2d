-- The console: pages of everybody's work, and who is signed in.

-- Pages of everybody's batches and jobs, for admins: a walk for each dialect and state, as for one owner. Ids are in it
-- as bytes, which sort as they do: by the ids themselves the planner would walk the primary key, past all other states.
CREATE INDEX batches_of_all_by_state ON penstock.batches (dialect, state, uuid_send(id) DESC) WHERE deleted_at IS NULL;

-- Sign-ins: a browser holds a random token, this table its hash, so that a copy of the database lets nobody in. A
-- sign-in ends with its key, too.
CREATE TABLE penstock.sign_ins (
  hash        bytea PRIMARY KEY,
  key_id      uuid NOT NULL,
  created_at  timestamptz NOT NULL,
  expires_at  timestamptz NOT NULL
);
CREATE INDEX sign_ins_expiring ON penstock.sign_ins (expires_at);
