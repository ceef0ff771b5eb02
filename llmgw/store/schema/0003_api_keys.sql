-- Keys of clients. A revoked one stays, for people, until its name is given out again.
CREATE TABLE api_keys (
  name TEXT PRIMARY KEY,
  revision INTEGER NOT NULL,               -- api_keys_set.revision when this row was last written: never used twice
  sha256 TEXT NOT NULL UNIQUE CHECK (length(sha256) = 64),
  prefix TEXT NOT NULL,                    -- the beginning of the key's text, for people; empty where only the hash was ever known
  models TEXT NOT NULL,                    -- JSON: a list of names
  max_parallel INTEGER NOT NULL CHECK (max_parallel >= 0),
  requests_per_minute INTEGER NOT NULL CHECK (requests_per_minute >= 0),
  tokens_per_minute INTEGER NOT NULL CHECK (tokens_per_minute >= 0),
  operator INTEGER NOT NULL CHECK (operator IN (0, 1)),
  expires_wall_s REAL,
  created_wall_s REAL NOT NULL,
  created_by TEXT NOT NULL,
  revoked_wall_s REAL,
  revoked_by TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row: facts about all keys.
CREATE TABLE api_keys_set (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  revision INTEGER NOT NULL,
  imported INTEGER NOT NULL CHECK (imported IN (0, 1))  -- a file's keys were taken, once
) STRICT;
INSERT INTO api_keys_set (one, revision, imported) VALUES (1, 0, 0);
