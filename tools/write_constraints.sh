#!/usr/bin/env bash
# Writes constraints.txt from an environment: exact versions, nothing local.
#   tools/write_constraints.sh .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1

installed=$("$python" -m pip freeze --exclude-editable --exclude pip --exclude setuptools | grep -E '^[A-Za-z0-9._-]+==' | sed 's/+[a-z0-9.]*$//')
{
  echo "# The versions that the tests pass with: pip install -c constraints.txt 'trocar[server]'"
  echo "# Written by \`make constraints\` on Python $("$python" -c 'import platform; print(platform.python_version())')."
  echo "# torch and torchvision are a pair: change them together, and install both from the same index."
  LC_ALL=C sort --ignore-case <<<"$installed"
} > constraints.txt.new
mv constraints.txt.new constraints.txt
