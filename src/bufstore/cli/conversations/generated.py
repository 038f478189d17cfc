"""Generated conversations of a tool-calling support agent: the same seed gives the same conversations."""

from __future__ import annotations

import json
import random
from typing import Any

Message = dict[str, Any]

_POLICY = (
    "You are the support agent of an online shop. Look things up before you answer, change nothing without the "
    "customer's consent, and hand over to a person what you cannot do."
)
_NAMES = ("Aisha", "Björn", "Chloé", "Dmitri", "Eun-ji", "Fatima", "Goran", "Hana", "Íñigo", "Jürgen", "中村", "Łukasz")
_THINGS = ("headphones", "a rain jacket", "the espresso machine", "two bicycle lights", "a desk lamp", "running shoes")
_WISHES: dict[str, str] = {
    "find_order": "Where is my order {order}? It should have come on {day}.",
    "cancel_order": "Please cancel {order}, I no longer need {thing}.",
    "request_refund": "I sent {thing} back and my money has not arrived ({order}).",
    "change_address": "I have moved. Can {order} go to my new address?",
    "search_products": "Do you have {thing} in another colour? 🙂",
}
_ANSWERS = (
    "it is on its way and will be with you within two working days. ",
    "this is done, and you will receive a confirmation by e-mail. ",
    "a colleague has to approve this; you need not do anything. ",
)
_EVENTS = ("paid", "packed", "sent", "at the carrier")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def conversation(seed: int, index: int) -> tuple[str, list[Message]]:
    """Return the conversation with this number: its thread id, and 5 to about 40 messages."""
    rng = random.Random(f"{seed}/{index}")  # noqa: S311 - nothing secret
    script = _Script(rng)
    script.say("system", _POLICY)
    for turn in range(rng.randint(1, 5)):
        _turn(script, rng, first=turn == 0)
    script.say("user", rng.choice(("Thanks, that is all.", "Perfect, bye!", "OK. I will wait then.")))
    script.say("assistant", "You are welcome. Have a good day!")
    return f"support-{seed}-{index:06d}", script.messages


def _turn(script: _Script, rng: random.Random, *, first: bool) -> None:
    """Add a turn: the customer wants something, and the agent uses tools and answers."""
    order = f"#{rng.randint(10_000, 99_999)}"
    tool, wish = rng.choice(list(_WISHES.items()))
    text = wish.format(order=order, day=rng.choice(_DAYS), thing=rng.choice(_THINGS))
    script.say("user", f"Hello, this is {rng.choice(_NAMES)}. {text}" if first else f"And another thing: {text}")
    script.call("find_order", {"order_id": order, "include_history": True}, _order(rng, order))
    if tool != "find_order":
        arguments = {"order_id": order, "reason": text, "confirmed": rng.random() < 0.8}
        amount = rng.randint(100, 40_000) / 100
        outcome = {"ok": rng.random() < 0.9, "reference": f"{rng.getrandbits(40):x}", "amount": amount}
        script.call(tool, arguments, outcome)
    script.say("assistant", f"I have looked at {order}: " + rng.choice(_ANSWERS) * rng.randint(1, 3))


def _order(rng: random.Random, order: str) -> Message:
    items = [
        {"sku": f"SKU-{rng.randint(100, 999)}", "name": rng.choice(_THINGS), "price": rng.randint(1, 30_000) / 100}
        for _ in range(rng.randint(1, 6))
    ]
    history = [
        {"at": f"2025-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}T08:00:00Z", "event": rng.choice(_EVENTS)}
        for _ in range(rng.randint(1, 8))
    ]
    return {"order_id": order, "items": items, "history": history, "gift_note": None}


class _Script:
    """A conversation as it grows."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.messages: list[Message] = []

    def say(self, role: str, content: str | None, **more: Any) -> None:
        self.messages.append({"id": f"msg_{self._rng.getrandbits(64):016x}", "role": role, "content": content, **more})

    def call(self, tool: str, arguments: Message, result: Message) -> None:
        """Add the assistant's call of a tool, and the result."""
        call_id = f"call_{self._rng.getrandbits(64):016x}"
        function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
        self.say("assistant", None, tool_calls=[{"id": call_id, "type": "function", "function": function}])
        self.say("tool", json.dumps(result, ensure_ascii=False), tool_call_id=call_id, name=tool)
