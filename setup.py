import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "fairseq_plugins/__init__.py").read_text(), flags=re.MULTILINE)[
    1
]

setup(
    name="fairseq_plugins",
    version=VERSION,
    description="Fast and safe translation models for fairseq (ConvS2S and related), loaded with --user-dir",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="fairseq_plugins contributors",
    license="MIT",
    python_requires=">=3.10",
    packages=[*find_packages(include=["fairseq_plugins", "fairseq_plugins.*"]), "fairseq_plugins_user_dir"],
    package_dir={"fairseq_plugins_user_dir": "user_dir"},  # other packages may install a user_dir, too
    package_data={"fairseq_plugins": ["py.typed", "cli/serve/page/*"]},
    entry_points={"console_scripts": ["fairseq-plugins = fairseq_plugins.cli.main:main"]},
    install_requires=[
        # fairseq's last release needs Python < 3.11; fairseq-fixed is fairseq's later main branch with repairs.
        'fairseq==0.12.2; python_version < "3.11"',
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        "hydra-core",
        "polib",
        "sacrebleu>=2.0",
        "sacremoses",
        "sentencepiece>=0.2",
        "subword-nmt>=0.3.8",
        "torch>=2.6",
        "tqdm",
    ],
    extras_require={
        "plots": ["matplotlib"],
        "demo": ["babel", "num2words"],
        "docs": ["furo", "myst-parser", "sphinx"],
        "export": ["onnx", "onnxruntime"],
        "serve": ["httptools", "onnxruntime", "python-multipart", "starlette", "uvicorn", "uvloop"],
        "rouge": ["rouge-score"],
        "alignment": ["eflomal"],
        "dev": [
            "coverage>=7.10",
            "hypothesis",
            "libretranslatepy",
            "mutmut>=3.8",
            "mypy",
            "nox",
            "playwright",
            "pytest",
            "pytest-cov",
            "pytest-xdist",
            "ruff",
        ],
    },
)
