#!/usr/bin/env bash
# Generates src/paceline/v1 from proto/. With --check: fails when the committed code differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    proto/paceline/v1/*.proto
if [ "${1:-}" = --check ]; then
    for made in "$out"/paceline/v1/*; do
        cmp -s "$made" "src/paceline/v1/$(basename "$made")" || {
            echo "proto drift: $(basename "$made") is not what proto/ generates; run 'make proto'" >&2
            exit 1
        }
    done
else
    cp "$out"/paceline/v1/* src/paceline/v1/
fi
