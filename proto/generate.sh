#!/usr/bin/env bash
# Generates the Python stubs beside their .proto files.
#   proto/generate.sh            write them
#   proto/generate.sh --check    fail when the checked-in ones are stale
# Needs the [dev] extra; the exact grpcio-tools decides what the stubs look like.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
export PATH="$(dirname "$(command -v "$python")"):$PATH"   # protoc finds mypy-protobuf's plug-ins there

generate() {
  "$python" -m grpc_tools.protoc -I. --python_out="$1" --grpc_python_out="$1" \
    --mypy_out="quiet:$1" --mypy_grpc_out="quiet:$1" trocar_api/v1/*.proto
}

# The Open Inference Protocol: a descriptor set for a pool of our own, because stubs would clash with those of its
# other clients in one process.
oip=../service/trocar_server/rpc/oip
describe() {
  "$python" -m grpc_tools.protoc -I"$oip" --descriptor_set_out="$1/open_inference.binpb" open_inference.proto
}

if [[ "${1:-}" != "--check" ]]; then
  generate .
  describe "$oip"
  exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
describe "$fresh"
cmp "$fresh/open_inference.binpb" "$oip/open_inference.binpb" || { echo "stale descriptors: run make proto" >&2; exit 1; }
for file in "$fresh"/trocar_api/v1/*; do
  cmp "$file" "trocar_api/v1/$(basename "$file")" || { echo "stale stub: run make proto" >&2; exit 1; }
done
echo "stubs are fresh"
