#!/usr/bin/env bash
# Tries a wheel as a new user would: in an empty environment, first as a client, then as a server.
# It must also be what a second build makes, and hold nothing that is run by itself.
#   tools/check_wheel.sh dist/trocar-0.1.0-py3-none-any.whl
# Needs .venv (make wheel sees to it).
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
root=$PWD
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
cd "$empty"   # so that nothing is imported from the source tree

fail() { echo "wheel: $*" >&2; exit 1; }

echo "wheel: what is in it"
# A .pth file is run by every start of Python: none is ours.
if "$root/.venv/bin/python" -m zipfile --list "$wheel" | grep --extended-regexp '^[^ ]*\.pth |^(tests|tools|docs|benchmarks)/'; then fail "these are no part of a wheel"; fi
"$root/.venv/bin/python" -m build --wheel --outdir again "$root" >/dev/null
cmp "$wheel" again/*.whl || fail "a second build differs: sha256sum says $(sha256sum "$wheel" again/*.whl)"

echo "wheel: the client alone"
"$root/.venv/bin/python" -m venv venv
venv/bin/python -m pip install --disable-pip-version-check --quiet --constraint "$root/constraints.txt" "$wheel"
venv/bin/python - <<'PYTHON'
import importlib.util, sys, trocar
assert importlib.util.find_spec("torch") is None, "the base install brought torch"
assert "venv" in trocar.__file__ and callable(trocar.connect), trocar.__file__
assert not any(name.split(".")[0] == "trocar_server" for name in sys.modules), "the client imported the server"
PYTHON
venv/bin/trocar --help >/dev/null || fail "trocar --help failed"
if hint=$(venv/bin/trocar serve resnet18 2>&1); then fail "trocar serve ran without torch"; fi
grep --quiet --fixed-strings 'trocar[server]' <<<"$hint" || fail "trocar serve does not say what to install: $hint"
if grep --quiet Traceback <<<"$hint"; then fail "trocar serve shows a traceback: $hint"; fi

echo "wheel: the server"
# Only the dependencies come from .venv, as a second torch would be another 5 GB: a path in a .pth file
# is searched after the environment's own packages, and .pth files found there (such as the one of
# .venv's editable install of Trocar) are not read. So `trocar_server` can only be the wheel's.
"$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > "$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
venv/bin/python -c 'import sys, trocar_server; assert trocar_server.__file__.startswith(sys.prefix), trocar_server.__file__'
venv/bin/trocar --help | grep --quiet serve || fail "trocar --help does not list serve"
venv/bin/trocar serve --help >/dev/null || fail "trocar serve --help failed"
echo "wheel: works as client and as server"
