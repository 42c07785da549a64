#!/usr/bin/env bash
# Installs the Debian packages that tests use beyond those of the build: a Slurm, the shells of `mimo completion`, tools of
# namespaces, a browser, and debootstrap. Where it may not, it prints the command and exits with 1.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(slurmctld slurmd slurm-client munge zsh fish iproute2 util-linux chromium-headless-shell debootstrap)
programs=(slurmctld slurmd munged sbatch srun scancel zsh fish ip tc unshare setpriv chromium-headless-shell debootstrap)

missing=()
for program in "${programs[@]}"; do
	command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "There is no ${missing[*]}. On Debian, as root: apt-get install ${packages[*]}"
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# The build, which may install packages of its own, takes the same lock (build.ts).
mkdir -p build
lock=(flock build/packages.lock)
"${lock[@]}" apt-get -qq update
"${lock[@]}" apt-get -qq install --yes --no-install-recommends "${packages[@]}"
