#!/bin/sh
# Builds the images of this checkout: infra/images/build.sh [TARGET ...], all without a name.
#   TOOL           docker instead of buildah
#   BASE           the system under them, see the Dockerfile
#   TORCH_BACKEND  cuda instead of cpu
#   TAG            instead of latest, or of cuda
# pip's PIP_FIND_LINKS may name a folder with a wheel of torch. What the machine trusts is trusted while building.
set -eu
cd "$(dirname "$0")/../.."
backend=${TORCH_BACKEND:-cpu}
tag=${TAG:-$([ "$backend" = cpu ] && echo latest || echo "$backend")}
certificates=/etc/ssl/certs/ca-certificates.crt
export BUILDAH_LAYERS=true DOCKER_BUILDKIT=1

for target in ${*:-servers flows standalone}; do
  case $target in
    flows) name=armature ;;
    servers) name=armature-vllm ;;
    *) name=armature-$target ;;
  esac
  echo "$name:$tag"
  set -- build --file infra/images/Dockerfile --target "$target" --tag "$name:$tag" \
    --build-arg "TORCH_BACKEND=$backend" \
    --build-arg "COMMIT=$(git describe --always --abbrev=40 --dirty=+changed --exclude='*')"
  [ -z "${BASE:-}" ] || set -- "$@" --build-arg "BASE=$BASE"
  [ -z "${PIP_FIND_LINKS:-}" ] || set -- "$@" --build-context "wheels=$PIP_FIND_LINKS"
  [ ! -f $certificates ] || set -- "$@" --secret "id=certificates,src=$certificates"
  "${TOOL:-buildah}" "$@" .
done
