"""How long to wait before connecting again, when connections end soon after they were made."""

from __future__ import annotations

from bufstore.jetstream.short_lives import ShortLives


def test_a_connection_that_lived_for_long_is_made_again_at_once() -> None:
    lives = ShortLives()
    for now in (100, 200):
        lives.made(now)
        assert lives.ended(now + 60, "away") == (0, True)


def test_connections_that_end_at_once_are_made_ever_more_slowly_and_told_once() -> None:
    lives, now, told = ShortLives(), 100.0, list[str]()
    for reason in ["full"] * 200 + ["away"] * 200:
        lives.made(now)
        pause, news = lives.ended(now, reason)
        told += [reason] if news else []
        now += pause
    assert told == ["full", "away"]
    assert 700 < now - 100 < 800
    lives.made(now)
    assert lives.ended(now + 60, "away") == (0, True)
    lives.made(now + 60)
    assert lives.ended(now + 61, "full") == (0.01, True)


def test_what_has_to_be_learnt_from_a_few_connections_is_learnt_soon() -> None:
    lives, waited = ShortLives(), 0.0
    for _ in range(6):
        lives.made(0)
        waited += lives.ended(0, "maximum payload")[0]
    assert waited < 1
