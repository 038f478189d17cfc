import secrets

import pytest

from bufstore.testing.mailbox import CHECKS as C1
from bufstore.testing.mailbox_together import CHECKS as C2

CHECKS=C1+C2
from bufstore.mailbox.config import *
from bufstore.mailbox.memory import MemoryMailbox, MemoryMailboxStore
from bufstore.mailbox.nats import NatsMailboxStore


@pytest.mark.parametrize("check",CHECKS,ids=str)
async def test_mem(check):
    shared=MemoryMailbox()
    async with MemoryMailboxStore(shared) as a, MemoryMailboxStore(shared) as b:
        await check([a,b])
@pytest.mark.parametrize("check",CHECKS,ids=str)
async def test_nats(check,servers):
    n=NatsMailboxNames(bucket="b"+secrets.token_hex(4),max_bytes=64<<20)
    async with NatsMailboxStore(servers.nats.url,names=n) as a, NatsMailboxStore(servers.nats.url,names=n) as b:
        await check([a,b])
from bufstore.mailbox.postgres import PostgresMailboxStore


@pytest.mark.parametrize("check",CHECKS,ids=str)
async def test_pg(check,servers):
    n="s"+secrets.token_hex(4)
    async with PostgresMailboxStore(servers.postgres.dsn,schema=n,pool_size=3) as a, PostgresMailboxStore(servers.postgres.dsn,schema=n,pool_size=3) as b:
        await check([a,b])
