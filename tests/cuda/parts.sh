# shellcheck shell=bash
# Parts of a script that prints each command with its seconds and goes on after a failure; other scripts source this file.

failed=0

# run SECONDS COMMAND…: at most so long.
run() {
	local seconds=$1 began=$SECONDS
	shift
	echo "== $*"
	if ! timeout "$seconds" "$@" 2>&1; then failed=1 && echo FAILED; fi
	echo "   $((SECONDS - began)) s"
}

# run_parts NAME…: calls the functions of these names, and ends with 1 if a command of theirs failed.
run_parts() {
	local part
	for part in "$@"; do "$part"; done
	exit $failed
}
