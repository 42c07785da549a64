/** Tries the folders that a run will write to before its first step, not at its first save. */
import { existsSync, mkdirSync, readdirSync, readlinkSync, rmSync, statfsSync, statSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { UserError } from "../system/errors.ts";
import { fileError, systemReason } from "../system/system-errors.ts";
import { formatBytes } from "./conversion/inspect.ts";
import { OutputFile, temporaryName } from "./files.ts";
import { latestName } from "./native/manifest.ts";
import { leftoverPattern } from "./native/writer.ts";

/**
 * Makes `folder` and writes a file there, brings it to the disk and removes it. Throws a UserError with `what`
 * (flag and value) and the reason when any of that is impossible, or when `target` inside it, which will be made later, cannot be.
 */
export function tryFolder(what: string, folder: string, target = folder): void {
	// A name that the next save removes, should this process be killed in between.
	const probe = temporaryName(join(folder, latestName));
	const refuse = (reason: string): never => {
		throw new UserError(`${what} cannot be written: ${reason}.`);
	};
	const known = obstacle(target);
	if (known !== null) refuse(known);
	try {
		mkdirSync(folder, { recursive: true });
		using file = new OutputFile(probe);
		file.write(new TextEncoder().encode("mimo\n"));
		file.close();
		// The save of a run that writes there may have removed it already.
		rmSync(probe, { force: true });
	} catch (error) {
		if (existsSync(probe)) rmSync(probe, { force: true });
		const cause = error instanceof UserError ? error.cause : error;
		// The system says of /proc that it does not exist.
		refuse((cause as NodeJS.ErrnoException).code === "ENOENT" ? "no folder can be made there" : systemReason(cause));
	}
}

/** As `tryFolder` for the folder of a file that a run will write much later; the file itself is not touched. */
export function tryFile(what: string, file: string): void {
	if (existsSync(file) && statSync(file).isDirectory()) {
		throw new UserError(`${what} cannot be written: it is a folder.`);
	}
	tryFolder(what, dirname(resolve(file)));
}

/** The first part of a path that is not a folder, with its kind; null: every part that exists is a folder. */
function obstacle(path: string): string | null {
	const parts = resolve(path).split("/").slice(1);
	for (let count = 1; count <= parts.length; count++) {
		const part = `/${parts.slice(0, count).join("/")}`;
		if (existsSync(part)) {
			if (!statSync(part).isDirectory()) return `${part} is not a folder`;
			continue;
		}
		try {
			return `${part} is a link to ${readlinkSync(part)}, which does not exist`;
		} catch {
			return null;
		}
	}
	return null;
}

/** The sentence about a disk of `root` that has no room for the `bytes` of `what`, removable leftovers counted as free; null: they fit. */
export function roomProblem(what: string, root: string, bytes: number): string | null {
	try {
		// A folder that will be made later lies on the disk of the folder above it.
		let there = resolve(root);
		while (!existsSync(there)) there = dirname(there);
		const { bsize, blocks, bavail } = statfsSync(there);
		const free = bsize * bavail + (existsSync(root) ? leftoverBytes(root) : 0);
		// A file system that counts no blocks does not know.
		if (blocks === 0 || free >= bytes) return null;
		return `${what} needs ${formatBytes(bytes)} (${bytes} bytes), but only ${formatBytes(free)} (${free} bytes) are free there.`;
	} catch (error) {
		return fileError("read", root, error).message;
	}
}

/** Bytes of the files that the next save into `root` removes before it writes. */
function leftoverBytes(root: string): number {
	const folders = readdirSync(root).filter((name) => leftoverPattern.test(name));
	const files = folders.flatMap((name) =>
		(readdirSync(join(root, name), { recursive: true }) as string[]).map((file) => join(root, name, file)),
	);
	return files.reduce((sum, file) => sum + (statSync(file, { throwIfNoEntry: false })?.size ?? 0), 0);
}
