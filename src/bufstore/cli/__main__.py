"""``python -m bufstore.cli``."""

from bufstore.cli import main

if __name__ == "__main__":
    main()
