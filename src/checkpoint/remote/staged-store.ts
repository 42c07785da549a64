/**
 * Checkpoints in an object store. Every rank writes its files to the local disk and sends them; their names are new in every
 * save, so that no object of a whole checkpoint is ever written again. The index comes after all of them are there, in
 * one atomic write that takes effect only if no other run has come first, and then, likewise, latest.json. Objects of saves
 * that were never finished are removed when they are a day old.
 */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { readWholeFile, readWholeText } from "../../system/input-file.ts";
import { indexLimits, readJsonText } from "../../system/json.ts";
import { writeFileAtomically } from "../files.ts";
import { indexName, latestName, type Manifest, parseManifest } from "../native/manifest.ts";
import { copyTagName, fileDamage, parseLatest } from "../native/reader.ts";
import { leftoverPattern, rankName, type ShardReport } from "../native/writer.ts";
import type { CheckpointStore, PendingSave, Share } from "./checkpoint-store.ts";
import { BRINGS, type Condition, FILES_AT_ONCE, inParallel, ObjectStore } from "./object-store.ts";
import { defaultRequests, type RequestOptions } from "./requests.ts";

const iterationIndex = /^((?:iter_\d+|release))\/index\.json$/;
/** Bytes of the largest latest.json. */
const LARGEST_LATEST = 2 ** 16;
/** Small objects on their way at once. */
const SMALL_AT_ONCE = 16;
/** Milliseconds after which what an unfinished save has left is removed: its run is no longer about to finish it. */
const ABANDONED = 24 * 3600_000;

export class StagedStore implements CheckpointStore {
	readonly staged = true;
	readonly #store: ObjectStore;

	constructor(
		readonly path: string,
		readonly folder: string,
		options: RequestOptions = defaultRequests,
		environment?: Readonly<Record<string, string | undefined>>,
	) {
		this.#store = new ObjectStore(path, options, environment);
	}

	async refresh(): Promise<void> {
		mkdirSync(this.folder, { recursive: true });
		for (let attempt = 1; ; attempt++) {
			const latest = await this.#store.get(latestName, LARGEST_LATEST);
			const tags = await this.#indexes(latest?.bytes ?? null);
			await inParallel([...tags], SMALL_AT_ONCE, ([name, tag]) => this.#bringIndex(name, tag));
			for (const name of this.#iterations()) {
				if (!tags.has(name)) rmSync(join(this.folder, name), { recursive: true, force: true });
			}
			const fault = latest === null ? null : this.#latestFault(latest.bytes);
			if (fault === null || attempt === BRINGS) {
				// A run that replaced the newest checkpoint, and was killed before it could say so, leaves the tag of the old one:
				// the newest whole one counts.
				if (latest === null || fault !== null) rmSync(join(this.folder, latestName), { force: true });
				else this.#keep(latestName, latest.bytes);
				return;
			}
			for (const name of tags.keys()) rmSync(join(this.folder, name, copyTagName), { force: true });
		}
	}

	/**
	 * Tags of the iterations' indexes by iteration: "" is a URL that is a checkpoint itself. A plain server is asked for its newest, and for
	 * those that this host knows of.
	 */
	async #indexes(latest: Uint8Array | null): Promise<Map<string, string>> {
		const [, newest] = /"dir":\s*"(iter_\d+|release)"/.exec(new TextDecoder().decode(latest ?? undefined)) ?? [];
		const names = newest === undefined ? this.#iterations() : [newest, ...this.#iterations()];
		const known = [indexName, ...names.map((name) => `${name}/${indexName}`)];
		const found = (await this.#store.list("", known)).map(
			({ key, etag }) => [key === indexName ? "" : (iterationIndex.exec(key)?.[1] ?? null), etag] as const,
		);
		return new Map(found.flatMap(([name, etag]) => (name === null ? [] : [[name, etag] as const])));
	}

	/** Names of the iterations that this host knows of. */
	#iterations(): string[] {
		return readdirSync(this.folder).filter((name) => /^(iter_\d+|release)$/.test(name));
	}

	async #bringIndex(name: string, tag: string): Promise<void> {
		const known = join(this.folder, name, copyTagName);
		if (tag !== "" && existsSync(known) && readWholeText(known, LARGEST_LATEST) === tag) return;
		const index = await this.#store.get(join(name, indexName), indexLimits.bytes);
		// It was removed meanwhile.
		if (index === null) return;
		this.#keep(join(name, indexName), index.bytes);
		this.#keep(join(name, copyTagName), new TextEncoder().encode(index.etag));
	}

	/** The index of an iteration, which may not be in the folder yet, or damaged there. */
	async #manifest(name: string): Promise<Manifest> {
		const path = join(this.folder, name, indexName);
		for (let attempt = 1; ; attempt++) {
			if (!existsSync(path)) await this.#bringIndex(name, "");
			if (!existsSync(path)) throw new UserError(`${this.#named(name)} is no checkpoint: it has no ${indexName}.`);
			try {
				return parseManifest(readJsonText(path, indexLimits), path);
			} catch (error) {
				if (attempt === BRINGS) throw error;
				rmSync(path);
			}
		}
	}

	#named(key: string): string {
		return key === "" ? this.path : `${this.path}/${key}`;
	}

	/** Why latest.json and the local index that it names do not belong together; null: they do. */
	#latestFault(bytes: Uint8Array): string | null {
		try {
			const { dir, indexSha256 } = parseLatest(new TextDecoder().decode(bytes), `${this.path}/${latestName}`);
			const index = join(this.folder, dir, indexName);
			const sum = existsSync(index) ? sumOf(readWholeFile(index, indexLimits.bytes)) : "";
			return sum === indexSha256 ? null : `${this.path}/${dir} is not the checkpoint that ${latestName} names`;
		} catch (error) {
			return (error as Error).message;
		}
	}

	#keep(name: string, bytes: Uint8Array): void {
		const path = join(this.folder, name);
		mkdirSync(dirname(path), { recursive: true });
		writeFileAtomically(path, (file) => file.write(bytes), { sync: false });
	}

	async bring(name: string, { part, parts }: Share): Promise<void> {
		const folder = join(this.folder, name);
		const manifest = await this.#manifest(name);
		if (part === 0) this.#dropOthers(name);
		const files = Object.keys(manifest.files).sort();
		const mine = files.filter((_, at) => at % parts === part);
		await inParallel(mine, FILES_AT_ONCE, async (file) => {
			const options = { part, damage: (path: string) => fileDamage(path, file, manifest) };
			await this.#store.bring(join(name, file), join(folder, file), manifest.files[file]!.bytes, options);
		});
	}

	/** Frees the disk of the values of other iterations. */
	#dropOthers(name: string): void {
		for (const other of this.#iterations()) {
			if (other === name) continue;
			for (const entry of readdirSync(join(this.folder, other))) {
				if (entry === "data" || entry.includes(".safetensors"))
					rmSync(join(this.folder, other, entry), { recursive: true });
			}
		}
	}

	async probe(): Promise<void> {
		const name = `${latestName}.tmp-${crypto.randomUUID().slice(0, 8)}`;
		await this.#store.put(name, new TextEncoder().encode("mimo\n"));
		await this.#store.remove(name);
	}

	suffix({ folder }: PendingSave): string {
		return `-${folder.slice(folder.lastIndexOf("-") + 1)}`;
	}

	async deliver(save: PendingSave, rank: number, report: ShardReport): Promise<void> {
		this.#removeOwnLeftovers(save, rank);
		for (const file of Object.keys(report.files)) {
			const path = join(save.folder, file);
			await this.#store.upload(`${save.name}/${file}`, path);
			rmSync(path);
		}
		const text = JSON.stringify(report);
		await this.#store.put(this.#reportKey(save, rank), new TextEncoder().encode(`${sumOf(text)}\n${text}`));
	}

	async #report(key: string): Promise<ShardReport> {
		for (let attempt = 1; ; attempt++) {
			const found = await this.#store.get(key, indexLimits.bytes);
			if (found === null) throw new UserError(`${this.path}/${key} is missing: was it deleted during the save?`);
			const [sum, text] = new TextDecoder().decode(found.bytes).split("\n", 2) as [string, string];
			if (sumOf(text) === sum) return JSON.parse(text);
			if (attempt === BRINGS) throw new UserError(`${this.path}/${key} is damaged: its checksum differs.`);
		}
	}

	/** Removes what this rank has left on this host in saves that were killed. */
	#removeOwnLeftovers({ folder }: PendingSave, rank: number): void {
		const own = `${rankName(rank)}-`;
		for (const name of readdirSync(this.folder)) {
			const data = join(this.folder, name, "data");
			if (!leftoverPattern.test(name) || join(this.folder, name) === folder || !existsSync(data)) continue;
			for (const file of readdirSync(data)) if (file.startsWith(own)) rmSync(join(data, file), { force: true });
		}
	}

	#reportKey(save: PendingSave, rank: number): string {
		return `${save.name}/reports${this.suffix(save)}/${rankName(rank)}.json`;
	}

	async collect(save: PendingSave, ranks: number): Promise<ShardReport[]> {
		const reports: ShardReport[] = [];
		const keys = Array.from({ length: ranks }, (_, rank) => this.#reportKey(save, rank));
		await inParallel([...keys.entries()], SMALL_AT_ONCE, async ([rank, key]) => {
			reports[rank] = await this.#report(key);
		});
		// Others are found by listing when the checkpoint is there.
		if (!this.#store.listable) await this.#removeAll(keys).catch(() => {});
		return reports;
	}

	async commit(
		{ folder, name }: PendingSave,
		latest: string,
		{ foreign }: { readonly foreign: boolean },
	): Promise<void> {
		const index = readWholeText(join(folder, indexName), indexLimits.bytes);
		const { files } = parseManifest(index, join(folder, indexName));
		for (const file of Object.keys(files)) {
			const path = join(folder, file);
			if (existsSync(path)) await this.#store.upload(`${name}/${file}`, path);
		}
		const objects = await this.#store.list(`${name}/`, keysOf(name, files));
		const there = new Map(objects.map(({ key, bytes }) => [key, bytes]));
		for (const [file, { bytes }] of Object.entries(files)) {
			const found = there.get(`${name}/${file}`);
			if (found === bytes) continue;
			throw new UserError(
				`${this.path}/${name}/${file} has ${found ?? "no"} bytes of ${bytes}: was it deleted during the save?`,
			);
		}
		const before = await this.#knownLatest();
		if (before === undefined && !foreign) this.#refuse(latestName);
		const tag = join(this.folder, name, copyTagName);
		const known: Condition = existsSync(tag) ? { etag: readWholeText(tag, LARGEST_LATEST) } : { absent: true };
		const replaced = foreign ? null : known;
		const indexTag = await this.#store.put(`${name}/${indexName}`, new TextEncoder().encode(index), replaced);
		if (indexTag === null) return this.#refuse(name);
		const unchanged: Condition = before?.etag === undefined ? { absent: true } : { etag: before.etag };
		const done = await this.#store.put(latestName, new TextEncoder().encode(latest), foreign ? null : unchanged);
		if (done === null) this.#refuse(latestName);
		writeFileAtomically(join(folder, copyTagName), (file) => file.write(new TextEncoder().encode(indexTag)));
		// The checkpoint is there; what else is there is removed, now or at a later save.
		const kept = new Set([`${name}/${indexName}`, ...keysOf(name, files)]);
		await this.#removeAll([...there.keys()].filter((key) => !kept.has(key))).catch(() => {});
		await this.#removeAbandoned().catch(() => {});
	}

	/** latest.json as the store has it: null without one, undefined if another run has written it. */
	async #knownLatest(): Promise<{ readonly etag: string } | null | undefined> {
		const path = join(this.folder, latestName);
		const known = existsSync(path) ? readWholeFile(path, LARGEST_LATEST) : Buffer.of();
		for (let attempt = 1; attempt <= BRINGS; attempt++) {
			const there = await this.#store.get(latestName, LARGEST_LATEST);
			if (Buffer.compare(there?.bytes ?? Buffer.of(), known) === 0) return there;
		}
		return undefined;
	}

	#refuse(what: string): never {
		throw new UserError(
			`${this.path}/${what} was put there while this run trained, by another run: --save-over replaces it.`,
		);
	}

	async remove(name: string): Promise<void> {
		// A plain server has what the index names; an index that is gone leaves it there.
		const known = this.#store.listable ? [] : keysOf(name, (await this.#manifest(name)).files);
		await this.#store.remove(`${name}/${indexName}`);
		await this.#removeAll((await this.#store.list(`${name}/`, known)).map(({ key }) => key));
	}

	/** Objects of iterations without an index, and unfinished uploads. */
	async #removeAbandoned(): Promise<void> {
		if (!this.#store.listable) return;
		const all = await this.#store.list();
		const whole = new Set(all.flatMap(({ key }) => iterationIndex.exec(key)?.[1] ?? []));
		// Clocks of hosts differ from the store's: its newest object says what time it is there.
		const before = all.reduce((newest, { modified }) => Math.max(newest, modified), 0) - ABANDONED;
		const ofIterations = all.filter(({ key }) => /^(iter_\d+|release)\//.test(key) && !whole.has(key.split("/")[0]!));
		await this.#removeAll(ofIterations.filter(({ modified }) => modified < before).map(({ key }) => key));
		await this.#store.abortUploads(before);
	}

	async #removeAll(keys: readonly string[]): Promise<void> {
		await inParallel(keys, SMALL_AT_ONCE, (key) => this.#store.remove(key));
	}
}

function keysOf(name: string, files: Manifest["files"]): string[] {
	return Object.keys(files).map((file) => `${name}/${file}`);
}

function sumOf(content: string | Uint8Array): string {
	return createHash("sha256").update(content).digest("hex");
}
