"""Puts the configurations into the wheel, where `--config NAME` finds them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies `configs/` into the built package; an editable installation reads them where they are."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib) / "pl_grouprl" / "configs", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
