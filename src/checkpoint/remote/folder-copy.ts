/**
 * Copies on this host of what commands read from stores: a checkpoint of ours, a folder of a model, or a single file of weights. A command
 * asks for the folder that a path stands for; where a copy is to be brought first it ends with CopyMissing, and runs again afterwards.
 */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, rmSync, statSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { placeFromEnvironment } from "../../launch/place.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import { fileDigest, writeFileAtomically } from "../files.ts";
import { ownershipFile } from "../folders.ts";
import { hubFolder, wanted } from "../hf/hub.ts";
import { latestName } from "../native/manifest.ts";
import { isCheckpoint, NativeCheckpoint } from "../native/reader.ts";
import { iterationName } from "../native/writer.ts";
import { tracker } from "../torch-dist/folder.ts";
import { localFolder, type Share } from "./checkpoint-store.ts";
import { addCopy, CopyMissing, copyOf, type Wanted } from "./copies.ts";
import { FILES_AT_ONCE, inParallel, ObjectStore } from "./object-store.ts";
import { StagedStore } from "./staged-store.ts";
import { isStoreUrl } from "./store-address.ts";
import { readRecord, requireInnerName } from "./stored-folder.ts";

/** A file that says which folder holds the copy. */
const pointerName = "copy";
/** Bytes of the largest pointer. */
const LARGEST_POINTER = 4096;

/** Copies for reading have folders of their own: runs keep theirs in order. */
function rootOf(url: string, staging: string | null): string {
	return `${localFolder(url, staging)}-copy`;
}

/** The folder or file that a path, a model's name on the Hub or a URL stands for. Throws HubModelMissing or CopyMissing. */
export function placedFolder(path: string, staging: string | null = null, iteration: number | null = null): string {
	if (!isStoreUrl(path)) return hubFolder(path);
	const wanted = { url: path, staging, iteration };
	const known = copyOf(wanted);
	if (known !== undefined) return known;
	const root = rootOf(path, staging);
	const pointer = join(root, pointerName);
	// Ranks read the copy that their launcher has brought.
	if ((placeFromEnvironment()?.launcher ?? null) === null || !existsSync(pointer)) throw new CopyMissing(wanted);
	return addCopy(wanted, join(root, readWholeText(pointer, LARGEST_POINTER)));
}

/** Brings what was missing, of the ranks of this host that do so together this rank's share, and waits for the others'. */
export async function bringCopy(wanted: Wanted): Promise<void> {
	const place = placeFromEnvironment();
	const share = { part: place?.localRank ?? 0, parts: place?.localSize ?? 1 };
	const root = rootOf(wanted.url, wanted.staging);
	const copy = await bringTo(root, wanted, share);
	if (share.part === 0) {
		const text = new TextEncoder().encode(copy);
		writeFileAtomically(join(root, pointerName), (file) => file.write(text), { sync: false });
	}
	addCopy(wanted, join(root, copy));
}

/** A file of a folder in a store. */
interface StoredFile {
	readonly name: string;
	readonly bytes: number;
	/** "" where it is not known. */
	readonly etag: string;
	readonly sha256?: string;
}

/** Brings it into `root`; the path of the copy there. */
async function bringTo(root: string, { url, iteration }: Wanted, share: Share): Promise<string> {
	if (url.endsWith(".safetensors")) {
		const [store, name] = [new ObjectStore(dirname(url)), basename(url)];
		const found = await store.stat(name);
		if (found === null) throw new UserError(`${url} does not exist.`);
		return join(await bringFiles(root, store, [{ name, ...found }], share), name);
	}
	const own = new StagedStore(url.replace(/\/+$/, ""), root);
	await own.refresh();
	if (isCheckpoint(root)) {
		const path = iteration === null ? NativeCheckpoint.openExactly(root).path : join(root, iterationName(iteration));
		await own.bring(path === root ? "" : basename(path), share);
		const { files } = NativeCheckpoint.openExactly(path).manifest;
		await allThere(path, new Map(Object.entries(files).map(([file, { bytes }]) => [file, bytes])));
		return "";
	}
	const store = new ObjectStore(own.path);
	const record = await readRecord(store);
	if (record !== null && record.files === null) {
		throw new UserError(`${url} is not whole: it is being written, or what wrote it was cut off.`);
	}
	const recorded = Object.entries(record?.files ?? {}).map(([name, file]) => ({ name, etag: "", ...file }));
	return await bringFiles(root, store, record === null ? await listFiles(store) : recorded, share);
}

/** Files of Megatron's checkpoints. */
const megatron = /(^|\/)(\.metadata|[^/]+\.(distcp|pt))$/;

/** Files of a folder without a record in a store that lists: those of a model, or of the newest of Megatron's checkpoints. */
async function listFiles(store: ObjectStore): Promise<StoredFile[]> {
	const all = (await store.list()).map(({ key, bytes, etag }) => ({ name: key, bytes, etag }));
	const newest = all.some(({ name }) => name === tracker) ? (await store.get(tracker))!.bytes : null;
	const number = newest === null ? "" : new TextDecoder().decode(newest).trim();
	const step = number === "release" ? "release/" : `${iterationName(Number(number))}/`;
	const ofModel = (name: string) => (wanted.test(name) && !name.includes("/")) || megatron.test(name);
	const files = all.filter(({ name }) => (newest === null ? ofModel(name) : name === tracker || name.startsWith(step)));
	const telling = [ownershipFile, "config.json", "adapter_config.json", ".metadata", "metadata.json", tracker];
	if (!files.some(({ name }) => telling.includes(name))) {
		const names = store.listable ? telling : telling.slice(0, 1);
		throw new UserError(`${store.url} holds no checkpoint: it has none of ${[latestName, ...names].join(", ")}.`);
	}
	for (const { name } of files) requireInnerName(name, store.url);
	return files;
}

/** Brings files into a folder that is named after them; its name. Those of another state of the folder go. */
async function bringFiles(
	root: string,
	store: ObjectStore,
	files: readonly StoredFile[],
	{ part, parts }: Share,
): Promise<string> {
	const sorted = files.toSorted((a, b) => (a.name < b.name ? -1 : 1));
	const name = `files-${createHash("sha256").update(JSON.stringify(sorted)).digest("hex").slice(0, 16)}`;
	if (part === 0) {
		for (const other of readdirSync(root)) {
			if (other.startsWith("files-") && other !== name) rmSync(join(root, other), { recursive: true });
		}
	}
	const folder = join(root, name);
	mkdirSync(folder, { recursive: true });
	const mine = sorted.filter((_, at) => at % parts === part);
	await inParallel(mine, FILES_AT_ONCE, async (file) => {
		await store.bring(file.name, join(folder, file.name), file.bytes, { part, damage: damageOf(file) });
	});
	await allThere(folder, new Map(sorted.map(({ name, bytes }) => [name, bytes])));
	return name;
}

/**
 * Compares a file with its checksum. An S3 tag is the MD5 of an object that came in one part and is not encrypted with a key of its own;
 * a file that was brought with the same bytes twice is right whatever its tag is.
 */
function damageOf({ sha256, etag }: StoredFile): (path: string) => string | null {
	const [, md5] = /^"?([0-9a-f]{32})"?$/.exec(etag) ?? [];
	let before = "";
	return (path) => {
		if (sha256 !== undefined) return fileDigest(path, "sha256") === sha256 ? null : "its checksum differs";
		if (md5 === undefined) return null;
		const sum = fileDigest(path, "md5");
		if (sum === md5 || sum === before) return null;
		before = sum;
		return "its checksum differs with every reading";
	};
}

/** Milliseconds between looks at what other ranks bring, and without anything new after which they count as lost. */
const lookInterval = 200;
const longestSilence = 600_000;

/** Waits for the files, by name and size, that other ranks of this host bring: each has its name once it is whole. */
async function allThere(folder: string, files: ReadonlyMap<string, number>): Promise<void> {
	const sizeOf = (name: string) => statSync(join(folder, name), { throwIfNoEntry: false })?.size ?? 0;
	for (let [seen, since] = [-1, performance.now()]; ; await Bun.sleep(lookInterval)) {
		const absent = [...files].find(([name, bytes]) => sizeOf(name) !== bytes);
		if (absent === undefined) return;
		const bytes = (readdirSync(folder, { recursive: true }) as string[]).reduce((sum, name) => sum + sizeOf(name), 0);
		if (bytes !== seen) [seen, since] = [bytes, performance.now()];
		if (performance.now() - since > longestSilence) {
			throw new UserError(`${join(folder, absent[0])} does not come: the rank that brings it has ended.`);
		}
	}
}
