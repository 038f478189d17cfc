"""Feeds on a real server: what they keep, and what they let go."""

from __future__ import annotations

import gc
import weakref

from conftest import Deployment


async def test_a_closed_feed_leaves_nothing_behind(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        log, client = store._link.log, store._link.connection.client()
        before = len(client._subs), len(client._listeners)
        feeds = []
        for term in range(20):
            feed = await log.feed(0, term, 1, lambda: None)
            await feed.close()
            feeds.append(weakref.ref(feed))
        del feed
        gc.collect()
        assert (len(client._subs), len(client._listeners)) == before
        assert not [alive for alive in feeds if alive() is not None]
