/** Version and commit of this program: put in by build.ts; absent when run from source. */
declare const MIMO_VERSION: string | undefined;
declare const MIMO_COMMIT: string | undefined;

/** "0.1.0 (commit 0123456789ab)". */
export function programVersion(): string {
	const version = typeof MIMO_VERSION === "string" ? MIMO_VERSION : "from source";
	const commit = typeof MIMO_COMMIT === "string" ? MIMO_COMMIT : "unknown";
	return `${version} (commit ${commit})`;
}
