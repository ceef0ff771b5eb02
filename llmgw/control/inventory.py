"""What the agents last reported, with its age; what was ordered and not yet reported; what is on its way out.

Plain state behind plain functions: sessions and the reconciler call them between awaits, so nothing here needs a lock. It
decides nothing; `observe` hands the planner immutable values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Final

import attrs

from llmgw.control.observed import Closing, Observed, ObservedNode, ObservedReplica, Refusal
from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.ids import EndpointId, NodeId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.node import NodeFacts, NodeState
from llmgw.domain.replica import ReplicaOrder, ReplicaReport, ReplicaState
from llmgw.protocol.messages import Inventory as InventoryMessage
from llmgw.store.nodes import StoredNode

# An agent that said no is asked again after this long: the file may have been put there since. Chosen: long enough that the
# history is not flooded, short enough that nobody waits for it.
REFUSAL_S: Final = 30.0
_HIDDEN_WHEN_LOST: Final = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})


@attrs.define
class NodeEntry:
    """What is known of one node's reports. `known_token` is that of the barrier it last answered."""

    facts: NodeFacts
    heard_s: float  # when it last spoke, on this machine's clock
    awaited_s: float  # when this leader began to wait for its answer to the barrier
    connected: bool = False
    clock_ahead_s: float = 0.0
    known_token: FencingToken | None = None
    obeys: FencingToken | None = None  # the highest token that its agent has said it has met
    deposed_by: FencingToken | None = None  # whom its last inventory named, where that is somebody newer than we who lead
    answered: FencingToken | None = None  # the last barrier that it answered; a session opened anew does not take it back
    replicas: dict[ReplicaId, ReplicaReport] = attrs.Factory(dict)
    reported_s: dict[ReplicaId, float] = attrs.Factory(dict)  # when each report came, so that its age goes on
    ordered: dict[ReplicaId, tuple[ReplicaOrder, float]] = attrs.Factory(dict)  # sent, not yet reported
    shown: tuple[NodeState, StoredNode | None, ObservedNode] | None = None  # what `observe` last made of it; None after news
    seen: tuple[NodeState, tuple[ObservedReplica, ...]] | None = None  # what `observe` last made of it; None after a change


@attrs.define
class _ClosingEntry:
    why: str
    deadline_s: float
    generation: int | None = None  # the published list that no longer holds it; None before that
    stop_sent: bool = False
    ended_under: int | None = None  # the epoch that its agent obeyed when the term ended in which the stop was sent


class Inventory:
    """`changed` is called after each change that the planner or the publisher may want to act on."""

    def __init__(self, now_s: Callable[[], float], changed: Callable[[], None]) -> None:
        self._now_s = now_s
        self._changed = changed
        self._nodes: dict[NodeId, NodeEntry] = {}
        self._closings: dict[ReplicaId, _ClosingEntry] = {}
        self._refusals: dict[tuple[NodeId, str, str], tuple[str, float]] = {}
        self._taken_ports: dict[NodeId, dict[int, float]] = {}
        self._drains: set[ReplicaId] = set()
        # The same tuple for as long as nothing in it has changed: the publisher and the planner know by that that nothing has.
        self._observed: tuple[ObservedReplica, ...] = ()
        self._observed_of = 0  # nodes
        self._by_name: list[tuple[NodeId, NodeEntry]] = []
        self._where: dict[ReplicaId, NodeId] = {}
        # How long a node may be silent, since when, and how long before that.
        self._lost_after_s = self._lost_after_changed_s = self._lost_before_s = 0.0

    # --- what comes in

    def expect(self, nodes: Iterable[StoredNode]) -> None:
        """Nodes that the store knows, and that may not have spoken to us yet."""
        now_s = self._now_s()
        for node in nodes:
            if node.id not in self._nodes:
                facts = NodeFacts(
                    id=node.id, name=node.name, machine_id="", boot_id="", build="", facility=node.facility, address=node.address
                )
                self._nodes[node.id] = NodeEntry(facts, now_s, now_s)

    def await_nodes(self, nodes: Iterable[StoredNode]) -> None:
        """A new term: every node from before is waited for, counted from now, and none counts as known."""
        self.expect(nodes)
        now_s = self._now_s()
        for entry in self._nodes.values():
            entry.shown = None
            entry.known_token = None
            entry.awaited_s = now_s
            if not entry.connected:
                entry.heard_s = now_s

    def opened(self, facts: NodeFacts, clock_ahead_s: float = 0.0) -> None:
        """A session of this node was opened; what it runs is not known before it has answered the barrier."""
        entry = self._nodes.get(facts.id)
        if entry is None:
            entry = self._nodes[facts.id] = NodeEntry(facts, self._now_s(), self._now_s())
        if entry.facts.boot_id not in ("", facts.boot_id):
            self._forget_refusals(facts.id)  # registered anew
        if entry.known_token is not None:  # one that never answers must not hold up the others anew at each session
            entry.awaited_s = self._now_s()
        if entry.facts.name != facts.name:
            self._by_name = []
        entry.facts, entry.connected, entry.known_token, entry.shown = facts, True, None, None
        entry.clock_ahead_s = clock_ahead_s
        self.heard(facts.id)

    def forget(self, node: NodeId) -> None:
        """It was removed: what ran there is not this cluster's any more."""
        if self._nodes.pop(node, None) is None:
            return
        self._where = {replica: of for replica, of in self._where.items() if of != node}
        self._forget_refusals(node)
        self._taken_ports.pop(node, None)
        self._by_name = []
        self._observed_of = -1  # what was last made of all nodes is made anew
        self._changed()

    def forget_all_but(self, known: Container[NodeId]) -> None:
        """On a standby: nodes that the leader has removed. One with a session stays until that ends."""
        for node, entry in list(self._nodes.items()):
            if node not in known and not entry.connected:
                self.forget(node)

    def closed(self, node: NodeId) -> None:
        if (entry := self._nodes.get(node)) is not None:
            entry.connected, entry.shown = False, None
            self._changed()

    def heard(self, node: NodeId, facts: NodeFacts | None = None) -> None:
        """The node spoke just now."""
        entry = self._nodes.get(node)
        if entry is None:
            return
        entry.heard_s, entry.shown = self._now_s(), None
        if facts is not None:
            entry.facts = facts

    def take(self, node: NodeId, message: InventoryMessage, token: FencingToken | None, obeyed: FencingToken) -> None:
        """A full inventory. The node is known when it names the token of this leader's barrier. `obeyed` is what its agent obeys."""
        entry = self._nodes[node]
        if obeyed.epoch:
            entry.obeys = obeyed
        now_s = self._now_s()
        entry.facts = message.facts
        entry.seen = entry.shown = None
        entry.replicas = {report.order.id: report for report in message.replicas}
        entry.reported_s = dict.fromkeys(entry.replicas, now_s)
        entry.deposed_by = obeyed if token is not None and obeyed.epoch > token.epoch else None
        if token is not None and (message.epoch, message.owner) == (token.epoch, token.owner):
            if entry.known_token != token:
                self._forget_untaken(entry)
            entry.known_token = entry.answered = token
        for replica in entry.replicas:
            entry.ordered.pop(replica, None)
            self._where[replica] = node
            closing = self._closings.get(replica)
            if closing is not None and closing.ended_under is not None and obeyed.epoch > closing.ended_under:
                del self._closings[replica]
        self._prune()
        self._changed()

    def _forget_untaken(self, entry: NodeEntry) -> None:
        """The node has answered the barrier: starts sent before that are not in its answer were never taken, nor stops of what is."""
        entry.ordered.clear()
        for replica in entry.replicas:
            self.stop_sent(replica, sent=False)

    def report(self, node: NodeId, report: ReplicaReport) -> None:
        """One replica's news."""
        entry = self._nodes[node]
        entry.seen = None
        entry.replicas[report.order.id] = report
        entry.reported_s[report.order.id] = self._now_s()
        self._where[report.order.id] = node
        entry.ordered.pop(report.order.id, None)
        self._changed()

    def gone(self, node: NodeId, replica: ReplicaId) -> None:
        """The agent has dropped its record."""
        entry = self._nodes[node]
        entry.seen = None
        entry.replicas.pop(replica, None)
        entry.reported_s.pop(replica, None)
        entry.ordered.pop(replica, None)
        self._prune()
        self._changed()

    def order(self, node: NodeId, order: ReplicaOrder) -> None:
        """A start was sent: the replica is pending until its agent reports it or refuses."""
        entry = self._nodes[node]
        entry.seen = None
        entry.ordered[order.id] = (order, self._now_s())
        self._where[order.id] = node

    def refuse(self, node: NodeId, replica: ReplicaId, code: str, text: str) -> None:
        """The agent said no to a start. It is believed: the order is off, and its cause is kept for a while."""
        entry = self._nodes[node]
        entry.seen = None
        ordered = entry.ordered.pop(replica, None)
        if ordered is not None:
            order, until_s = ordered[0], self._now_s() + REFUSAL_S
            if code == "port_taken":
                self._taken_ports.setdefault(node, {})[order.port] = until_s
            else:
                self._refusals[node, order.model, order.profile.digest()] = (text, until_s)
        self._changed()

    def reopen(self, model: str) -> None:
        """Forget the refusals of this model: it was changed, or somebody asked for another try."""
        self._refusals = {key: value for key, value in self._refusals.items() if key[1] != model}

    def _forget_refusals(self, node: NodeId) -> None:
        self._refusals = {key: value for key, value in self._refusals.items() if key[0] != node}
        self._taken_ports.pop(node, None)

    def set_drains(self, replicas: Iterable[ReplicaId]) -> None:
        """A new term: what operators asked to go, as the store has it."""
        self._drains = set(replicas)
        for entry in self._nodes.values():
            entry.seen = None

    def awaits(self) -> bool:
        """Is there a node whose inventory has not come yet, in this term or on this standby?"""
        return any(entry.known_token is None for entry in self._nodes.values())

    def ended_drains(self) -> frozenset[ReplicaId]:
        """Orders whose replica is gone, once every node is known: before that it may still turn up."""
        if self.awaits():
            return frozenset()
        return frozenset(replica for replica in self._drains if self.find(replica) is None)

    def drain_replica(self, replica: ReplicaId) -> None:
        """An operator asks for this one to go; another takes its place first where there is room."""
        self._drains.add(replica)
        if (found := self.find(replica)) is not None:
            self._nodes[found[0]].seen = None
        self._changed()

    # --- on the way out

    def close(self, replica: ReplicaId, why: str, deadline_s: float) -> bool:
        """Begin to let a replica go, by `deadline_s` from now. False when it is on its way already."""
        if replica in self._closings:
            return False
        self._closings[replica] = _ClosingEntry(why, self._now_s() + deadline_s)
        return True

    def closing(self, replica: ReplicaId) -> bool:
        return replica in self._closings

    def published(self, generation: int, endpoints: frozenset[EndpointId]) -> None:
        """A list went out: closings that it no longer holds are withdrawn by this generation."""
        for replica, entry in self._closings.items():
            if entry.generation is None and EndpointId(replica) not in endpoints:
                entry.generation = generation

    def stop_sent(self, replica: ReplicaId, sent: bool = True) -> None:
        if (entry := self._closings.get(replica)) is not None:
            entry.stop_sent = sent

    def forget_sent_stops(self) -> None:
        """A new term: whether a stop of before was taken is for the agents' inventories to say."""
        for entry in self._closings.values():
            entry.stop_sent, entry.ended_under = False, None

    def end_term(self) -> None:
        """Somebody else leads from here on: what was ordered and begun is for that one's inventories to say."""
        kept = {}
        for replica, closing in self._closings.items():
            # A stop that is under way may still be taken: until its agent obeys somebody newer, who refuses it, nothing is routed there.
            if closing.stop_sent and (found := self.find(replica)) is not None:
                obeys = self._nodes[found[0]].obeys
                closing.ended_under = obeys.epoch if obeys is not None else 0
                kept[replica] = closing
        self._closings = kept
        self._refusals.clear()
        for entry in self._nodes.values():
            entry.ordered.clear()
            # Whoever has told us of the one who leads now, before we had heard of it, does not say so again.
            entry.known_token, entry.deposed_by = entry.deposed_by, None
            entry.seen = entry.shown = None
        self._changed()

    def _prune(self) -> None:
        if len(self._where) > 2 * sum(len(entry.replicas) for entry in self._nodes.values()) + 100:
            self._where = {replica: node for replica, node in self._where.items() if self.find(replica) is not None}
        if not self._closings:
            return
        alive = {replica for entry in self._nodes.values() for replica in (*entry.replicas, *entry.ordered)}
        self._closings = {replica: entry for replica, entry in self._closings.items() if replica in alive}

    # --- what is read

    def entry(self, node: NodeId) -> NodeEntry | None:
        return self._nodes.get(node)

    def find(self, replica: ReplicaId) -> tuple[NodeId, ReplicaReport] | None:
        """Where a replica is and what was last said of it; an ordered one that is not reported yet is pending."""
        node = self._where.get(replica)
        if node is None:
            return None
        entry = self._nodes[node]
        if (report := entry.replicas.get(replica)) is not None:
            return node, report
        if (ordered := entry.ordered.get(replica)) is not None:
            return node, ReplicaReport(ordered[0], ReplicaState.PENDING, "ordered", attempt=0)
        return None

    def known_if_unsettled(self, token: FencingToken | None, counted: Container[NodeId]) -> frozenset[EndpointId] | None:
        """The replicas that are known while a node of `counted` has not answered the barrier of `token`; None once all have.

        A node that never answers counts as unheard for as long as it is not removed: what nobody hears from may still serve.
        """
        if all(entry.answered == token for node, entry in self._nodes.items() if node in counted):
            return None
        return frozenset(EndpointId(replica) for entry in self._nodes.values() for replica in entry.replicas)

    def obeyed(self) -> FencingToken | None:
        """The highest token that any connected agent obeys: under whose orders the cluster is now, as seen from here."""
        tokens = (entry.obeys for entry in self._nodes.values() if entry.connected and entry.obeys is not None)
        return max(tokens, key=lambda token: token.epoch, default=None)

    def connected_facts(self) -> tuple[NodeFacts, ...]:
        return tuple(entry.facts for entry in self._nodes.values() if entry.connected)

    def heard_and_counted(self, lost_after_s: float) -> tuple[int, int]:
        """(nodes heard lately, nodes that count), for the powers of an unconfirmed leader."""
        now_s = self._now_s()
        ages = [now_s - entry.heard_s for entry in self._nodes.values()]
        return sum(age <= lost_after_s for age in ages), sum(age <= 3600.0 for age in ages)

    def observe(
        self,
        token: FencingToken | None,
        stored: Mapping[NodeId, StoredNode],
        use: Mapping[EndpointId, EndpointUse],
        acknowledged: int,
        node_lost_after_s: float,
        grace_s: float,
        wall_s: float,
    ) -> Observed:
        """Everything as values, sorted. `acknowledged` is the generation that all connected routers have reached.

        `token` is this leader's, whose barrier makes a node known; None on a standby, to which any inventory does.
        """
        now_s = self._now_s()
        if node_lost_after_s != self._lost_after_s:
            self._lost_before_s, self._lost_after_s, self._lost_after_changed_s = self._lost_after_s, node_lost_after_s, now_s
        self._refusals = {key: value for key, value in self._refusals.items() if value[1] > now_s}
        nodes: list[ObservedNode] = []
        replicas: list[tuple[ObservedReplica, ...]] = []
        same = True
        for node_id, entry in self._sorted_nodes():
            unheard_s = now_s - entry.heard_s
            known = entry.known_token is not None if token is None else entry.known_token == token
            # After a change of role nobody is lost before the grace has passed: its session may still be on the way.
            lost_after_s = self._may_be_silent_s(entry)
            if unheard_s > (lost_after_s if known else max(grace_s, lost_after_s)):
                state = NodeState.LOST
            else:
                state = NodeState.READY if known else NodeState.UNKNOWN
            node = self._observe_node(node_id, entry, state, stored.get(node_id), now_s, wall_s)
            nodes.append(node)
            if entry.seen is None or entry.seen[0] is not state:
                entry.seen = (state, tuple(self._observe_replicas(node_id, entry, state)))
                same = False
            replicas.append(entry.seen[1])
        if not same or len(replicas) != self._observed_of:
            self._observed = tuple(replica for of_node in replicas for replica in of_node)
            self._observed_of = len(replicas)
        closings = tuple(
            Closing(
                replica=replica_id,
                why=entry.why,
                withdrawn=entry.generation is not None and acknowledged >= entry.generation,
                used=use.get(EndpointId(replica_id), EndpointUse()).in_flight > 0,
                left_s=entry.deadline_s - now_s,
                stop_sent=entry.stop_sent,
            )
            for replica_id, entry in sorted(self._closings.items())
        )
        refusals = tuple(Refusal(node, model, digest, text) for (node, model, digest), (text, _) in sorted(self._refusals.items()))
        return Observed(tuple(nodes), self._observed, closings, refusals, now_s)

    def _may_be_silent_s(self, entry: NodeEntry) -> float:
        """A shorter time counts from its change for whoever was silent in good faith then: its next sign of life was due later."""
        silent_s = self._lost_after_changed_s - entry.heard_s
        return max(self._lost_after_s, min(self._lost_before_s, silent_s + self._lost_after_s))

    def _sorted_nodes(self) -> list[tuple[NodeId, NodeEntry]]:
        if len(self._by_name) != len(self._nodes):
            self._by_name = sorted(self._nodes.items(), key=lambda item: (item[1].facts.name, item[0]))
        return self._by_name

    def _observe_node(
        self, node_id: NodeId, entry: NodeEntry, state: NodeState, row: StoredNode | None, now_s: float, wall_s: float
    ) -> ObservedNode:
        """The same value as before for as long as the node has said nothing and nobody has ordered anything about it."""
        ports = self._taken_ports.get(node_id)
        deadline_s = row.drain_deadline_wall_s if row is not None else None
        shown = entry.shown
        if shown is not None and shown[0] is state and shown[1] is row and ports is None and deadline_s is None:
            return shown[2]
        facts = entry.facts
        if row is not None and row.labels:
            facts = attrs.evolve(facts, labels={**facts.labels, **row.labels})
        node = ObservedNode(
            facts=facts,
            state=state,
            connected=entry.connected,
            heard_s=entry.heard_s,
            awaited_since_s=entry.awaited_s,
            clock_ahead_s=entry.clock_ahead_s,
            cordoned=row is not None and row.cordoned,
            draining=row is not None and row.draining,
            drain_left_s=None if deadline_s is None else deadline_s - wall_s,
            taken_ports=frozenset(port for port, until_s in (ports or {}).items() if until_s > now_s),
        )
        entry.shown = (state, row, node)
        return node

    def _observe_replicas(self, node: NodeId, entry: NodeEntry, state: NodeState) -> Iterator[ObservedReplica]:
        for replica, report in sorted(entry.replicas.items()):
            lost = state is NodeState.LOST and report.state not in _HIDDEN_WHEN_LOST
            shown = ReplicaState.LOST if lost else report.state
            yield ObservedReplica(node, report, shown, entry.reported_s[replica] - report.age_s, replica in self._drains)
        for _, (order, sent_s) in sorted(entry.ordered.items()):
            if state is not NodeState.LOST:
                pending = ReplicaReport(order, ReplicaState.PENDING, "ordered", attempt=0)
                yield ObservedReplica(node, pending, ReplicaState.PENDING, sent_s)
