"""The `treadle` command; README.md beside this file is its reference."""

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Run the command that the arguments name, and exit with its status."""
    try:
        from treadle_server.cli.app import run  # in here, so that Ctrl-C while it is imported leaves no traceback

        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
