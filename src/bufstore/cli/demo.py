import click
@click.command("demo")
def demo() -> None:
    "x"
