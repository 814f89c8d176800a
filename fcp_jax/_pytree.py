"""Makes `Plan` a pytree, without importing jax for those who only plan.

A plan must be registered before it meets `jit`, whichever of jax and fcp_jax was imported first.
If jax is there already, registration happens now; otherwise as soon as somebody imports it.
"""

import importlib.abc
import importlib.util
import sys

from fcp_jax.plan import TABLES, Plan


def register() -> None:
    """Registers `Plan`: tables are leaves, the shape is static, config and stats are dropped."""
    from jax import tree_util

    tree_util.register_dataclass(
        Plan, data_fields=TABLES, meta_fields=("shape",), drop_fields=("config", "stats")
    )


class _JaxFinder(importlib.abc.MetaPathFinder):
    """Waits for the first import of jax and registers the plan right after it."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register
        return spec


def register_when_jax_is_imported() -> None:
    """Registers `Plan` now or at the first import of jax."""
    if "jax" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _JaxFinder())
