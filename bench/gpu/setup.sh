#!/bin/bash
# setup.sh FROM [DEST]: on the GPU host, makes of FROM/site.NN (pack.sh) the virtual environment DEST/venv (default
# /tmp/tritongate): what was packed, then the host's own torch, then this working tree, and the command tritongate.
# What is unpacked already stays. Prints the environment's python.
set -euo pipefail
from=$1 dest=${2:-/tmp/tritongate}
tree=$(cd "$(dirname "$0")/../.." && pwd)
venv=$dest/venv

site_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ ! -e "$dest/unpacked" ]; then
  host=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
  (cd "$from" && sha256sum --quiet --check site.sha256)
  python3 -m venv --clear --without-pip "$venv"
  site=$(site_of "$venv/bin/python3")
  cat "$from"/site.[0-9][0-9] | python3 -c '
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as packed:
    packed.extractall(sys.argv[1], filter="tar")' "$site"
  chmod +x "$site/pytriton/tritonserver/bin/tritonserver" "$site"/pytriton/tritonserver/python_backend_stubs/*/*
  echo "$host" >"$site/zz_host.pth"
  # The host's scipy and scikit-learn need the host's numpy; transformers does without them where they are not found.
  cat >"$site/_hide_scipy.py" <<'END'
from importlib.machinery import PathFinder


class _Hiding:
    def __init__(self, find):
        self._find = find

    def find_spec(self, name, *where):
        return None if name.partition(".")[0] in {"scipy", "sklearn"} else self._find(name, *where)


# A bound method, as it was: pytest makes it an attribute of a class of its own.
PathFinder.find_spec = _Hiding(PathFinder.find_spec).find_spec
END
  echo 'import _hide_scipy' >"$site/aa_hide_scipy.pth"
  "$venv/bin/python3" -m compileall -q -j 0 "$site" >&2 || true # templates among the sources do not compile
  touch "$dest/unpacked"
fi

# The tree may lie elsewhere than when it was unpacked.
site=$(site_of "$venv/bin/python3")
echo "$tree" >"$site/zz_tree.pth"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$tree/pyproject.toml")
mkdir -p "$site/tritongate-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: tritongate\nVersion: %s\n' "$version" >"$site/tritongate-$version.dist-info/METADATA"
# As pip writes it: processes that `bench` spawns import it, too.
printf '#!%s\nfrom gateway.commands import run\n\nif __name__ == "__main__":\n    run()\n' "$venv/bin/python3" >"$venv/bin/tritongate"
chmod +x "$venv/bin/tritongate"
echo "$venv/bin/python3"
