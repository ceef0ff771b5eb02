"""Litestream's configuration as we write it: one database, one prefix, nothing left to the environment. Pure.

Keys and their reasons are in R-C.2. It is JSON, which is YAML; a name is then never anything but a name. Nothing secret is in it:
credentials are in the child's environment, since a session token would be dropped if they stood here (R-B26).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from llmgw.settings.object_place import ObjectPlace

# Each acknowledged batch is an object of level 0, and a restore lists them: they are gathered every 5 s (measured: 428 of them in
# 25 s restore in 0.4 s so, and in 1.1 s with the default of 30 s).
LEVELS: Final = ("5s", "1m", "1h")
SNAPSHOT: Final = ("1h", "24h")  # how often, and how long they stay: a restore never reads more than an hour of changes
L0_RETENTION: Final = "10m"  # a slow restore still finds what it has listed (R-B48)
MONITOR: Final = "1s"  # the safety net for what nobody waits for; acknowledged writes ask by themselves
END_S: Final = "5s"  # of the last uploads after SIGTERM; whoever must be sure has asked before
SOCKET_MODE: Final = 0o600


def configuration(place: ObjectPlace, prefix: str, database: Path, meta: Path, socket: str) -> bytes:
    """`prefix` is below the place's own; `socket` is relative to the folder that the child runs in.

    The region is always said: without it the child would look it up at its start, and fail while the store is down.
    """
    return json.dumps(
        {
            "socket": {"enabled": True, "path": socket, "permissions": SOCKET_MODE},
            "logging": {"type": "json", "level": "info", "stderr": True},
            "levels": [{"interval": interval} for interval in LEVELS],
            "snapshot": {"interval": SNAPSHOT[0], "retention": SNAPSHOT[1]},
            "l0-retention": L0_RETENTION,
            "shutdown-sync-timeout": END_S,
            "dbs": [
                {
                    "path": str(database),
                    "meta-path": str(meta),
                    "monitor-interval": MONITOR,
                    "replica": {
                        "type": "s3",
                        "bucket": place.bucket,
                        "path": place.key(prefix),
                        "endpoint": place.endpoint,
                        "region": place.region,
                        "force-path-style": True,
                        "sync-interval": MONITOR,
                    },
                }
            ],
        },
        indent=1,
    ).encode()
