#!/bin/bash
# pack.sh OUT [PYTHON]: packs into OUT/site.NN what a GPU host without a network lacks: the real tritonserver with the
# Python backend's stub for the host's Python (default 3.12), and every wheel that tritongate needs there, but for torch and
# transformers.
# Run it with the project's environment active, on a machine that has a package registry. setup.sh is its other half.
set -euo pipefail
out=$1 python=${2:-3.12}
part_mib=${PART_MIB:-38}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$here/../.."
python3 -m bench.gpu.wheels --python "$python" >"$work/wheels.txt"
platforms=()
for glibc in 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$python" \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$work/wheels" --requirement "$work/wheels.txt"
test "$(ls "$work/wheels" | wc -l)" = "$(wc -l <"$work/wheels.txt")"

python3 -m pip install --quiet --no-deps --no-index --no-compile --only-binary=:all: --implementation cp \
  --python-version "$python" "${platforms[@]}" --platform manylinux2014_x86_64 --target "$work/site" "$work"/wheels/*.whl
server=$work/site/pytriton/tritonserver
find "$server/python_backend_stubs" -mindepth 1 -maxdepth 1 ! -name "$python" -exec rm -rf {} +
rm -rf "$server/caches" "$work"/site/numpy/{,*/}tests "$work"/site/bin
rm "$work"/site/nvidia_pytriton.libs/libpython*  # of the stubs just removed
# Debugging symbols are half of what is left. The vendored libraries are not touched: patched once, strip can break them.
find "$work/site" -name '*.cpython-*.so' ! -path '*/numpy/*' -exec strip --strip-unneeded {} +

mkdir -p "$out"
rm -f "$out"/site.[0-9][0-9]
tar --create --directory "$work/site" --sort=name --owner=0 --group=0 . | xz --compress -9e --threads=2 --stdout |
  split --bytes="${part_mib}MiB" --numeric-suffixes - "$out/site."
(cd "$out" && sha256sum site.[0-9][0-9] >site.sha256)
ls -l "$out"
