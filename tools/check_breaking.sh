#!/usr/bin/env bash
# Compares the .proto files with those of the last release and fails when a client of it would break.
#   tools/check_breaking.sh path/to/buf
# The last release is the last tag before HEAD. Before the first release it is the previous commit
# (HEAD itself while .proto files are changed and not committed); nothing has been promised yet, so a
# commit may break the contract on purpose, with a line `Breaking-Proto: why` in its message.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=$1

if base=$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null); then
  released=yes
elif ! git diff --quiet HEAD -- proto 2>/dev/null; then
  base=HEAD released=no
else
  base=HEAD^ released=no
fi
if ! git cat-file -e "$base:proto/trocar_api" 2>/dev/null; then
  echo "breaking changes: nothing to compare with, there is no $base with .proto files"
  exit
fi
reason=$(git log -1 --format='%(trailers:key=Breaking-Proto,valueonly)')
if [[ $released == no && $base == HEAD^ && -n $reason ]]; then
  echo "breaking changes: accepted by the commit message: $reason"
  exit
fi
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
git archive "$base" proto buf.yaml | tar -x -C "$before"
"$buf" breaking --against "$before"
echo "the wire contract breaks nothing of $base"
