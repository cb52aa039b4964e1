"""Entry point from the project's root: `python cli.py fit --config grpo_pg.yaml`."""

from pl_grouprl.cli import main

if __name__ == "__main__":
    main()
