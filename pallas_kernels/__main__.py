"""Command line: `python -m pallas_kernels tune`."""

import argparse

from pallas_kernels import tune


def main() -> None:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    tune.add_command(commands.add_parser("tune", help="measure kernel configurations on this GPU"))
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
