#!/usr/bin/env bash
# Installs megatron-energon 7.4.0 from PyPI into build/energon, which git ignores: bin/energon and bin/python there.
# PyTorch is Debian's, for the CPU, because PyPI's depends on gigabytes of CUDA libraries: Debian's packages and their
# dependencies (150 MB) are downloaded and unpacked there. Needs no root, and installs nothing on the machine.
# Exits with 1 after one line with the reason where that is not possible.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/build/energon
[ -f "$home/complete" ] && exit 0

fail() {
	echo "megatron-energon is not installed: $1"
	exit 1
}
trap 'fail "line $LINENO of $0 failed"' ERR

for program in apt-get dpkg-deb; do
	command -v $program >/dev/null || fail "PyTorch comes from Debian's packages, and there is no $program"
done
rm -rf "$home"
mkdir -p "$home"/{apt/lists/partial,apt/archives/partial,system,bin}

# apt with folders of its own. It does not download packages that the machine has installed.
apt=(apt-get --quiet=2 -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Acquire::Languages=none
	-o Acquire::Retries=2 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
	-o Dir::State::lists="$home/apt/lists" -o Dir::Cache="$home/apt")
log=$home/install.log
"${apt[@]}" update >"$log" 2>&1 || fail "apt-get update: $(tail -1 "$log")"
"${apt[@]}" install --yes --download-only --no-install-recommends python3-torch >"$log" 2>&1 ||
	fail "apt-get install --download-only python3-torch: $(tail -1 "$log")"
find "$home/apt/archives" -name '*.deb' -print0 |
	xargs -0 -n 8 sh -c 'for package; do dpkg-deb --extract "$package" "$0" || exit 255; done' "$home/system" >"$log" 2>&1 ||
	fail "dpkg-deb: $(tail -1 "$log")"
rm -rf "$home/apt"

# The Python that Debian's PyTorch was built for.
packages=$home/system/usr/lib/python3/dist-packages
[ -d "$packages/torch" ] || packages=/usr/lib/python3/dist-packages
version=$(cd "$packages/torch" 2>"$log" && ls | sed -nE 's/^_C[.]cpython-3([0-9]+)-.*/\1/p')
[ -n "$version" ] || fail "there is no PyTorch in $packages"
python=
for candidate in python3 "python3.$version" /usr/bin/python3; do
	"$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (3, $version))" 2>/dev/null || continue
	"$candidate" -m pip --version >/dev/null 2>&1 || continue
	python=$(command -v "$candidate")
	break
done
[ -n "$python" ] || fail "Debian's PyTorch needs Python 3.$version with pip, and there is none"
"$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --retries 1 --no-deps --no-compile \
	--target "$home/site" --requirement tests/data/energon-requirements.txt >"$log" 2>&1 || fail "pip: $(tail -1 "$log")"

# Python 3.11 refuses the mutable default of a dataclass in PyTorch 1.13.
metadata=$home/system/usr/lib/python3/dist-packages/torch/distributed/_shard/sharded_tensor/metadata.py
[ ! -f "$metadata" ] || sed -i 's/field(default=TensorProperties())/field(default_factory=TensorProperties)/' "$metadata"

libraries=$home/system/usr/lib
for folder in "$home"/system/usr/lib/*-linux-gnu "$home"/system/lib/*-linux-gnu; do
	libraries+=:$folder:$folder/blas:$folder/lapack
done
cat >"$home/bin/python" <<END
#!/bin/sh
export LD_LIBRARY_PATH='$libraries' PYTHONPATH='$home/site:$home/system/usr/lib/python3/dist-packages:/usr/lib/python3/dist-packages'
export PYTHONPYCACHEPREFIX='$home/cache' PYTHONDONTWRITEBYTECODE=
exec '$python' "\$@"
END
cat >"$home/bin/energon" <<END
#!/bin/sh
exec '$home/bin/python' -m megatron.energon.cli.main "\$@"
END
chmod +x "$home"/bin/*
"$home/bin/energon" --version >"$log" 2>&1 || fail "$(tail -1 "$log")"
touch "$home/complete"
