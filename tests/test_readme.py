"""The README's code runs as printed."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_code_block_runs(index):
    assert jax.device_count() == 8
    exec(compile(BLOCKS[index], f"README.md, block {index}", "exec"), {})
