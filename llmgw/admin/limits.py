"""How much one client may ask of the admin port, each with its reason. The web stack's defaults are not ours."""

from __future__ import annotations

import attrs


@attrs.frozen
class Limits:
    """Sizes in bytes, times in seconds. Tests shrink them; nothing else does."""

    # The request line and all headers together, the same number however they arrive in segments. As the router's default.
    head_bytes: int = 16_384
    # Bodies are tables of models: 1,000 large ones stay below 2 MiB.
    body_bytes: int = 4 * 1024 * 1024
    body_s: float = 30.0  # for a whole body; at 4 MiB that is a very slow line
    # An idle connection, and one that has not finished its first head.
    keep_alive_s: float = 30.0
    # A client that takes not one byte for so long is gone: a phone in a tunnel must not hold up our end.
    send_stall_s: float = 20.0
    # How long a drained server lets answers finish; systemd's own limit is far above.
    drain_s: float = 5.0
    # A closing connection is read for so long, so that what the client still sends does not reset our answer.
    linger_s: float = 2.0
    handshake_s: float = 10.0
    # Comments on a silent event stream: below the 60 s after which common proxies give up a connection. Also how long the hang-up
    # of a client that has pipelined another request behind its stream goes unnoticed: reading stops at that request.
    comment_s: float = 15.0
    # Failed sign-ins of one address in a minute before it is told to wait; right tokens always pass.
    failures_max: int = 30
