"""The build definition of the distribution ``paddleformers-fc``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# The public address of this repository, such as https://github.com/OWNER/NAME. The links of the long description lead
# there; without an address they are text.
REPOSITORY = ""
PADDLE = "paddlepaddle==3.3.1"
# PaddleFormers needs numpy 1.26, and pyarrow 23 and later are built against numpy 2.
FORMERS = ["paddleformers==1.2.0", "pyarrow>=17,<23"]


def version() -> str:
    text = (HERE / "paddleformers_fc" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def long_description(repository: str) -> str:
    """Return README.md for a page outside the repository, where its relative links lead nowhere."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    # Groups: the mark of a picture, the text, and the target. Links in the page itself stay.
    link = r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)"
    if not repository:
        return re.sub(link, r"\2", text)
    return re.sub(link, lambda found: f"{found[1]}[{found[2]}]({address(repository, found[1], found[3])})", text)


def address(repository: str, picture: str, target: str) -> str:
    return f"{repository}/{'raw' if picture else 'blob'}/v{version()}/{target}"


def urls(repository: str) -> dict[str, str]:
    own = {"Source": repository, "Changelog": address(repository, "", "CHANGELOG.md")} if repository else {}
    return {**own, "PaddleFormers": "https://github.com/PaddlePaddle/PaddleFormers"}


setup(
    name="paddleformers-fc",
    version=version(),
    description="Flex checkpoints for PaddleFormers: save once, resume under any parallel layout, export anywhere.",
    long_description=long_description(REPOSITORY),
    long_description_content_type="text/markdown",
    author="paddleformers_fc developers",
    url=REPOSITORY or None,
    project_urls=urls(REPOSITORY),
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["paddleformers_fc", "paddleformers_fc.*"]),
    package_data={
        "paddleformers_fc": ["py.typed"],
        "paddleformers_fc.cli": ["*.html"],
    },
    # What it takes to read, check and convert checkpoints. Paddle is an extra: a machine that only looks at checkpoints
    # does not have to install it.
    # The tests install the lowest versions.
    install_requires=[
        "fsspec>=2024.6.0",
        "ml_dtypes>=0.5.0",
        "msgspec>=0.19.0",
        "numpy>=1.26.0",
        "pyyaml>=6.0.2",
        "rich>=13.8.0",
        "typer>=0.29",
        "xxhash>=3.5.0",
    ],
    extras_require={
        "cpu": [PADDLE, *FORMERS],
        # Beside a GPU wheel of Paddle, which the public index does not have: it is installed from Paddle's own index.
        "formers": FORMERS,
        # In an environment without PaddleFormers; with constraints-nlp.txt.
        "nlp": [PADDLE, "paddlenlp==3.0.0b4", "aistudio-sdk==0.2.6", "pyarrow>=17,<23"],
        # Checkpoints at http(s):// and s3:// URLs.
        "http": ["fsspec[http]>=2024.6.0", "aiohttp>=3.9.0"],
        "s3": ["s3fs>=2024.6.0"],
        # Pictures of demo and matrix.
        "plots": ["matplotlib>=3.9.0"],
        "nlptest": ["pytest>=8.0", "pytest-timeout>=2.3"],
        "test": [
            "coverage>=7.17",
            "fsspec[http]>=2024.6.0",
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "moto[server]>=5.0",
            "mypy>=1.11",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "s3fs>=2024.6.0",
            "safetensors>=0.4.3",
            "setuptools>=77",
        ],
        # jieba divides Chinese text into words for the search of the site.
        "docs": ["jieba>=0.42.1", "mkdocs>=1.6.0", "mkdocs-material>=9.5.30", "pymdown-extensions>=10.8"],
    },
    entry_points={"console_scripts": ["paddleformers-fc = paddleformers_fc.__main__:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
