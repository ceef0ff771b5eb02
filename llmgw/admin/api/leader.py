"""`/leader`: who leads, handing it over, and the words that control planes have for each other."""

from __future__ import annotations

from typing import Any, Final

from llmgw.admin.calls import Call, Reply, Route
from llmgw.admin.peer_client import CHANGED_PATH, NEWS_PATH, PRESENT_PATH, RELEASED_PATH, USAGE_PATH
from llmgw.admin.store_news import encode_news
from llmgw.control.controller import Controller
from llmgw.control.peers import Presence
from llmgw.domain.errors import Denied, Invalid, Unavailable
from llmgw.domain.ids import OwnerId, holder_name
from llmgw.domain.lease import LeaseRole
from llmgw.domain.settings_version import PlaneSettings
from llmgw.domain.usage import UsageBatch
from llmgw.protocol.codec import structure
from llmgw.store.admin_tokens import Role
from llmgw.store.copies import CopiedStore, Position

WORD_MAX: Final = 300  # characters of a text in a control plane's word


def routes(controller: Controller) -> tuple[Route, ...]:
    async def show(call: Call) -> Reply:
        return Reply(leader_view(controller))

    async def hand_over(call: Call) -> Reply:
        force = call.table(("force",), optional=True).get("force", False)
        if not isinstance(force, bool):
            raise Invalid("force is true or false", param="force")
        if not force:
            controller.rollouts.check_hand_over()
        await controller.peers.check_healthy()
        controller.leadership.hand_over(force=force)
        return Reply({**leader_view(controller), "change": "handing over"}, 202)

    async def present(call: Call) -> Reply:
        _from_peer(call)
        await controller.peers.heard_from(read_presence(call.table()))
        return Reply(leader_view(controller))

    async def released(call: Call) -> Reply:
        _from_peer(call)
        controller.leadership.look()
        return Reply(leader_view(controller))

    async def changed(call: Call) -> Reply:
        _from_peer(call)
        controller.look_at_store()
        return Reply({})

    async def usage(call: Call) -> Reply:
        _from_peer(call)
        await controller.usage.take(structure(call.table(), UsageBatch))
        return Reply({})

    async def store(call: Call) -> Reply:
        _from_peer(call)
        if not isinstance(controller.store, CopiedStore):
            raise Unavailable("the store of this control plane is not replicated", code="not_replicated")
        number_max = 2**53
        position = Position(call.integer("epoch", 0, 0, number_max), call.integer("number", 0, 0, number_max))
        news = await controller.store.news(position)
        return Reply(text=await controller.machine.run_sync(lambda: encode_news(news)))

    return (
        Route("GET", "/api/v1/leader", show, "Who leads, under which epoch, with which powers, and who stands by", late=True),
        Route("POST", "/api/v1/leader/hand-over", hand_over, "Let another control plane lead", Role.OPERATOR,
              {"force": "true: also where there is none; takes a new epoch"}, remembered=False),
        Route("POST", PRESENT_PATH, present, "A standby presents itself; for control planes only", Role.ADMIN,
              remembered=False, local=True),
        Route("POST", RELEASED_PATH, released, "The lease was released; for control planes only", Role.ADMIN,
              remembered=False, local=True),
        Route("POST", CHANGED_PATH, changed, "The settings or keys changed: look now; for control planes only", Role.ADMIN,
              remembered=False, local=True),
        Route("GET", NEWS_PATH, store, "What is new in a replicated store; for control planes only", Role.ADMIN,
              query={"epoch": "of the position that the standby has", "number": "of changes that it has of that epoch"},
              remembered=False, local=True),
        Route("POST", USAGE_PATH, usage, "What a standby's own router has counted; for control planes only", Role.ADMIN,
              remembered=False, local=True),
    )  # fmt: skip


def leader_view(controller: Controller) -> dict[str, Any]:
    """`owner` is null while nobody is known to lead: who has taken the lease and gets ready is its owner already.

    `power` is null where somebody else leads: that one knows.
    """
    leadership = controller.leadership
    now_s = controller.machine.now_s()
    power = leadership.power(now_s)
    leads = leadership.is_leader
    record = leadership.record
    other = record if not leads and record is not None and not record.released and record.owner != leadership.owner else None
    holds = leads or leadership.role(now_s) is LeaseRole.WARMING
    owner = leadership.owner if holds else other.owner if other is not None else None
    return {
        "cluster_id": leadership.cluster_id,
        "owner": owner,
        "holder": holder_name(owner) if owner is not None else None,
        "epoch": leadership.epoch if holds else record.epoch if record is not None else 0,
        "address": other.addr if other is not None else controller.address,
        "is_me": leads,
        "role": leadership.role(now_s).value,
        "power": None if power is None else power.value,
        "seconds_left": round(leadership.seconds_left(now_s), 1) if leads else None,
        "standbys": [
            {
                "name": holder_name(one.owner),
                "owner": one.owner,
                "address": one.address,
                "build": one.build,
                "nodes_heard": one.nodes_heard,
                "disk_fine": one.disk_fine,
                "heard_age_s": round(age_s, 1),
            }
            for one, age_s in controller.peers.standbys()
        ]
        if leads
        else [],
    }


def read_presence(table: dict[str, Any]) -> Presence:
    """Unknown keys are skipped: a neighbouring build may say more. Raises Invalid."""
    texts = {name: table.get(name, "") for name in ("owner", "address", "build", "token_sha256", "reached_at")}
    heard = table.get("nodes_heard", 0)
    if not all(isinstance(text, str) and len(text) <= WORD_MAX for text in texts.values()) or not texts["owner"]:
        raise Invalid("a standby names itself with texts: owner, address, build, token_sha256, reached_at")
    if type(heard) is not int or heard < 0:
        raise Invalid("nodes_heard is a whole number from 0", param="nodes_heard")
    said = structure(table.get("settings") or {}, PlaneSettings)
    return Presence(
        OwnerId(texts["owner"]),
        texts["address"],
        texts["build"],
        heard,
        texts["token_sha256"],
        table.get("disk_fine") is not False,
        said,
        texts["reached_at"],
    )


def _from_peer(call: Call) -> None:
    if not call.principal.peer:
        raise Denied("only control planes of this cluster say this to each other", code="role")
