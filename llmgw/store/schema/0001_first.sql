-- One row: facts about this database and counters of whole sets.
CREATE TABLE meta (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  min_reader INTEGER NOT NULL,             -- the oldest schema number whose build may read this file
  min_writer INTEGER NOT NULL,             -- the oldest one whose build may write it
  cluster_id TEXT,                         -- drawn once, at the first start
  epoch INTEGER NOT NULL DEFAULT 0 CHECK (epoch >= 0),
  owner TEXT NOT NULL DEFAULT '',          -- who raised the epoch
  models_revision INTEGER NOT NULL DEFAULT 0,
  models_imported INTEGER NOT NULL DEFAULT 0 CHECK (models_imported IN (0, 1))
) STRICT;
INSERT INTO meta (one, min_reader, min_writer) VALUES (1, 1, 1);

CREATE TABLE models (
  name TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,               -- models_revision when this row was last written: never used twice, also after a removal
  spec TEXT NOT NULL                       -- the ModelSpec as JSON
) STRICT, WITHOUT ROWID;

-- Every name a client may use, so that two models can never share one.
CREATE TABLE model_names (
  name TEXT PRIMARY KEY,
  model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX model_names_of_model ON model_names (model);

-- No foreign key: a choice may also stand for a model that the machine's file holds.
CREATE TABLE engine_choices (
  model TEXT PRIMARY KEY,
  profile TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE facility_holds (
  facility TEXT PRIMARY KEY,
  reason TEXT NOT NULL,
  drain INTEGER NOT NULL CHECK (drain IN (0, 1)),
  until_wall_s REAL,
  author TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE replica_drains (
  replica TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

CREATE TABLE nodes (
  id TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  facility TEXT NOT NULL,
  address TEXT NOT NULL,
  cordoned INTEGER NOT NULL CHECK (cordoned IN (0, 1)),
  draining INTEGER NOT NULL CHECK (draining IN (0, 1)),
  drain_deadline_wall_s REAL,
  labels TEXT NOT NULL,                    -- the operator's own, as JSON
  last_seen_wall_s REAL NOT NULL,
  removed INTEGER NOT NULL CHECK (removed IN (0, 1))
) STRICT, WITHOUT ROWID;

-- AUTOINCREMENT: a sequence number is never used again, also when the newest events were trimmed.
CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  level TEXT NOT NULL,
  kind TEXT NOT NULL,
  object TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  text TEXT NOT NULL
) STRICT;
CREATE INDEX events_at ON events (at);

CREATE TABLE admin_tokens (
  name TEXT PRIMARY KEY,
  sha256 TEXT NOT NULL UNIQUE CHECK (length(sha256) = 64),
  role TEXT NOT NULL CHECK (role IN ('admin', 'operator', 'viewer')),
  created_wall_s REAL NOT NULL,
  revoked_wall_s REAL
) STRICT, WITHOUT ROWID;

CREATE TABLE idempotency (
  key TEXT PRIMARY KEY,
  request TEXT NOT NULL,                   -- a hash of what was asked under this key: the same key for something else is refused
  answer TEXT NOT NULL,                    -- JSON
  at_wall_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_at ON idempotency (at_wall_s);

CREATE TABLE audit (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at_wall_s REAL NOT NULL,
  who TEXT NOT NULL,
  peer TEXT NOT NULL,                      -- from where
  what TEXT NOT NULL,
  object TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  old_revision INTEGER NOT NULL,
  new_revision INTEGER NOT NULL
) STRICT;
CREATE INDEX audit_at ON audit (at_wall_s);
