"""Builds the native library into the wheel; without a compiler the wheel does without it."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibraryHook(BuildHookInterface):  # type: ignore[misc]
    """Called by hatchling before it collects files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the sources; an editable installation finds the library there."""
        file = Path(self.root) / "src" / "entmtp" / "kernels" / "build.py"
        spec = importlib.util.spec_from_file_location("entmtp_kernels_build", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {file}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if version == "editable" and module.is_current():
            return
        try:
            library = module.build()
        except module.BuildError as error:
            self.app.display_warning(f"the native library is left out: {error}")
            return
        build_data["artifacts"].append(f"/src/entmtp/kernels/{library.name}")
        if version != "editable":
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"
