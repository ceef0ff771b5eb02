"""What is told of a control plane that was lost."""

from __future__ import annotations

from llmgw.domain.errors import Denied, Unavailable
from llmgw.protocol.channel import ChannelClosed
from llmgw.protocol.losses import Loss

AWAY = Unavailable("127.0.0.1:8081 cannot be reached")
DENIED = Denied("it refused the agent's token", code="token_refused")


def test_the_end_of_a_session_and_the_refused_connections_after_it_are_one_loss():
    loss = Loss()
    assert [loss.is_news(err) for err in (ChannelClosed("connection lost"), AWAY, None, AWAY)] == [True, False, False, False]
    loss.over()
    assert loss.is_news(AWAY)


def test_a_cause_that_a_person_must_see_to_is_told_though_the_loss_was_and_once():
    loss = Loss()
    assert [loss.is_news(err) for err in (AWAY, DENIED, AWAY, DENIED, AWAY)] == [True, True, False, False, False]
