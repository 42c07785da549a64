/**
 * Where checkpoints are kept: a folder that every rank sees, or an object store. Each host has a local copy of the files that it
 * reads from the store or writes to it. A checkpoint is there when its index is, and the newest is the one that `latest` names; both are single
 * files or objects, whose writing is atomic.
 */
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultCacheFolder, openOwnFolder } from "../../system/private-folder.ts";
import { fileError } from "../../system/system-errors.ts";
import { rankName, type ShardReport } from "../native/writer.ts";
import { StagedStore } from "./staged-store.ts";
import { isStoreUrl } from "./store-address.ts";

/** A save on its way: the local folder that the ranks of this host write to, and the iteration's name. */
export interface PendingSave {
	readonly folder: string;
	readonly name: string;
}

/** A part of a work that ranks share. */
export interface Share {
	readonly part: number;
	readonly parts: number;
}

export interface CheckpointStore {
	/** As the user names it. */
	readonly path: string;
	/** The folder of this host in which checkpoints are read and written. */
	readonly folder: string;
	/** Whether `folder` is a copy: what is in it is also, or only, in the store. */
	readonly staged: boolean;
	/** Brings the list of checkpoints to `folder`: latest.json and every iteration's index. */
	refresh(): Promise<void>;
	/** Brings a share of the files of the iteration `name` to `folder`, whole and compared with their checksums. */
	bring(name: string, share: Share): Promise<void>;
	/** Throws a UserError unless the store takes writes. */
	probe(): Promise<void>;
	/** The end of a unique file name in this save; "" where the save's folder is unique already. */
	suffix(save: PendingSave): string;
	/** Keeps the files that a rank has written into the save's folder, and its report. */
	deliver(save: PendingSave, rank: number, report: ShardReport): Promise<void>;
	/** The reports of all ranks. */
	collect(save: PendingSave, ranks: number): Promise<ShardReport[]>;
	/**
	 * Keeps index and objects of a save's folder, and makes it the newest with the text of latest.json. `foreign`: replace
	 * checkpoints that another run has put there too.
	 */
	commit(save: PendingSave, latest: string, options: { readonly foreign: boolean }): Promise<void>;
	/** Removes an iteration from the store, its index first. */
	remove(name: string): Promise<void>;
}

/** A store as plain data, for another thread. */
export type StoreReference = Pick<CheckpointStore, "path" | "folder" | "staged">;

function withoutSlash(url: string): string {
	return url.replace(/(?<=[^/:])\/+$/, "");
}

/** The folder in which this host reads and writes the checkpoints of `path`: the path itself, or a URL's place below `staging`. */
export function localFolder(path: string, staging: string | null): string {
	if (!isStoreUrl(path)) return path;
	const name = createHash("sha256").update(withoutSlash(path)).digest("hex").slice(0, 16);
	return join(openOwnFolder(staging ?? defaultCacheFolder(), "checkpoints", "--staging-dir"), name);
}

/** Opens the store of a path. */
export function openStore(path: string, staging: string | null): CheckpointStore {
	return storeOf({ path, folder: localFolder(path, staging), staged: isStoreUrl(path) });
}

export function storeOf({ path, folder, staged }: StoreReference): CheckpointStore {
	return staged ? new StagedStore(withoutSlash(path), folder) : new SharedFolder(path);
}

const reportsName = "reports";

function reportPath(folder: string, rank: number): string {
	return join(folder, reportsName, `${rankName(rank)}.json`);
}

/** A folder on a disk that all ranks see. */
class SharedFolder implements CheckpointStore {
	readonly staged = false;

	constructor(readonly path: string) {}

	get folder(): string {
		return this.path;
	}

	async refresh(): Promise<void> {}

	async bring(): Promise<void> {}

	async probe(): Promise<void> {}

	suffix(): string {
		return "";
	}

	async deliver({ folder }: PendingSave, rank: number, report: ShardReport): Promise<void> {
		const path = reportPath(folder, rank);
		try {
			mkdirSync(join(folder, reportsName), { recursive: true });
			writeFileSync(path, JSON.stringify(report));
		} catch (error) {
			throw fileError("write", path, error);
		}
	}

	async collect({ folder }: PendingSave, ranks: number): Promise<ShardReport[]> {
		const reports = Array.from({ length: ranks }, (_, rank): ShardReport => {
			const path = reportPath(folder, rank);
			try {
				return JSON.parse(readFileSync(path, "utf8"));
			} catch (error) {
				throw fileError("read", path, error);
			}
		});
		rmSync(join(folder, reportsName), { recursive: true });
		return reports;
	}

	/** The folder's new name makes it one (NativeSave.publish). */
	async commit(): Promise<void> {}

	async remove(): Promise<void> {}
}
