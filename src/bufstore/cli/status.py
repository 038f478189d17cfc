import click
@click.command("status")
def status() -> None:
    "x"
