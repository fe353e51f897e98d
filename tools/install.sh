#!/bin/sh
# Makes $VENV and installs the package with everything `make demo` and `make test` need, or with the extras $EXTRAS under
# $CONSTRAINTS. Called by the Makefile.
#
# An interpreter is right when its version is one Paddle 3.3.1 and numpy 1.26 have wheels for, and when it can make
# virtual environments (Debian's python3 cannot without the package python3-venv).
set -eu

# Whoever names an interpreter gets that one or an error.
candidates=${PYTHON:-python3 python3.12 python3.11 python3.10}

usable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
    for candidate in $candidates; do
        if usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

explain() {
    echo "No usable Python was found. Needed: version 3.10, 3.11 or 3.12 with the modules venv and ensurepip." >&2
    for candidate in $candidates; do
        if version=$("$candidate" --version 2>/dev/null); then
            echo "  $candidate: $version" >&2
        else
            echo "  $candidate: not found" >&2
        fi
    done
    echo "Install one (on Debian or Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11 ..." >&2
}

if ! usable "$VENV/bin/python"; then
    if ! python=$(find_python); then
        explain
        exit 1
    fi
    echo "Making $VENV with $python ($("$python" --version))."
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
fi

echo "Installing into $VENV (about 2 GB, once; a minute or two on a fast network)."
"$VENV/bin/python" -m pip install --quiet --constraint "${CONSTRAINTS:-constraints.txt}" \
    --editable ".[${EXTRAS:-cpu,test,plots,docs}]"
rm -f "$VENV"/.installed-*
touch "$STAMP"
