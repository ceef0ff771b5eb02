-- The one CA of this cluster: its certificate, for all to see. Its key is in no store.
CREATE TABLE cluster_ca (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  pin TEXT NOT NULL,
  certificate TEXT NOT NULL                -- PEM
) STRICT;

-- What lets a machine in, once. Only hashes of them are here.
CREATE TABLE join_tokens (
  id TEXT PRIMARY KEY,
  sha256 TEXT NOT NULL UNIQUE CHECK (length(sha256) = 64),
  role TEXT NOT NULL CHECK (role IN ('server', 'agent', 'router')),
  name TEXT NOT NULL,                      -- the machine's name; empty: whichever it chooses
  created_wall_s REAL NOT NULL,
  created_by TEXT NOT NULL,
  expires_wall_s REAL NOT NULL,
  used_wall_s REAL,
  used_name TEXT NOT NULL DEFAULT '',
  used_key TEXT NOT NULL DEFAULT '',       -- the hash of the key that joined by it: its repeats are answered, nobody else's
  used_peer TEXT NOT NULL DEFAULT '',      -- from where
  revoked_wall_s REAL,
  revoked_by TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;

-- Who holds which certificate.
CREATE TABLE identities (
  serial TEXT PRIMARY KEY,                 -- hex, lower case, without leading zeros
  role TEXT NOT NULL CHECK (role IN ('server', 'agent', 'router')),
  name TEXT NOT NULL,
  key TEXT NOT NULL,                       -- the hash of its public key
  addresses TEXT NOT NULL,                 -- JSON: names and IP addresses that it is for
  issued_wall_s REAL NOT NULL,
  issued_for TEXT NOT NULL,                -- the id of a join token, or 'renewal', or 'self' of a control plane
  not_after_wall_s REAL NOT NULL,
  revoked_wall_s REAL,
  revoked_by TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE INDEX identities_of ON identities (role, name);
