"""``python -m kinetic_core``: the command line."""

from kinetic_core.cli import main

if __name__ == "__main__":
    main()
