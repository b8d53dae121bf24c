"""``python -m probing.daemon.cli`` runs the command ``probingd`` where no script of that name is installed."""

from probing.daemon.cli.main import main

if __name__ == "__main__":
    main()
