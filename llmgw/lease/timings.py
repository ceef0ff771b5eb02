"""How long things of the lease take, checked together where they are built. Pure.

The numbers are those of control.md 2: where two machines must agree on a duration, the one that acts subtracts a margin and
the one that waits adds it.
"""

from __future__ import annotations

from typing import Final

import attrs

from llmgw.domain.errors import Fault, Invalid
from llmgw.lease.record import TTL_S_MAX

RHO: Final = 0.01  # how much faster or slower than another a machine's clock may run; quartz is within 0.0002
SIGMA_S: Final = 1.0  # for what no rate explains: a thread that waits for its turn, a clock read late
REQUEST_TIMEOUT_S: Final = 3.0  # a store that has not answered by then is silent
RETRY_S: Final = 1.0  # after a silent request; at most two requests a second reach a store that throttles
EXACT: Final = 1 + 1e-9  # what rounding may make of two numbers that are equal
POLL_JITTER: Final = 0.2  # standbys that started together drift apart


@attrs.frozen
class LeaseTimings:
    """Seconds. Raises Invalid for a set that cannot work together.

    Three renewals fit into a ttl, so two may fail; a request and its retry fit between two renewals.
    """

    ttl_s: float = 15.0
    renew_s: float = 5.0
    poll_s: float = 1.0
    request_timeout_s: float = REQUEST_TIMEOUT_S
    retry_s: float = RETRY_S
    rho: float = RHO
    sigma_s: float = SIGMA_S

    @classmethod
    def of(cls, ttl_s: float = 15.0, renew_s: float = 5.0, poll_s: float = 1.0) -> LeaseTimings:
        """From the settings; the time-out and the retry shrink with `renew_s`, so that both still fit."""
        share = min(1.0, renew_s / (REQUEST_TIMEOUT_S + RETRY_S))
        return cls(ttl_s, renew_s, poll_s, REQUEST_TIMEOUT_S * share, RETRY_S * share)

    def __attrs_post_init__(self) -> None:
        faults = []
        for name in ("ttl_s", "renew_s", "poll_s", "request_timeout_s", "retry_s"):
            if not 0 < getattr(self, name) <= TTL_S_MAX:
                faults.append(Fault(name, f"must be above 0 and at most {TTL_S_MAX:g} s, not {getattr(self, name):g}"))
        if 3 * self.renew_s > self.ttl_s * EXACT:  # a third that somebody has computed, up to rounding
            faults.append(Fault("renew_s", f"must be at most a third of ttl_s ({self.ttl_s:g} s), not {self.renew_s:g}"))
        if self.request_timeout_s + self.retry_s > self.renew_s * EXACT:  # `of` makes them equal, up to rounding
            faults.append(Fault("request_timeout_s", f"and retry_s must fit into renew_s ({self.renew_s:g} s) together"))
        if self.valid_s(self.ttl_s) <= self.renew_s:
            faults.append(
                Fault("ttl_s", f"leaves {self.valid_s(self.ttl_s):g} s after its margins, no more than renew_s ({self.renew_s:g} s)")
            )
        if faults:
            raise Invalid.of("the lease's timings do not fit together", tuple(faults))

    def valid_s(self, ttl_s: float) -> float:
        """How long after it sent a write with this ttl a holder may call its lease proven, on its own clock."""
        return ttl_s * (1 - self.rho) - self.sigma_s

    def wait_s(self, ttl_s: float) -> float:
        """How long a record with this ttl must stay unchanged before a candidate may take the lease, on its own clock."""
        return ttl_s * (1 + self.rho) + self.sigma_s

    @property
    def read_gap_s(self) -> float:
        """Reads further apart are no unbroken run: whoever was frozen between them lets the holder, who may have been too, renew."""
        return 3 * self.poll_s * (1 + POLL_JITTER) + self.request_timeout_s
