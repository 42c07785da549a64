/** What a checkpoint of any format holds, under the names it stores. */
import { basename } from "node:path";
import { HuggingFaceFolder } from "../hf/folder.ts";
import { NativeCheckpoint } from "../native/reader.ts";
import { openSafetensors } from "../safetensors.ts";
import { bytesOfType, readPieces, type TensorStore } from "../store.ts";
import { TorchDistFolder } from "../torch-dist/folder.ts";
import { type FormatName, requireFormat } from "./source.ts";

export interface InspectedTensor {
	readonly name: string;
	readonly dtype: string;
	readonly shape: readonly number[];
	readonly bytes: number;
	/** Of the values; null when not asked for. */
	readonly sha256: string | null;
}

export interface Inspection {
	readonly path: string;
	readonly format: FormatName | "safetensors";
	readonly tensors: readonly InspectedTensor[];
	/** Byte items that are no tensors. */
	readonly objects: readonly { readonly name: string; readonly bytes: number; readonly sha256: string | null }[];
	readonly bytes: number;
	readonly notices: readonly string[];
}

/** Lists a checkpoint; `checksums` reads every value, `onBytes` hears of it. */
export function inspectCheckpoint(
	path: string,
	options: { readonly checksums: boolean; readonly allowFallback: boolean; readonly onBytes?: (bytes: number) => void },
): Inspection {
	const format = path.endsWith(".safetensors") ? "safetensors" : requireFormat(path, null);
	using store = openStored(path, format, options.allowFallback);
	const tensors = [...store.tensors].map(([name, type]) => ({
		name,
		dtype: type.dtype,
		shape: type.shape,
		bytes: bytesOfType(type),
		sha256: options.checksums ? checksum(store, name, options.onBytes) : null,
	}));
	return {
		path: store.path,
		format,
		tensors,
		objects: objectsOf(store, options.checksums),
		bytes: tensors.reduce((sum, { bytes }) => sum + bytes, 0),
		notices: "notice" in store && store.notice ? [store.notice] : [],
	};
}

type Stored = TensorStore & { readonly notice?: string | null };

function openStored(path: string, format: Inspection["format"], allowFallback: boolean): Stored {
	if (format === "safetensors") return openSafetensors(path);
	if (format === "hf") return HuggingFaceFolder.open(path);
	return format === "native" ? NativeCheckpoint.open(path, { allowFallback }) : TorchDistFolder.open(path);
}

function checksum(store: TensorStore, name: string, onBytes?: (bytes: number) => void): string {
	const hasher = new Bun.CryptoHasher("sha256");
	for (const piece of readPieces(store, name)) {
		hasher.update(piece);
		onBytes?.(piece.byteLength);
	}
	return hasher.digest("hex");
}

function objectsOf(store: Stored, checksums: boolean): Inspection["objects"] {
	if (store instanceof NativeCheckpoint) {
		return Object.entries(store.manifest.objects).map(([name, { bytes, sha256 }]) => ({ name, bytes, sha256 }));
	}
	if (!(store instanceof TorchDistFolder)) return [];
	return [...store.objects].map(([name, { length }]) => ({
		name,
		bytes: length,
		sha256: checksums ? new Bun.CryptoHasher("sha256").update(store.readItem(name)).digest("hex") : null,
	}));
}

/** "1.2 GB". */
export function formatBytes(bytes: number): string {
	const units = ["B", "kB", "MB", "GB", "TB"];
	const unit = bytes < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
	return `${(bytes / 1000 ** unit).toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

/** The listing as lines of text. */
export function formatInspection({ path, format, tensors, objects, bytes }: Inspection): string[] {
	const width = Math.max(0, ...tensors.map(({ name }) => name.length));
	return [
		...tensors.map(
			({ name, dtype, shape, bytes: size, sha256 }) =>
				`${name.padEnd(width)}  ${dtype.padEnd(4)} [${shape.join(", ")}]  ${formatBytes(size)}${sha256 ? `  ${sha256}` : ""}`,
		),
		...objects.map(
			({ name, bytes: size, sha256 }) => `${name}  object  ${formatBytes(size)}${sha256 ? `  ${sha256}` : ""}`,
		),
		`${basename(path)}: ${format}, ${tensors.length} tensors, ${formatBytes(bytes)}${objects.length > 0 ? `, ${objects.length} objects` : ""}`,
	];
}
