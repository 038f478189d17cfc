"""The conformance suites of our own mailboxes and notifiers: lists of checks, in the form of `bufstore.testing`."""

from bufstore.testing import Check
from conformance import (
    mailbox_lists,
    mailbox_live,
    mailbox_queue,
    mailbox_refused,
    mailbox_stuck,
    mailbox_together,
    notify_events,
    notify_schedulings,
)
from conformance.notify_schedulings import Notifiers

#: Checks of mailboxes. Each takes two `MailboxStore`s: instances of one deployment that nothing else uses.
MAILBOX_CHECKS: list[Check] = [
    *mailbox_queue.CHECKS,
    *mailbox_refused.CHECKS,
    *mailbox_lists.CHECKS,
    *mailbox_together.CHECKS,
    *mailbox_stuck.CHECKS,
]
#: Checks of mailboxes with live deliveries.
LIVE_MAILBOX_CHECKS: list[Check] = mailbox_live.CHECKS
#: Checks of notifiers. Each takes a `Notifiers`.
NOTIFY_CHECKS: list[Check] = [*notify_schedulings.CHECKS, *notify_events.CHECKS]

__all__ = ["LIVE_MAILBOX_CHECKS", "MAILBOX_CHECKS", "NOTIFY_CHECKS", "Notifiers"]
