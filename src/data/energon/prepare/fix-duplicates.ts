/**
 * Makes sample keys distinct by rewriting the headers of shards in place: every member moves into a folder with the shard's name
 * (docs/spec/energon.md §1.2). The shards are changed only if every header has room for the longer name.
 */
import { closeSync, openSync, writeSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { splitMemberName } from "../format/names.ts";
import { TarError } from "../format/tar.ts";
import { LocalFile } from "../storage/local.ts";
import { walkTar } from "./shard-index.ts";

const NAME_BYTES = 100;

interface Rename {
	readonly offset: number;
	readonly header: Uint8Array;
}

/** Renames the members of all shards if two samples have the same key. */
export function prefixMembers(folder: string, names: readonly string[], report: (line: string) => void): void {
	const keys = new Set<string>();
	let duplicates = 0;
	const renames = new Map<string, Rename[]>();
	for (const name of names) {
		const { renamed, own } = planShard(folder, name);
		renames.set(name, renamed);
		for (const key of own) {
			if (keys.has(key)) duplicates++;
			keys.add(key);
		}
	}
	if (duplicates === 0) {
		report("all sample keys are distinct");
		return;
	}
	for (const [name, renamed] of renames) {
		const descriptor = openSync(join(folder, name), "r+");
		try {
			for (const { offset, header } of renamed) writeSync(descriptor, header, 0, header.length, offset);
		} finally {
			closeSync(descriptor);
		}
	}
	report(
		`${duplicates} sample keys were not distinct; the files of every shard are now in a folder with the shard's name`,
	);
}

function planShard(folder: string, name: string): { renamed: Rename[]; own: string[] } {
	const path = join(folder, name);
	const file = LocalFile.open(path);
	const renamed: Rename[] = [];
	const own: string[] = [];
	try {
		for (const member of walkTar(file)) {
			const parts = member.isFile ? splitMemberName(member.name) : null;
			if (parts !== null && parts.base !== own[own.length - 1]) own.push(parts.base);
			if (!member.isFile) continue;
			const longer = `${name.replace(/\.tar$/, "")}/${member.name}`;
			if (member.contentOffset - member.headerOffset !== 512 || Buffer.byteLength(longer) > NAME_BYTES) {
				throw new UserError(
					`${path}: ${member.name} cannot be renamed in place; write the shard again with distinct keys.`,
				);
			}
			renamed.push({ offset: member.headerOffset, header: renameHeader(file.read(member.headerOffset, 512), longer) });
		}
	} catch (error) {
		if (error instanceof TarError) throw new UserError(`${path} is damaged: ${error.message}.`);
		throw error;
	} finally {
		file.close();
	}
	return { renamed, own };
}

function renameHeader(header: Uint8Array, name: string): Uint8Array {
	const changed = Uint8Array.from(header);
	changed.fill(0, 0, NAME_BYTES);
	changed.set(new TextEncoder().encode(name), 0);
	// The prefix field of a POSIX header is cleared, because the new name is whole.
	if (new TextDecoder().decode(changed.subarray(257, 263)) === "ustar\0") changed.fill(0, 345, 500);
	changed.fill(0x20, 148, 156);
	const sum = changed.reduce((total, byte) => total + byte, 0);
	changed.set(new TextEncoder().encode(`${sum.toString(8).padStart(6, "0")}\0 `), 148);
	return changed;
}
