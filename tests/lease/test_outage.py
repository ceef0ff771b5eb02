"""An outage of storage as an operator reads of it: one line when it begins, one when all of it is over."""

from __future__ import annotations

from structlog.testing import capture_logs

from llmgw.lease.outage import BACK, LEASE_FAULT, Outage, Part


def test_parts_that_fail_together_are_one_outage_from_the_first_to_the_last():
    outage = Outage()
    with capture_logs() as logs:
        outage.failed(Part.STORE, "the disk is full", 10.0)
        outage.failed(Part.STORE, "the disk is full", 11.0)
        outage.failed(Part.LEASE, "full", 12.0)
        outage.works(Part.STORE, 20.0)
        outage.failed(Part.STORE, "the disk is full", 21.0)
        outage.works(Part.LEASE, 22.0)
        outage.works(Part.STORE, 25.0)
        outage.works(Part.STORE, 26.0)
    (first, last) = [entry for entry in logs if entry["log_level"] != "debug"]
    assert (first["log_level"], first["why"]) == ("warning", "the disk is full")
    assert "takes no writes" in first["event"]
    assert (last["log_level"], last["event"], last["after_s"]) == ("info", BACK, 15.0)


def test_the_next_outage_is_told_anew_and_a_damaged_lease_in_its_own_words():
    outage = Outage()
    with capture_logs() as logs:
        outage.works(Part.LEASE, 1.0)
        outage.failed(Part.LEASE, "locked", 2.0)
        outage.works(Part.LEASE, 3.0)
        outage.failed(Part.LEASE, "not JSON", 4.0, event=LEASE_FAULT)
    assert [entry["log_level"] for entry in logs] == ["warning", "info", "warning"]
    assert logs[-1]["event"] == LEASE_FAULT
