-- Who used how much: one row for each hour (the second it begins at, in UTC), key and model; counts only grow.
CREATE TABLE usage_hourly (
  hour INTEGER NOT NULL CHECK (hour >= 0 AND hour % 3600 = 0),
  key TEXT NOT NULL,                       -- a key's name, '' for callers without one
  model TEXT NOT NULL,
  requests INTEGER NOT NULL CHECK (requests >= 0),
  unknown INTEGER NOT NULL CHECK (unknown >= 0),
  prompt INTEGER NOT NULL CHECK (prompt >= 0),
  cached INTEGER NOT NULL CHECK (cached >= 0),
  completion INTEGER NOT NULL CHECK (completion >= 0),
  PRIMARY KEY (hour, key, model)
) STRICT, WITHOUT ROWID;

-- The newest batch that was counted of each router's process: what is told again is not counted again.
CREATE TABLE usage_batches (
  boot TEXT PRIMARY KEY,
  number INTEGER NOT NULL CHECK (number >= 1),
  at_wall_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX usage_batches_at ON usage_batches (at_wall_s);
