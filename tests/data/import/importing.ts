/** Runs imports in tests. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { walkTar } from "../../../src/data/energon/prepare/shard-index.ts";
import { LocalFile } from "../../../src/data/energon/storage/open.ts";
import { type ImportOptions, type ImportResult, importData } from "../../../src/data/import/import.ts";
import { noColumns } from "../../../src/data/import/row.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";

export const golden = join(import.meta.dir, "../../golden/import");

export const importDefaults: Omit<ImportOptions, "paths" | "output"> = {
	from: null,
	columns: noColumns,
	table: { header: true, delimiter: null },
	imageRoot: null,
	dataset: null,
	shares: null,
	shardSamples: 10_000,
	shardBytes: 2 ** 29,
	shuffle: null,
	skipLimit: { share: 0.1 },
	decode: false,
	privateAddresses: true,
	report: () => {},
};

export async function importing(
	path: string,
	output: string,
	options: Partial<ImportOptions> = {},
): Promise<ImportResult> {
	const images = new Images(await openLibrary("cpu"));
	return await importData({ ...importDefaults, paths: [path], output, ...options }, images);
}

/** Members of all tar files of a folder, by shard and name, as text or a digest of bytes. */
export function membersOf(folder: string): Record<string, string> {
	const members: Record<string, string> = {};
	for (const name of readdirSync(folder)
		.filter((file) => file.endsWith(".tar"))
		.sort()) {
		const file = LocalFile.open(join(folder, name));
		for (const member of walkTar(file)) {
			const bytes = Buffer.from(file.read(member.contentOffset, member.size));
			members[`${name}/${member.name}`] = member.name.endsWith(".json")
				? bytes.toString()
				: Bun.SHA256.hash(bytes, "hex").slice(0, 12);
		}
		file.close();
	}
	return members;
}

/** Bytes of every file that an import writes, but for the identity that each index gets anew. */
export function filesOf(folder: string): Record<string, string> {
	const names = [...new Bun.Glob("**/*").scanSync({ cwd: folder, dot: true })].sort();
	return Object.fromEntries(
		names
			.filter((name) => !name.endsWith("index.uuid"))
			.map((name) => [name, Bun.SHA256.hash(readFileSync(join(folder, name)), "hex")]),
	);
}
