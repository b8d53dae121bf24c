"""``python -m probing.daemon.cli``: the command ``probingd``, where no script of it is installed."""

from probing.daemon.cli.main import main

if __name__ == "__main__":
    main()
