"""``python -m bufstore``: the command line."""

from bufstore.cli import main

if __name__ == "__main__":
    main()
