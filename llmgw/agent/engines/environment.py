"""The environment an engine is given: the agent's own without our secrets and without proxies.

By rule of names rather than by list: an engine is somebody else's program, and what it does not get it cannot leak. A
secret that an engine does need (such as HF_TOKEN) is given in the profile's `env`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from llmgw.agent.engines.description import Launch, Place

START_VARIABLE: Final = "LLMGW_START"  # the start token: whoever holds it in its environment is ours, whatever its parent

_PROXIES: Final = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY"})
# llama.cpp's options: one in the agent's own environment would be one that nobody asked of this model.
_OPTIONS: Final = re.compile(r"^LLAMA_ARG_|^AIP_")
_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|_KEY$|APIKEY|_DSN$|^AWS_|^LLMGW_")
# systemd's notes to the agent: an engine that spoke on them would speak for the agent.
_SUPERVISION: Final = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID", "JOURNAL_STREAM"}
)
_DEVICES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """What an engine may inherit."""
    return {
        name: value
        for name, value in environment.items()
        if name.upper() not in _PROXIES
        and not _SECRET.search(name.upper())
        and not _OPTIONS.search(name)
        and name not in _SUPERVISION
        and name not in _DEVICES
    }


def engine_environment(environment: Mapping[str, str], place: Place, launch: Launch, start_token: str) -> dict[str, str]:
    """The whole environment of one attempt. The profile's own `env` wins over everything but what identifies the process."""
    return {
        **scrubbed(environment),
        "PYTHONUNBUFFERED": "1",  # or the last lines before a crash stay in a buffer
        "SPT_NOENV": "1",  # setproctitle would else overwrite the environment that we know our processes by
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": place.gpus,  # empty on the CPU: such an engine must not take a GPU that nobody counted
        **place.order.profile.env,
        **launch.env,
        START_VARIABLE: start_token,
    }
