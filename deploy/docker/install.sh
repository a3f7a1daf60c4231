#!/bin/sh
# What an image holds: install.sh TARGET WHEELS SHARE, with constraints.txt beside it.
# Installs paceline from the folder WHEELS with the extras of TARGET; SHARE gets the list of packages.
set -eu
target=$1 wheels=$2 share=$3

case $target in
    front) extras=[otel] ;;
    cpu) extras=[engine,s3,nixl,otel] ;;
    cuda) extras=[engine,gpu,s3,otel] ;;
    *) echo "install.sh: no target $target: front, cpu or cuda" >&2 && exit 2 ;;
esac

python -m pip install --no-cache-dir --disable-pip-version-check --no-input --root-user-action ignore \
    --constraint "$(dirname "$0")/constraints.txt" "$(echo "$wheels"/paceline-*.whl)$extras"
mkdir -p "$share"
python -m pip list --disable-pip-version-check --format freeze > "$share/packages.txt"
