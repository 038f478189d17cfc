"""`bufstore tokens`: what exclusive work and locks have to do, who holds a key, and taking it away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.output import say
from bufstore.cli.running import EXIT_WRONG
from bufstore.errors import ConfigError
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import StreamMissing
from bufstore.tokens.lock import Locks
from bufstore.tokens.model import Holder, Statistics, Storage, TokensConfig
from bufstore.tokens.work import ExclusiveWork

_TIMEOUT_S = 5.0
#: Whatever number the streams have: with this one, only leaders are asked.
_REPLICAS = 3
_LOCK = click.option("--lock", is_flag=True, help="KEY names a lock, not items of work.")


class TokensStatus(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore tokens status --json``."""

    name: str
    #: None: there is no work, or there are no locks, of this name.
    work: Statistics | None
    locks_held: int | None


class KeyHolder(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore tokens who --json``, and of ``release``: who held it."""

    key: str
    #: Who holds the key; None: nobody.
    holder: Holder | None


class Tokens(NamedTuple):
    """Work and locks of one name."""

    work: ExclusiveWork
    locks: Locks


@asynccontextmanager
async def looking_at(target: Endpoints, name: str) -> AsyncIterator[Tokens]:
    """Open work and locks, whatever their settings; create nothing. Raises ConfigError, LogUnavailable."""
    connection = Connection(target.nats, target.session)
    # Both are made before the connection opens, because they subscribe to their answers when it does.
    work = ExclusiveWork(connection, target.nats.api, TokensConfig(name=name, replicas=_REPLICAS))
    locks = Locks(connection, target.nats.api, name, Storage(replicas=_REPLICAS), _TIMEOUT_S)
    await connection.open()
    try:
        yield Tokens(work, locks)
    except StreamMissing:
        raise ConfigError(f"there are no tokens {name!r} of this kind on this server (of a lock: --lock)") from None
    finally:
        await work.aclose()


@click.group("tokens")
def tokens() -> None:
    """Exclusive work and locks (bufstore.tokens): what there is to do, and who holds a key.

    NAME is that of TokensConfig or of Locks.open.
    """


@tokens.command("status")
@click.argument("name")
@connects(postgres_needed=False)
def status(options: Options, name: str) -> None:
    """Show what there is to do: items and locks, as the server counts them."""
    found = options.run(lambda target: _status(target, name))
    options.answer(found, _show_status)


async def _status(target: Endpoints, name: str) -> TokensStatus:
    async with looking_at(target, name) as (work, locks):
        statistics, held = await asyncio.gather(work.statistics(), locks.held(), return_exceptions=True)
        for found in (statistics, held):
            if isinstance(found, BaseException) and not isinstance(found, StreamMissing):
                raise found
        if isinstance(statistics, BaseException) and isinstance(held, BaseException):
            raise statistics
        return TokensStatus(
            name=name,
            work=None if isinstance(statistics, BaseException) else statistics,
            locks_held=None if isinstance(held, BaseException) else held,
        )


def _show_status(found: TokensStatus) -> None:
    if (work := found.work) is not None:
        click.echo(f"stored: {work.stored} messages, {work.bytes} bytes, oldest: {work.oldest_s:.0f} s")
        delivered = f"delivered to workers: {work.told} ({work.told_again} of them redelivered)"
        click.echo(f"not delivered yet: {work.untold}; {delivered}")
    if found.locks_held is not None:
        click.echo(f"locks held: {found.locks_held}")


@tokens.command("who")
@click.argument("name")
@click.argument("key")
@_LOCK
@connects(postgres_needed=False)
def who(options: Options, name: str, key: str, lock: bool) -> None:
    """Show who holds KEY. Exit code 1 when nobody does."""

    async def ask(target: Endpoints) -> Holder | None:
        async with looking_at(target, name) as found:
            return await (found.locks if lock else found.work).who(key)

    holder = options.run(ask)
    options.answer(KeyHolder(key=key, holder=holder), _show_holder, code=0 if holder else EXIT_WRONG)


@tokens.command("release")
@click.argument("name")
@click.argument("key")
@_LOCK
@click.option("--force", is_flag=True, help="Release KEY even if somebody holds it: the holder loses it.")
@connects(postgres_needed=False)
def release(options: Options, name: str, key: str, lock: bool, force: bool) -> None:
    """Take KEY from its holder. Its item goes to another worker."""

    async def ask(target: Endpoints) -> Holder | None:
        async with looking_at(target, name) as found:
            return await (found.locks if lock else found.work).release(key, force=force)

    options.answer(KeyHolder(key=key, holder=options.run(ask)), _show_holder)


def _show_holder(found: KeyHolder) -> None:
    if (holder := found.holder) is None:
        click.echo(f"{found.key!r}: nobody")
    else:
        say(f"{found.key!r}: {holder.name or '(no name)'}, token {holder.token}, silent {holder.silent_s:.1f} s")
