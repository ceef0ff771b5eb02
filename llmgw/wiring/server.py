"""The role `server`: a control plane, with a router in the same process unless its file says otherwise.

`run_control_plane` is also what `dev` runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.admin.auth import AdminAuth
from llmgw.admin.app import make_app
from llmgw.admin.serve import bind_admin, serve_admin
from llmgw.control.controller import Controller, Objects
from llmgw.control.settings_poller import poll_file
from llmgw.domain.errors import Invalid
from llmgw.domain.ids import OWNER_RANDOM_BYTES, OwnerId, owner_id
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine
from llmgw.router.access_log import AccessLog
from llmgw.router.router import Router, serve
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.settings.secrets import read_environment
from llmgw.store import meta
from llmgw.store.connection import Store
from llmgw.wiring.checkpoints import size_of_files
from llmgw.wiring.data_dir import claim, claim_file
from llmgw.wiring.logs import configure_logs
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.signals import wait_for_stop
from llmgw.wiring.tokens import ensure_token

PRIVATE_STORE: Final = "state.db"  # without [store]: nodes, events and holds of this control plane alone
ADMIN_TOKEN_FILE: Final = "admin-token"
AGENT_TOKEN_FILE: Final = "agent-token"
log = structlog.get_logger("llmgw.server")
