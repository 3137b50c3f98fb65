"""`python -m treadle_server.cli` is the `treadle` command."""

from treadle_server.cli import main

main()
