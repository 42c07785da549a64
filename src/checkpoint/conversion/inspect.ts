/** Lists the content of a checkpoint of any format, under the names it stores. */
import { basename } from "node:path";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
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
	/** SHA-256 of the values; null when not asked for, or when they cannot be read. */
	readonly sha256: string | null;
	/** The sentence about values that fail their checksum; null: intact, or not read. */
	readonly damage: string | null;
}

/** A byte item that is not a tensor. */
export type InspectedObject = Pick<InspectedTensor, "name" | "bytes" | "sha256" | "damage">;

export interface Inspection {
	readonly path: string;
	readonly format: FormatName | "safetensors";
	readonly tensors: readonly InspectedTensor[];
	readonly objects: readonly InspectedObject[];
	readonly bytes: number;
	readonly notices: readonly string[];
}

/** Lists a checkpoint; `checksums` reads every value and compares it with the checkpoint's checksum. */
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
		...checked(options.checksums, () => checksum(store, name, options.onBytes)),
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
	const chunks = store instanceof NativeCheckpoint ? store.tensors.get(name)!.chunks : [];
	if (chunks.length === 1) {
		// Reading compares it with the only chunk's.
		for (const piece of readPieces(store, name)) onBytes?.(piece.byteLength);
		return chunks[0]!.sha256;
	}
	const hasher = new Bun.CryptoHasher("sha256");
	for (const piece of readPieces(store, name)) {
		hasher.update(piece);
		onBytes?.(piece.byteLength);
	}
	return hasher.digest("hex");
}

/** The checksum of what `read` reads, or why it cannot be. */
function checked(wanted: boolean, read: () => string): Pick<InspectedTensor, "sha256" | "damage"> {
	if (!wanted) return { sha256: null, damage: null };
	try {
		return { sha256: read(), damage: null };
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		return { sha256: null, damage: error.message };
	}
}

function objectsOf(store: Stored, checksums: boolean): InspectedObject[] {
	const sha256 = (bytes: Uint8Array) => new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
	if (store instanceof NativeCheckpoint) {
		return Object.entries(store.manifest.objects).map(([name, { bytes }]) => ({
			name,
			bytes,
			...checked(checksums, () => sha256(store.readObject(name))),
		}));
	}
	if (!(store instanceof TorchDistFolder)) return [];
	return [...store.objects].map(([name, { length }]) => ({
		name,
		bytes: length,
		...checked(checksums, () => sha256(store.readItem(name))),
	}));
}

/** Damaged tensors, in order. */
export function damages({ tensors, objects }: Inspection): string[] {
	return [...tensors, ...objects].flatMap(({ damage }) => (damage === null ? [] : [damage]));
}

/** "1.2 GB". */
export function formatBytes(bytes: number): string {
	const units = ["B", "kB", "MB", "GB", "TB"];
	const unit = bytes < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3));
	return `${(bytes / 1000 ** unit).toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

/** The listing as lines of text. */
export function formatInspection({ path, format, tensors, objects, bytes }: Inspection): string[] {
	const width = tensors.reduce((longest, { name }) => Math.max(longest, name.length), 0);
	const end = ({ sha256, damage }: InspectedObject) =>
		damage === null ? (sha256 === null ? "" : `  ${sha256}`) : `  DAMAGED: ${damage}`;
	return [
		...tensors.map(
			(tensor) =>
				`${tensor.name.padEnd(width)}  ${tensor.dtype.padEnd(4)} [${tensor.shape.join(", ")}]  ${formatBytes(tensor.bytes)}${end(tensor)}`,
		),
		...objects.map((object) => `${object.name}  object  ${formatBytes(object.bytes)}${end(object)}`),
		`${basename(path)}: ${format}, ${counted(tensors.length, "tensor")}, ${formatBytes(bytes)}${objects.length > 0 ? `, ${counted(objects.length, "object")}` : ""}`,
	];
}
