"""The `treadle` command; README.md beside this file is its reference."""

from treadle_server.cli.app import main

__all__ = ["main"]
