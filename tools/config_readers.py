"""Write how versions of Transformers read exported configurations into tests/families/readers.json.

Run in an environment of its own for every version, which needs no PyTorch, before and after the tests that write the
exports:

    python -m venv /tmp/hf4 && /tmp/hf4/bin/pip install transformers==4.57.1
    python -m venv /tmp/hf5 && /tmp/hf5/bin/pip install transformers==5.3.0
    /tmp/hf4/bin/python tools/config_readers.py; /tmp/hf5/bin/python tools/config_readers.py
    FLEX_WRITE_READERS=1 pytest tests/families/test_exported_configs.py -k declared_changes
    /tmp/hf4/bin/python tools/config_readers.py; /tmp/hf5/bin/python tools/config_readers.py

Every entry of the file is one source: what an export changes in it by the path of a key, as [source, export], and the
same of both as a version reads them. ``lost`` stands for an absent key. Sources are published configurations
(``published.json``), these as a version of Transformers saves them, and those of ``transformers.json``. ``published``
compares an export of weights that Transformers 5 saved with the published ones, as Transformers 4 reads both.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "tests" / "families"
READERS = HERE / "readers.json"
OF_THE_FILE = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "paddleformers_version"}
LOST, UNREAD = "lost", "unread"
Config = dict[str, Any]


def read(config: Config, saved: bool = False) -> Config:
    """Return a configuration with the defaults of this version, or as it saves it."""
    import transformers

    known = {key: value for key, value in config.items() if key != "auto_map"}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(known))
        if config["model_type"] == "kimi_k2":  # Its own code, which is not Transformers', is a copy of this class.
            found = transformers.DeepseekV3Config.from_dict(known)
        else:
            found = transformers.AutoConfig.from_pretrained(directory)
        found.save_pretrained(directory)
        return dict(json.loads(path.read_text() if saved else json.dumps(found.to_dict())))


def flat(config: Config, prefix: str = "") -> Config:
    """Return the values of a configuration by path."""
    found: Config = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        elif key not in OF_THE_FILE:
            found[prefix + key] = value
    return found


def changes(source: Config, export: Config) -> dict[str, list[Any]]:
    """Return the values that differ, by path."""
    one, other = flat(source), flat(export)
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key, LOST) != other.get(key, LOST))
    return {key: [one.get(key, LOST), other.get(key, LOST)] for key in keys}


def changed(source: Config, found: dict[str, list[Any]]) -> Config:
    """Return a configuration with changed values: the export."""
    values = {**flat(source), **{path: value for path, (_, value) in found.items()}}
    export: Config = {}
    for path, value in values.items():
        *parts, last = path.split(".")
        part = export
        for name in parts:
            part = part.setdefault(name, {})
        if value != LOST:
            part[last] = value
    return {key: value for key, value in export.items() if value != {}}


def sources() -> dict[str, Config]:
    """Return every source by name."""
    saved = {name: one["source"] for name, one in entries().items() if "source" in one}
    cases = json.loads((HERE / "transformers.json").read_text())
    return {
        **json.loads((HERE / "published.json").read_text()),
        **saved,
        **{f"{name}, of Transformers": case["config"] for name, case in cases.items()},
    }


def entries() -> dict[str, Any]:
    """Return the entries of the file."""
    return dict(json.loads(READERS.read_text())) if READERS.exists() else {}


def write(found: dict[str, Any]) -> None:
    """Write the entries, one a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in sorted(found)]
    READERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Add what this version of Transformers saves and reads."""
    import transformers

    version, found = transformers.__version__, entries()
    for name, config in json.loads((HERE / "published.json").read_text()).items():
        if config["model_type"] in transformers.CONFIG_MAPPING:
            found.setdefault(f"{name}, saved by {version}", {})["source"] = read(config, saved=True)
    write(found)
    known = sources()
    for name, entry in found.items():
        if "changes" in entry:
            export = changed(known[name], entry["changes"])
            try:
                entry[version] = changes(read(known[name]), read(export))
            except ValueError:
                entry[version] = UNREAD
            if version.startswith("4.") and "saved by 5." in name and entry[version] != UNREAD:
                entry["published"] = changes(read(known[name.partition(", saved by")[0]]), read(export))
    write(found)


if __name__ == "__main__":
    main()
