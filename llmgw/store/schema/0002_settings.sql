-- Versions of the cluster settings: rows are added and never changed or removed.
CREATE TABLE cluster_settings (
  version INTEGER PRIMARY KEY CHECK (version >= 1),
  parent INTEGER NOT NULL CHECK (parent = version - 1),
  document TEXT NOT NULL,                  -- TOML, in the one form that is hashed
  sha256 TEXT NOT NULL CHECK (length(sha256) = 64),
  author TEXT NOT NULL,
  reason TEXT NOT NULL,
  created_wall_s REAL NOT NULL
) STRICT;
CREATE TRIGGER cluster_settings_stay BEFORE UPDATE ON cluster_settings BEGIN SELECT RAISE(ABORT, 'a version never changes'); END;
CREATE TRIGGER cluster_settings_remain BEFORE DELETE ON cluster_settings BEGIN SELECT RAISE(ABORT, 'a version is never removed'); END;

-- What each control plane last said of the versions, by where it is reached: its name and owner may change, its address stays.
CREATE TABLE settings_applied (
  address TEXT PRIMARY KEY,
  name TEXT NOT NULL,
  said TEXT NOT NULL,                      -- JSON
  at_wall_s REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- What was refused where, kept for the history.
CREATE TABLE settings_refused (
  version INTEGER NOT NULL,
  name TEXT NOT NULL,
  why TEXT NOT NULL,
  at_wall_s REAL NOT NULL,
  PRIMARY KEY (version, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE rollout (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  row TEXT NOT NULL                        -- JSON
) STRICT;

CREATE TABLE pauses (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  reason TEXT NOT NULL,
  author TEXT NOT NULL,
  since_wall_s REAL NOT NULL
) STRICT;
