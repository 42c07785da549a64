/**
 * What a test needs and a machine may lack: a build, a program, a package, a right. `npm test` skips such a test, with a
 * printed reason. It fails where everything is built and installed first, which .ci/run says by MIMO_REQUIRE_BUILDS=true.
 */

/** Reports what is absent and how to get it: an error where nothing may be, else a printed skip and null. */
export function absent(what: string, remedy: string): null {
	const sentence = `${what} is absent (${remedy})`;
	if (process.env.MIMO_REQUIRE_BUILDS === "true") throw new Error(`Nothing may be skipped here: ${sentence}.`);
	console.error(`skip: ${sentence}`);
	return null;
}

/** Whether all programs are on the PATH. `packages`: those of Debian that have them (.ci/debian.sh). */
export function hasPrograms(names: readonly string[], packages: string): boolean {
	const missing = names.filter((name) => Bun.which(name) === null);
	return missing.length === 0 || absent(missing.join(", "), `Debian: apt-get install ${packages}`) !== null;
}

/** Begins a command that may mount file systems of its own, such as a small /dev/shm, also without root. */
export const mountNamespace = ["unshare", "--mount", "--map-root-user"];

/** Whether this machine lets a process mount file systems of its own. */
export function canMount(): boolean {
	const command = [...mountNamespace, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"];
	const mounts = Bun.which("unshare") !== null && Bun.spawnSync(command, { stderr: "ignore" }).success;
	return (
		mounts ||
		absent("the right to mount file systems of one's own", "unshare of util-linux, outside a container") !== null
	);
}
