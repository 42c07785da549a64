/** Samples of tar files (webdataset, img2dataset) with image parts and a text or JSON part. */
import { isImageExtension, LARGEST_TEXT_PART, mediaOfExtension } from "../../energon/format/media.ts";
import { splitMemberName } from "../../energon/format/names.ts";
import { parseJsonBytes } from "../../energon/format/python-text.ts";
import { TarError } from "../../energon/format/tar.ts";
import { walkTar } from "../../energon/prepare/shard-index.ts";
import { LocalFile } from "../../energon/storage/open.ts";
import { nameOf, type RandomAccessFile } from "../../energon/storage/storage.ts";
import { type InputFile, identityOf } from "../detect.ts";
import { LARGEST_IMAGE } from "../fetch-image.ts";
import { type Position, type Row, SkippedRow, type SyncSource } from "../row.ts";

interface TarPart {
	readonly extension: string;
	readonly offset: number;
	readonly size: number;
}

interface TarSample {
	readonly key: string;
	readonly parts: readonly TarPart[];
	/** Byte after the sample. */
	readonly end: number;
	/** Why no sample follows, if the tar is damaged there; null: not damaged. */
	readonly damage: string | null;
}

/** Positions: file, byte. */
export function tarSource(files: readonly InputFile[], imageRoot: string | null): SyncSource {
	return {
		description: files.length === 1 ? "a tar file of samples" : `${files.length} tar files of samples`,
		identity: identityOf(files),
		columns: null,
		*rows(from: Position): Generator<Row> {
			const [firstFile = 0, firstByte = 0] = from;
			for (let i = firstFile; i < files.length; i++) {
				const { path, part } = files[i]!;
				const folder = imageRoot ?? path.slice(0, path.length - nameOf(path).length);
				const file = LocalFile.open(path);
				try {
					for (const { key, parts, end, damage } of samplesOf(file, i === firstFile ? firstByte : 0)) {
						const where = `${path}, ${damage === null ? `sample ${key}` : "its end"}`;
						const { fields, images } = damage === null ? contentOf(file, parts) : broken(damage);
						yield { where, fields, images, folder, part, next: [i, end] };
					}
				} finally {
					file.close();
				}
			}
		},
	};
}

function broken(damage: string) {
	return { fields: new SkippedRow(`the tar ends early: ${damage}`), images: [] };
}

/** Samples from byte `from` on. The last sample of a damaged tar has the damage. */
export function* samplesOf(file: RandomAccessFile, from: number): Generator<TarSample, void, void> {
	let key: string | null = null;
	let parts: TarPart[] = [];
	let end = from;
	try {
		for (const member of walkTar(file, from)) {
			const name = member.isFile ? splitMemberName(member.name) : null;
			if (name === null) continue;
			if (key !== null && name.base !== key) {
				yield { key, parts, end, damage: null };
				parts = [];
			}
			key = name.base;
			if (member.contentOffset + member.size > file.size) throw new TarError(`${member.name} is cut off`);
			parts.push({ extension: name.extension, offset: member.contentOffset, size: member.size });
			end = member.end;
		}
	} catch (error) {
		if (!(error instanceof TarError)) throw error;
		// The last sample is dropped, because parts may be missing.
		yield { key: key ?? "", parts: [], end: file.size, damage: error.message };
		return;
	}
	if (key !== null) yield { key, parts, end, damage: null };
}

function contentOf(file: RandomAccessFile, parts: readonly TarPart[]): Pick<Row, "fields" | "images"> {
	const fields: Record<string, unknown> = {};
	const images: { readonly name: string; readonly bytes: Uint8Array }[] = [];
	const skipped = (sentence: string) => ({ fields: new SkippedRow(sentence), images: [] });
	for (const { extension, offset, size } of parts) {
		const last = extension.slice(extension.lastIndexOf(".") + 1).toLowerCase();
		const media = mediaOfExtension(extension);
		if (media !== null) return skipped(`its part ${extension} is ${media}, which is not built yet`);
		const isText = ["txt", "text", "caption", "json"].includes(last);
		if (!isText && !isImageExtension(extension)) continue;
		const most = isText ? LARGEST_TEXT_PART : LARGEST_IMAGE;
		if (size > most) return skipped(`its part ${extension} has ${size} bytes; at most ${most} are read`);
		const bytes = file.read(offset, size);
		// The bytes are copied, because the file may be closed before they are used.
		if (!isText) images.push({ name: extension, bytes: bytes.slice() });
		else if (last === "json") {
			const record = recordOf(bytes);
			if (record instanceof SkippedRow) return skipped(record.message);
			Object.assign(fields, record);
		} else fields.caption ??= textOf(bytes);
	}
	images.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
	return { fields, images: images.map(({ bytes }) => bytes) };
}

/** UTF-8 text of a file, without a line end at its end; invalid bytes become replacement characters. */
function textOf(bytes: Uint8Array): string {
	return new TextDecoder().decode(bytes).trimEnd();
}

/** The object of a JSON part, a list of turns as `conversations`, or a SkippedRow for other content. */
export function recordOf(bytes: Uint8Array): Record<string, unknown> | SkippedRow {
	try {
		const value = parseJsonBytes(bytes);
		if (Array.isArray(value)) return { conversations: value };
		return typeof value === "object" && value !== null
			? { ...value }
			: new SkippedRow("its JSON is neither an object nor a list of turns");
	} catch (error) {
		return new SkippedRow(`its JSON cannot be read (${(error as Error).message.slice(0, 200).replace(/\.$/, "")})`);
	}
}
