"""placeholder"""


def bench() -> None:
    """Bench."""
