/**
 * Folders of models in stores, of any format: Hugging Face's, PEFT's, Megatron's and our own. Beside the files of one that this program has
 * written stands a record of them with their checksums, which is written last: while it lists none, the folder is not there.
 */
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, rmSync, statSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { configLimits, jsonText } from "../../system/json.ts";
import { type Durability, fileDigest } from "../files.ts";
import {
	diskFormat,
	mayWrite,
	ownershipFile,
	requireEmptyTarget,
	requirePlainName,
	writeFolderAtomically,
} from "../folders.ts";
import { indexName, latestName } from "../native/manifest.ts";
import { newRunName } from "../native/writer-lock.ts";
import { tracker } from "../torch-dist/folder.ts";
import { localFolder } from "./checkpoint-store.ts";
import { BRINGS, FILES_AT_ONCE, inParallel, ObjectStore } from "./object-store.ts";
import { isStoreUrl } from "./store-address.ts";

const recordSchema = v.object({
	format: v.literal("mimo-folder"),
	/** Name of the run that began the training; null: it was converted. */
	lineage: v.nullable(v.string()),
	/** By name, with / between folders; null: the folder is being written, or was left so. */
	files: v.nullable(v.record(v.string(), v.object({ bytes: v.number(), sha256: v.string() }))),
	/** `sumOf` the rest. */
	sha256: v.string(),
});
type FolderRecord = v.InferOutput<typeof recordSchema>;

function sumOf({ lineage, files }: Omit<FolderRecord, "sha256" | "format">): string {
	return createHash("sha256")
		.update(JSON.stringify([lineage, files]))
		.digest("hex");
}

/** Files by which readers know a folder: they are written after all others. */
const telling = ["config.json", "adapter_config.json", ".metadata", indexName, tracker, latestName];

/** Throws a UserError for a name that leads out of its folder. */
export function requireInnerName(name: string, where: string): string {
	for (const part of name.split("/")) requirePlainName(part, where);
	return name;
}

/** The record of a stored folder; null: it is absent, or is the ownership file of a copied folder. Throws a UserError for a damaged record. */
export async function readRecord(store: ObjectStore): Promise<FolderRecord | null> {
	const path = `${store.url}/${ownershipFile}`;
	for (let attempt = 1; ; attempt++) {
		const found = await store.get(ownershipFile, configLimits.bytes);
		if (found === null) return null;
		const text = jsonText(found.bytes, path, configLimits);
		const { success, output } = v.safeParse(v.pipe(v.string(), v.parseJson(), recordSchema), text);
		if (success && sumOf(output) === output.sha256) {
			for (const name of Object.keys(output.files ?? {})) requireInnerName(name, path);
			return output;
		}
		if (text.includes(diskFormat)) return null;
		if (attempt === BRINGS) throw new UserError(`${path} is damaged.`);
	}
}

/** As `mayWrite`, also of a store. */
export async function mayWriteTo(path: string, lineage: string | null): Promise<boolean> {
	if (!isStoreUrl(path)) return mayWrite(path, lineage);
	const store = new ObjectStore(path);
	const record = await readRecord(store);
	if (record !== null) return lineage !== null && record.lineage === lineage;
	return (await store.list("", telling)).length === 0;
}

/** Throws a UserError unless `mayWriteTo`, and unless a store takes files. */
export async function requireWritable(path: string, lineage: string | null, flag: string): Promise<void> {
	if (!(await mayWriteTo(path, lineage))) {
		throw new UserError(
			`--${flag} ${path} exists, and this training has not written it: name another folder, or remove this one.`,
		);
	}
	if (!isStoreUrl(path)) return;
	const store = new ObjectStore(path);
	const name = `${ownershipFile}.tmp-${newRunName()}`;
	await store.put(name, new TextEncoder().encode("mimo\n"));
	await store.remove(name);
}

/** Throws a UserError for a target of a conversion that already holds something. */
export async function requireEmpty(path: string): Promise<void> {
	if (!isStoreUrl(path)) return requireEmptyTarget(path);
	if ((await new ObjectStore(path).list("", [ownershipFile, ...telling])).length === 0) return;
	throw new UserError(`Cannot write to ${path}: there are files (--force replaces them).`);
}

/** How a folder is written. */
export interface Placing extends Durability {
	/** Name of the run that began the training; null: none did. */
	readonly lineage: string | null;
	/** Of a path on a disk: whether what is there is replaced; in a store it is. */
	readonly replace: boolean;
	/** --staging-dir. */
	readonly staging: string | null;
}

/** Lets `build` fill a new folder, and gives it the name `path`, or puts its files into the store of that URL, once it is complete. */
export async function writeFolder(
	path: string,
	{ lineage, staging, ...options }: Placing,
	build: (folder: string) => unknown,
): Promise<void> {
	if (!isStoreUrl(path)) return void (await writeFolderAtomically(path, options, build));
	// A training's is the same whenever it saves: no killed save leaves more than that.
	const folder = localFolder(`${path}/${lineage ?? newRunName()}`, staging);
	const remove = () => rmSync(folder, { recursive: true, force: true });
	remove();
	mkdirSync(folder, { recursive: true });
	let built = false;
	try {
		await build(folder);
		built = true;
		await sendFolder(folder, path, lineage);
	} catch (error) {
		if (built && error instanceof UserError) throw new UserError(`${error.message} Its files are in ${folder}.`);
		remove();
		throw error;
	}
	remove();
}

const tells = (name: string) => telling.includes(name.slice(name.lastIndexOf("/") + 1));

/**
 * Puts the files of a folder into a store. First a record without files takes the place of an older one, and files that tell of a folder go:
 * readers find no whole folder until the record of the new files is there. Other files of the old folder are removed.
 */
async function sendFolder(folder: string, url: string, lineage: string | null): Promise<void> {
	const store = new ObjectStore(url);
	const before = Object.keys((await readRecord(store))?.files ?? {});
	const put = async (files: FolderRecord["files"]) => {
		const record: FolderRecord = { format: "mimo-folder", lineage, files, sha256: sumOf({ lineage, files }) };
		await store.put(ownershipFile, new TextEncoder().encode(`${JSON.stringify(record)}\n`));
	};
	await put(null);
	const there = (await store.list("", [...telling, ...before])).map(({ key }) => key);
	const each = async (names: readonly string[], work: (name: string) => Promise<void>) =>
		await inParallel(names, FILES_AT_ONCE, work);
	const remove = async (name: string) => await store.remove(name);
	const send = async (name: string) => await store.upload(name, join(folder, name));
	await each(there.filter(tells), remove);
	const all = readdirSync(folder, { recursive: true }) as string[];
	const names = all.filter((name) => name !== ownershipFile && statSync(join(folder, name)).isFile()).sort();
	await each(
		names.filter((name) => !tells(name)),
		send,
	);
	await each(names.filter(tells), send);
	const fileOf = (path: string) => ({ bytes: statSync(path).size, sha256: fileDigest(path, "sha256") });
	const files = Object.fromEntries(names.map((name) => [name, fileOf(join(folder, name))]));
	await put(files);
	await each(
		there.filter((key) => key !== ownershipFile && !tells(key) && !(key in files)),
		remove,
	).catch(() => {});
}
