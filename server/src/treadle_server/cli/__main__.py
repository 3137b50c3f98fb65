"""`python -m treadle_server.cli` is the `treadle` command."""

from treadle_server.cli.app import main

main()
