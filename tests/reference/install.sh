#!/usr/bin/env bash
# Installs the reference Python: PyTorch, transformers, PEFT, MLflow and the other packages of requirements.txt, for tests that
# start from plain Hugging Face folders or let those packages read what mimo wrote (tests/reference/python.ts). Takes FOLDER,
# by default build/reference, and makes it a link to the installation: FOLDER/bin/python. The installation itself is in
# $XDG_CACHE_HOME/mimo-ci (or ~/.cache/mimo-ci), under a name of the packages, the interpreter and this file, so that every
# checkout shares it. Downloads about 700 MB from PyPI, takes about two minutes and 2 GB of disk. Needs Python 3.11 or later
# with pip, and a C compiler. Exits with 1 after one line with the reason where that is not possible.
set -euo pipefail
folder=$(realpath -ms "${1:-$(dirname "$0")/../../build/reference}")
cd "$(dirname "$0")"
log=$(mktemp)
target=

fail() {
	echo "the reference Python is not installed: $1"
	exit 1
}
trap 'fail "line $LINENO of $0 failed${log:+: $(tail -1 "$log")}"' ERR
trap 'rm -rf "$log" "$target"' EXIT

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || fail "$python is not Python 3.11 or later"
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip"
compiler=${CC:-cc}
command -v "$compiler" >/dev/null || fail "there is no C compiler $compiler (Debian: gcc, libc6-dev)"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/mimo-ci
key=$({ cat install.sh requirements.txt; "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; uname -m; } | sha256sum | cut -c 1-16)
home=$cache/reference-$key
if [ ! -d "$home" ]; then
	mkdir -p "$cache"
	target=$(mktemp -d "$cache/unfinished-XXXXXX")
	"$python" -m venv --without-pip --symlinks "$target" >"$log" 2>&1
	"$python" -m pip --python "$target/bin/python" install --quiet --disable-pip-version-check --no-cache-dir --retries 2 \
		--no-deps --no-compile --only-binary :all: --requirement requirements.txt >"$log" 2>&1
	packages=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

	# PyPI's PyTorch links to gigabytes of CUDA libraries, of which nothing runs without a GPU. In the place of all but the
	# runtime stand libraries of the same names, and one with all their functions, each of which ends the process.
	cd "$packages/torch/lib"
	links=$(LC_ALL=C ldd -r libtorch_python.so libtorch_*linalg.so 2>&1 || true)
	cuda=$packages/nvidia/cu13/lib
	sed -nE 's/.*undefined symbol: ((cu|nccl|nv)[A-Za-z0-9_]+).*/void \1(void) { __builtin_trap(); }/p' <<<"$links" |
		sort -u >"$target/absent.c"
	"$compiler" -w -shared -fPIC -o "$cuda/libabsent.so" -Wl,-soname,libabsent.so "$target/absent.c" 2>"$log"
	for library in $(sed -nE 's/^\s*(lib(cu|nccl|nv)\S*) => not found.*/\1/p' <<<"$links" | sort -u); do
		# Symbols have versions, which an empty library need not list: glibc then takes any library's.
		"$compiler" -shared -o "$cuda/$library" -Wl,--no-as-needed,-soname,"$library" "$cuda/libabsent.so" 2>"$log"
	done
	"$target/bin/python" -W error::UserWarning -c '
import torch, transformers, peft, mlflow, tensorboard, wandb, datasets, torchvision
torch.linalg.svdvals(torch.ones(3, 3) @ torch.ones(3, 3))' >"$log" 2>&1
	chmod 755 "$target"
	mv -T "$target" "$home" 2>"$log" || [ -d "$home" ] # Another process may have been first.
fi
touch "$home"
find "$cache" -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} +
mkdir -p "$(dirname "$folder")"
ln -sfnT "$home" "$folder"
echo "$folder/bin/python"
