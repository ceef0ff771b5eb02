"""The network between a leader, the object store and the agents is cut, in a namespace of the test's own: by a black hole, in which
nothing is answered, and by resets. No request fails, no engine moves, no acknowledged change is lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.chaos.bucket import Bucket
from tests.chaos.faults import pass_time
from tests.chaos.network import BLACK_HOLE, RESET, Network, own_network
from tests.chaos.planes import FULL, NODE_LOST_AFTER_S, NODES, PLANES, SPARE, Plane, Site, figure, running_load, since
from tests.chaos.test_replicated import LEASE, kept
from tests.chaos.writer import Writer, Writing, lost_or_doubled
from tests.programs import call, wait_for
from tests.seaweed import seaweed

pytestmark = pytest.mark.slow

TO_STORE = {name: number for number, name in enumerate(PLANES, 11)}
TO_AGENTS = {name: number for number, name in enumerate(PLANES, 21)}
DEAF_S = 60.0  # after so long a leader hands over to whoever hears more nodes
ROUNDS = 3 if FULL else 1
HOW = [BLACK_HOLE, RESET]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with own_network() as one:
        yield one


@pytest.fixture(scope="module")
def ways(network: Network) -> dict[str, tuple[str, str]]:
    """Of each control plane: its way to the store, and that of agents and routers to it."""
    return {name: (network.way(TO_STORE[name]), network.way(TO_AGENTS[name])) for name in PLANES}


@pytest.fixture(scope="module")
def bucket(network: Network, ways: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    folder = tmp_path_factory.mktemp("bucket")
    with seaweed(folder) as server:
        endpoints = {name: f"http://{to_store}:{server.ports['s3']}" for name, (to_store, _) in ways.items()}
        yield Bucket(server, folder / "tokens", endpoints=endpoints)


@pytest.fixture(scope="module")
def site(bucket: Bucket, ways: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    hosts = {name: to_it for name, (_, to_it) in ways.items()}
    site = Site(tmp_path_factory.mktemp("network"), **LEASE, store=bucket.folder, kept=bucket, hosts=hosts)
    try:
        site.start_all()
        yield site
    finally:
        site.close()


def refused(plane: Plane) -> str:
    """The code of its refusal of an order."""
    headers = {"authorization": f"Bearer {plane.token}"}
    status, answer = call(f"127.0.0.1:{plane.port}", "POST", f"/api/v1/models/{SPARE}/scale", {"count": 1}, headers)
    assert status == 503, answer
    return str(answer["error"]["code"])


@pytest.mark.parametrize("how", HOW if FULL else HOW[:1])
def test_a_leader_that_is_cut_from_the_store_is_succeeded_and_obeyed_no_more_and_stands_by_when_it_hears_of_it(
    site: Site, bucket: Bucket, network: Network, ways: dict[str, tuple[str, str]], request: pytest.FixtureRequest, how: str
) -> None:
    site.wait_whole()
    planes = list(site.planes.values())
    writer = Writer(f"w{how[:1]}", [site.leader(), site.other(site.leader())], 1)
    took_s = []
    with site.undisturbed() as load:
        thread = Writing(writer, 0.05)
        try:
            for _ in range(ROUNDS):
                site.wait_whole()
                leader = site.leader()
                other = site.other(leader)
                before, seen = leader.leader(), len(leader.output)
                with network.cut(ways[leader.name][0], how):
                    begun_s = time.monotonic()
                    wait_for(other.confirmed, "the other one leads")
                    took_s.append(since(begun_s))
                    upto = writer.acknowledged + 5
                    wait_for(lambda: writer.acknowledged >= upto or writer.wrong, "the new one takes writes")  # noqa: B023
                    load.wait_more(200)
                    now = leader.leader()
                    assert now is not None
                    assert now["power"] != "confirmed"
                    assert refused(leader)
                wait_for(lambda: leader.log_of("the lease is lost", seen), "the old one hears of it")  # noqa: B023
                wait_for(lambda: (leader.leader() or {}).get("is_me") is False, "and stands by")  # noqa: B023
                assert other.leader()["epoch"] > before["epoch"]
        finally:
            thread.finish()
        assert writer.wrong == []
        assert lost_or_doubled(bucket.restored(), [writer]) == []
        assert not any("Traceback" in plane.output for plane in planes)
    figure(request, f"leader cut from the store ({how}): other CONFIRMED after", kept(took_s))
    figure(request, f"leader cut from the store ({how}): requests failed", load.counts)
    figure(request, f"leader cut from the store ({how}): acknowledged changes lost or doubled", f"0 of {writer.acknowledged}")


@pytest.mark.parametrize("how", HOW if FULL else HOW[1:])
def test_a_leader_that_is_cut_from_its_agents_moves_nothing_and_leaves_it_to_one_that_hears_them(
    site: Site, network: Network, ways: dict[str, tuple[str, str]], request: pytest.FixtureRequest, how: str
) -> None:
    """Nobody else knows that it is deaf before it says so, which it does after a minute; the short form heals before that."""
    site.wait_whole()
    leader = site.leader()
    other = site.other(leader)
    epoch = leader.leader()["epoch"]
    engines, spares = site.engines(), site.engines(SPARE)
    with running_load(site) as load:
        with network.cut(ways[leader.name][1], how):
            begun_s = time.monotonic()
            wait_for(lambda: all(node["state"] != "ready" for node in leader.admin("GET", "/nodes")["nodes"]), "it hears no node")
            pass_time(2 * NODE_LOST_AFTER_S)
            load.wait_more(200)
            assert leader.confirmed()
            assert sum(node["state"] == "ready" for node in other.admin("GET", "/nodes")["nodes"]) == len(NODES)
            if FULL:
                wait_for(other.confirmed, "the one that hears them leads", 2 * DEAF_S)
                figure(request, f"leader cut from agents and routers ({how}): other CONFIRMED after", f"{since(begun_s):.2f} s")
            else:
                assert leader.leader()["epoch"] == epoch
            assert (site.engines(), site.engines(SPARE)) == (engines, spares)
        site.wait_whole()
        # Of two nodes the one that is back first may be given what ran on the other: the brake against that begins with three.
        wait_for(lambda: (site.engines(), site.engines(SPARE)) == (engines, spares), "what ran still runs, and nothing else", 120)
        load.wait_more(100)
    assert load.told["failed"] == 0, load.told["failures"]
    figure(request, f"leader cut from agents and routers ({how}): requests failed", load.counts)
