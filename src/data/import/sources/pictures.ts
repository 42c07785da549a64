/**
 * A folder of pictures, each with a .txt or .json file of the same name beside it; or, where no picture has one, in folders
 * of their classes, whose names are the captions.
 */
import { type Dirent, readdirSync, statSync } from "node:fs";
import { basename, join, relative } from "node:path";
import { CryptoHasher } from "bun";
import { UserError } from "../../../system/errors.ts";
import { readWholeFile } from "../../../system/input-file.ts";
import { fileError } from "../../../system/system-errors.ts";
import { LARGEST_TEXT_PART } from "../../energon/format/media.ts";
import { isPictureName, partOf } from "../detect.ts";
import { type Position, type Row, SkippedRow, type SyncSource } from "../row.ts";
import { recordOf } from "./tars.ts";

interface Picture {
	readonly folder: string;
	readonly name: string;
	/** Text files of the same name. */
	readonly texts: readonly string[];
}

/** Positions: number of pictures read. */
export function pictureSource(root: string, imageRoot: string | null): SyncSource {
	const classes = classesIn(root);
	return {
		description:
			classes === 0
				? "a folder of pictures"
				: `pictures in folders of ${classes} classes, whose names are the captions`,
		identity: identityOf(root),
		columns: null,
		*rows(from: Position): Generator<Row> {
			const [passed = 0] = from;
			let number = 0;
			for (const { folder, name, texts } of picturesIn(root)) {
				if (number++ < passed) continue;
				const fields = fieldsOf(root, folder, name, texts, classes === 0 ? null : classOf(root, folder));
				yield {
					where: join(folder, name),
					fields,
					images: [],
					folder: imageRoot ?? folder,
					part: partOfFolder(root, folder),
					next: [number],
				};
			}
		},
	};
}

/** The part of the data set that the first folder below the root names, such as "train". */
function partOfFolder(root: string, folder: string): Row["part"] {
	const first = relative(root, folder).split("/")[0]!;
	return first === "" ? null : partOf(first);
}

/** Number of classes by which the pictures lie in folders; 0 where a picture has a text beside it, or they are all in one folder. */
function classesIn(root: string): number {
	const classes = new Set<string>();
	for (const { folder, texts } of picturesIn(root)) {
		if (texts.length > 0) return 0;
		const name = classOf(root, folder);
		if (name !== null) classes.add(name);
	}
	return classes.size > 1 ? classes.size : 0;
}

/** The class that a folder is of: its name. The root and a part of the data set, such as "train", are of none. */
function classOf(root: string, folder: string): string | null {
	const path = relative(root, folder);
	return path === "" || (!path.includes("/") && partOf(path) !== null) ? null : basename(folder);
}

/** Pictures in the order of their paths; only the names of one folder at a time are in memory. */
function* picturesIn(folder: string): Generator<Picture, void, void> {
	const entries = entriesOf(folder);
	const texts = new Map<string, string[]>();
	for (const entry of entries) {
		const [, stem] = /^(.+)\.(?:txt|json)$/.exec(entry.name) ?? [];
		if (stem !== undefined) texts.set(stem, [...(texts.get(stem) ?? []), entry.name]);
	}
	for (const { name, isFolder } of entries) {
		if (isFolder) yield* picturesIn(join(folder, name));
		else if (isPictureName(name)) yield { folder, name, texts: texts.get(name.replace(/\.[^.]+$/, "")) ?? [] };
	}
}

function entriesOf(folder: string): { readonly name: string; readonly isFolder: boolean }[] {
	let entries: Dirent[];
	try {
		entries = readdirSync(folder, { withFileTypes: true });
	} catch (error) {
		throw fileError("list", folder, error);
	}
	return entries
		.filter(({ name }) => !name.startsWith("."))
		.map((entry) => ({ name: entry.name, isFolder: entry.isDirectory() }))
		.sort((a, b) => (a.name < b.name ? -1 : 1));
}

/**
 * The record of a picture: of its .json file, else of its .txt file, else its class. A record without an image is about the picture.
 */
function fieldsOf(
	root: string,
	folder: string,
	name: string,
	texts: readonly string[],
	className: string | null,
): Row["fields"] {
	const file = texts.find((text) => text.endsWith(".json")) ?? texts[0];
	if (file === undefined && className !== null) return { image: name, caption: className };
	if (file === undefined) return new SkippedRow("it has no .txt or .json file of the same name beside it");
	let bytes: Uint8Array;
	try {
		bytes = readWholeFile(join(folder, file), LARGEST_TEXT_PART, { inside: root });
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return new SkippedRow(`its text cannot be read (${error.message.replace(/\.$/, "")})`);
	}
	if (file.endsWith(".json")) {
		const record = recordOf(bytes);
		if (record instanceof SkippedRow) return record;
		const named = ["image", "images"].some((field) => record[field] !== undefined && record[field] !== null);
		return named ? record : { ...record, image: name };
	}
	try {
		// The caption is without the line end.
		return { image: name, caption: new TextDecoder("utf-8", { fatal: true }).decode(bytes).trimEnd() };
	} catch {
		return new SkippedRow("its .txt file is not text in UTF-8");
	}
}

/** Digest of the names, sizes and modification times of all files. */
function identityOf(root: string): string {
	const hash = new CryptoHasher("sha256");
	for (const { folder, name, texts } of picturesIn(root)) {
		for (const file of [name, ...texts]) {
			const path = join(folder, file);
			const stat = statSync(path, { throwIfNoEntry: false });
			hash.update(JSON.stringify([path.slice(root.length), stat?.size ?? null, stat?.mtimeMs ?? null]));
		}
	}
	return hash.digest("hex").slice(0, 16);
}
