/** Version and commit of this program: put in by build.ts; absent when run from source. */
declare const MIMO_VERSION: string | undefined;
declare const MIMO_COMMIT: string | undefined;

/** "0.1.0 (commit 0123456789ab)". */
export function programVersion(): string {
	const version = typeof MIMO_VERSION === "string" ? MIMO_VERSION : "from source";
	const commit = typeof MIMO_COMMIT === "string" ? MIMO_COMMIT : "unknown";
	return `${version} (commit ${commit})`;
}

/** The command line of this build without arguments; /proc/PID/exe is this build even if its file has been replaced since. */
export function ownProgram(): string[] {
	return [`/proc/${process.pid}/exe`, ...(Bun.main.startsWith("/$bunfs/") ? [] : [Bun.main])];
}
