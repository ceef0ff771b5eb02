"""What is known of nodes when a leader learns that it is none any more."""

from __future__ import annotations

from llmgw.control.inventory import Inventory
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.node import NodeState
from llmgw.protocol import messages as m
from tests.admin.test_agents import facts

OURS, THEIRS = (FencingToken(ClusterId("c"), epoch, OwnerId(owner)) for epoch, owner in ((1, "us"), (2, "them")))
FACTS = facts("n1")


def states(inventory: Inventory) -> list[NodeState]:
    """On a standby."""
    observed = inventory.observe(None, {}, {}, 0, node_lost_after_s=30.0, grace_s=60.0, wall_s=0.0)
    return [node.state for node in observed.nodes]


def led() -> Inventory:
    """With a node that has answered our barrier."""
    inventory = Inventory(lambda: 0.0, lambda: None)
    inventory.opened(FACTS)
    inventory.take(FACTS.id, m.Inventory(FACTS, (), OURS.epoch, OURS.owner), OURS, OURS)
    return inventory


def test_what_a_node_reports_under_its_next_leader_makes_it_known_to_the_one_before() -> None:
    inventory = led()
    inventory.end_term()
    assert states(inventory) == [NodeState.UNKNOWN]
    inventory.take(FACTS.id, m.Inventory(FACTS, (), THEIRS.epoch, THEIRS.owner), THEIRS, THEIRS)
    assert states(inventory) == [NodeState.READY]


def test_a_node_that_reports_under_its_next_leader_before_the_one_before_has_heard_of_it_is_known_all_the_same() -> None:
    """A leader that was frozen reads its agents' messages first. They are not sent again: it took the node for unknown ever after."""
    inventory = led()
    inventory.take(FACTS.id, m.Inventory(FACTS, (), THEIRS.epoch, THEIRS.owner), OURS, THEIRS)
    inventory.end_term()
    assert states(inventory) == [NodeState.READY]
