import click
@click.command("flush")
def flush() -> None:
    "x"
