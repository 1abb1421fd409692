"""What the layout promises and no linter sees."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_only_ops_have_something_in_their_init():
    for package in ("flows", "tasks", "ml", "kernels", "schemas", "infra"):
        for init in (REPOSITORY / package).rglob("__init__.py"):
            is_op = init.parent.parent.name == "kernels"
            assert is_op or not init.read_text().strip(), init


def test_transformers_does_not_take_our_kernels_for_the_hub_package():
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() is False


def test_the_lock_file_names_no_host():
    for name in ("requirements.lock", "infra/setup/bootstrap.lock", "infra/jars.lock", "infra/jars_s3.lock"):
        assert not re.search(r"https?://", (REPOSITORY / name).read_text()), name


def test_help_needs_neither_torch_nor_spark_nor_prefect():
    """`opd --help`, the configuration and the flows' side of a run stay light."""
    code = (
        "import sys; import flows.cli, schemas.config, tasks.operate.verify, tasks.inputs.models, tasks.workers.pool\n"
        "import infra.launch\n"
        "sys.exit([m for m in ('torch', 'pyspark', 'prefect', 'deepspeed') if m in sys.modules].__str__()[1:-1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_wheel_has_every_file_that_the_packages_read(tmp_path):
    packages = ("flows", "tasks", "ml", "kernels", "schemas", "infra")
    for name in packages:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(REPOSITORY / name, tmp_path / name)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    (wheel,) = (tmp_path / "dist").glob("opd-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(p.relative_to(tmp_path)) for name in packages for p in (tmp_path / name).rglob("*") if p.is_file()}
    apart = {name for name in wanted if name.startswith("infra/setup/") or name.endswith((".md", ".svg"))}
    assert wanted - apart - packed == set()


def test_every_file_that_a_page_names_is_there():
    top = "flows|tasks|ml|kernels|schemas|infra|tests|docs"
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]
    gone = set()
    for page in pages:
        if page.name == "CHANGELOG.md":  # it tells of files that were
            continue
        text = page.read_text()
        named = re.findall(rf"`((?:{top})/[\w/]+(?:\.[a-z0-9_]+)?/?)`", text)
        linked = re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text)
        there = [name for name in named if not name.endswith("/NAME.py")]  # which a reader is to write
        gone |= {f"{page.name}: {name}" for name in there if not (REPOSITORY / name).exists()}
        gone |= {f"{page.name}: {link}" for link in linked if not (page.parent / link).exists()}
    assert not gone
