#!/usr/bin/env bash
# Tries an unmodified tritonclient on our server: tools/check_triton.sh [PYTHON]
# PYTHON has the project and its [dev] extra. tritonclient lives in .venv-triton, without torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
environment=.venv-triton
wanted=tests/triton/requirements.txt

if ! cmp --silent "$wanted" "$environment/requirements.txt"; then
  rm -rf "$environment"
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --disable-pip-version-check --quiet --requirement "$wanted"
  cp "$wanted" "$environment/requirements.txt"
fi

folder=$(mktemp -d)
exec 3< <(exec "$python" -m tests.triton.server "$folder")
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
read -r OPEN_SERVER GUARDED_SERVER TOKEN <&3 || { echo "the server did not start" >&2; exit 1; }
export OPEN_SERVER GUARDED_SERVER TOKEN FOLDER="$folder"
env -u PYTHONPATH "$environment/bin/python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir tests/triton \
  --confcutdir tests/triton --import-mode importlib -o python_files='check_*.py' tests/triton
