"""The build definition of the distribution ``paddleformers-fc``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PADDLE = "3.3.1"
PADDLEFORMERS = "paddleformers==1.2.0"


def version() -> str:
    text = (HERE / "paddleformers_fc" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


setup(
    name="paddleformers-fc",
    version=version(),
    description="Flex checkpoints for PaddleFormers: save once, resume under any parallel layout, export anywhere.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["paddleformers_fc", "paddleformers_fc.*"]),
    package_data={"paddleformers_fc": ["py.typed"], "paddleformers_fc.verification.demo": ["text/*"]},
    # What it takes to read, check and convert checkpoints. Paddle is an extra: a machine that only looks at checkpoints
    # does not have to install it.
    install_requires=[
        "fsspec",
        "ml_dtypes",
        "msgspec",
        "numpy",
        "pyyaml",
        "rich",
        "typer>=0.29",
        "xxhash",
    ],
    extras_require={
        "cpu": [f"paddlepaddle=={PADDLE}", PADDLEFORMERS],
        # Beside a GPU wheel of Paddle, which the public index does not have: it is installed from Paddle's own index.
        "formers": [PADDLEFORMERS],
        # In an environment without PaddleFormers; with constraints-nlp.txt.
        "nlp": [f"paddlepaddle=={PADDLE}", "paddlenlp==3.0.0b4", "aistudio-sdk==0.2.6", "pyarrow<23"],
        "nlptest": ["pytest", "pytest-timeout"],
        "test": [
            "fsspec[http]",
            "hypothesis",
            "import-linter",
            "moto[server]",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "s3fs",
            "safetensors",
        ],
        "docs": ["matplotlib"],
        # What make soak uses where it is there; there is no release for every Python.
        "fuzz": ["atheris"],
    },
    entry_points={"console_scripts": ["paddleformers-fc = paddleformers_fc.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
