"""The WebSocket end of routers' sessions: as agents' are served, for `control.feed`.

Until the cluster has its own certificates a router presents the agents' token: both are given engines' secrets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from llmgw.admin.api.agents import make_agents_app
from llmgw.admin.auth import FailureLimit
from llmgw.admin.edge import Receive, Scope, Send
from llmgw.protocol.channel import Channel


def make_routers_app(
    run: Callable[[Channel], Awaitable[None]], token: Callable[[], str], failures: FailureLimit, draining: trio.Event
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The ASGI application of the routers' path. `run` serves one session; `token` is what a router has to present."""
    return make_agents_app(run, token, failures, draining, who="router")
