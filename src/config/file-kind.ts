/** The kind of a local file, by its first bytes and its name, so that no format is taken for plain text. */
import { InputFile } from "../system/input-file.ts";

export interface FileKind {
	/** With its article: "a Parquet file". */
	readonly name: string;
	/** Whether the format is structured text, such as CSV, and not binary. */
	readonly isText: boolean;
}

/** Bytes by their offset, as Latin-1: enough that no text begins with them by chance. */
const signatures: readonly (readonly [name: string, bytes: Readonly<Record<number, string>>])[] = [
	["a Parquet file", { 0: "PAR1" }],
	["an Arrow file", { 0: "ARROW1" }],
	["a Feather file", { 0: "FEA1" }],
	["an HDF5 file", { 0: "\x89HDF" }],
	["a NumPy file", { 0: "\x93NUMPY" }],
	["an SQLite database", { 0: "SQLite format 3\0" }],
	["a GGUF file", { 0: "GGUF", 5: "\0\0\0" }],
	["a gzip file", { 0: "\x1f\x8b" }],
	["a zip file", { 0: "PK\x03\x04" }],
	["a zip file", { 0: "PK\x05\x06" }],
	["a Zstandard file", { 0: "\x28\xb5\x2f\xfd" }],
	["an xz file", { 0: "\xfd7zXZ\0" }],
	["a bzip2 file", { 0: "BZh", 4: "1AY&SY" }],
	["a 7-Zip file", { 0: "7z\xbc\xaf" }],
	["a tar file", { 257: "ustar" }],
	["a PNG image", { 0: "\x89PNG" }],
	["a JPEG image", { 0: "\xff\xd8\xff" }],
	["a GIF image", { 0: "GIF87a" }],
	["a GIF image", { 0: "GIF89a" }],
	["a TIFF image", { 0: "II*\0" }],
	["a TIFF image", { 0: "MM\0*" }],
	["a WebP image", { 0: "RIFF", 8: "WEBP" }],
	["a WAVE sound", { 0: "RIFF", 8: "WAVE" }],
	["an AVI video", { 0: "RIFF", 8: "AVI " }],
	["an MP4 video", { 0: "\0", 4: "ftyp" }],
	["a Matroska video", { 0: "\x1a\x45\xdf\xa3" }],
	["an MP3 sound", { 0: "ID3\x03" }],
	["an MP3 sound", { 0: "ID3\x04" }],
	["an Ogg file", { 0: "OggS\0" }],
	["a FLAC sound", { 0: "fLaC\0" }],
	["a FLAC sound", { 0: "fLaC\x80" }],
	["a PDF file", { 0: "%PDF-1" }],
	["a PDF file", { 0: "%PDF-2" }],
	["a program", { 0: "\x7fELF" }],
	["a pickle", { 0: "\x80\x02" }],
	["a pickle", { 0: "\x80\x03" }],
	["a pickle", { 0: "\x80\x04" }],
	["a pickle", { 0: "\x80\x05" }],
];

const textSuffixes: Readonly<Record<string, string>> = {
	csv: "a CSV file",
	tsv: "a table of tab-separated values",
	json: "a JSON file",
	jsonl: "a JSONL file",
	ndjson: "a JSON-lines file",
	xml: "an XML file",
};

const binarySuffixes: Readonly<Record<string, string>> = {
	parquet: "a Parquet file",
	arrow: "an Arrow file",
	feather: "a Feather file",
	h5: "an HDF5 file",
	hdf5: "an HDF5 file",
	npy: "a NumPy file",
	npz: "a NumPy file",
	lmdb: "an LMDB database",
	mdb: "an LMDB database",
	db: "a database",
	sqlite: "an SQLite database",
	tfrecord: "a TFRecord file",
	tfrecords: "a TFRecord file",
	pkl: "a pickle",
	pickle: "a pickle",
	pt: "a PyTorch file",
	pth: "a PyTorch file",
	bin: "a binary file",
	idx: "an index",
	zip: "a zip file",
	gz: "a gzip file",
	tgz: "a gzip file",
	zst: "a Zstandard file",
	xz: "an xz file",
	bz2: "a bzip2 file",
	tar: "a tar file",
	png: "a PNG image",
	jpg: "a JPEG image",
	jpeg: "a JPEG image",
	webp: "a WebP image",
	gif: "a GIF image",
	mp4: "an MP4 video",
	pdf: "a PDF file",
	xlsx: "a spreadsheet",
};

/** Bytes that are read to recognise a format. */
const HEAD = 512;

/** The kind of a file; null if it may be plain text or cannot be read. */
export function fileKind(path: string): FileKind | null {
	const head = readHead(path);
	if (head === null) return null;
	const magic = binaryKind(head);
	if (magic !== null) return { name: magic, isText: false };
	const suffix = /\.([A-Za-z0-9]+)$/.exec(path)?.[1]?.toLowerCase() ?? "";
	if (Object.hasOwn(textSuffixes, suffix)) return { name: textSuffixes[suffix]!, isText: true };
	return Object.hasOwn(binarySuffixes, suffix) ? { name: binarySuffixes[suffix]!, isText: false } : null;
}

/** The binary format that a file with these first bytes has; null for any other. */
function binaryKind(head: Uint8Array): string | null {
	const start = Buffer.from(head.buffer, head.byteOffset, Math.min(HEAD, head.byteLength)).toString("latin1");
	const found = signatures.find(([, bytes]) =>
		Object.entries(bytes).every(([offset, expected]) => start.startsWith(expected, Number(offset))),
	);
	return found?.[0] ?? null;
}

/** First bytes of a regular file; null for anything else. */
function readHead(path: string): Uint8Array | null {
	try {
		using file = InputFile.open(path);
		return file.read(0, Math.min(HEAD, file.size));
	} catch {
		return null;
	}
}
