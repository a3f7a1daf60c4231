#!/usr/bin/env bash
# Builds the three images with whichever engine is there: scripts/images.sh NAME
# PYTHON_IMAGE pins the base, TORCH_INDEX is an index with CPU builds of torch, PLATFORMS a list for
# several architectures (docker buildx; then PUSH=1 is needed, too).
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?the name of the image}

for engine in docker podman buildah; do
    "$engine" info >/dev/null 2>&1 && break
    engine=
done
[ -n "$engine" ] || { echo "paceline: no engine answers: docker, podman or buildah is needed" >&2 && exit 1; }

version=$(sed -n 's/^appVersion: //p' deploy/helm/paceline/Chart.yaml)
options=(--file deploy/docker/Dockerfile
    --build-arg "VERSION=$version" --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
[ -z "${PYTHON_IMAGE:-}" ] || options+=(--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE")
[ -z "${TORCH_INDEX:-}" ] || options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
build=("$engine" build)
if [ -n "${PLATFORMS:-}" ]; then
    build=(docker buildx build --sbom=true --platform "$PLATFORMS")
    [ -z "${PUSH:-}" ] || options+=(--push)
fi
for target in front cpu cuda; do
    "${build[@]}" "${options[@]}" --target "$target" --tag "$name:$version-$target" .
done
