"""Entry point from the project's root: `python cli.py fit --config grpo_pg.yaml`."""

if __name__ == "__main__":  # reward workers import this file, and nothing of what it needs
    import gc

    gc.disable()  # while everything is imported; `main` enables it

    from pl_grouprl.cli import main

    main()
