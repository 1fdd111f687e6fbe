#!/bin/sh
# Makes the base image localhost/debian:bookworm with debootstrap and buildah, where no registry can be reached.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase bookworm "$folder/root" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
tar -C "$folder/root" -cf "$folder/root.tar" .
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root.tar" / >/dev/null
buildah config --cmd /bin/bash "$container"
buildah commit --quiet --rm "$container" localhost/debian:bookworm
