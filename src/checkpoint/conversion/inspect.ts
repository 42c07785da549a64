/**
 * Lists the content of a checkpoint of any format, under the names it stores, and the steps of a conversion and their
 * results.
 */
import { basename } from "node:path";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { firstNotFinite } from "../dtype.ts";
import { HuggingFaceFolder } from "../hf/folder.ts";
import { NativeCheckpoint } from "../native/reader.ts";
import { openSafetensors } from "../safetensors.ts";
import { bytesOfType, readPieces, sourcesOf, type TensorStore, typeOf } from "../store.ts";
import { TorchDistFolder } from "../torch-dist/folder.ts";
import { type FormatName, requireFormat } from "./source.ts";

interface InspectedTensor {
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
type InspectedObject = Pick<InspectedTensor, "name" | "bytes" | "sha256" | "damage">;

interface Inspection {
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

interface PlanLine {
	/** Tensors as the source stores them. */
	readonly from: readonly string[];
	readonly to: string;
	readonly dtype: string;
	readonly shape: readonly number[];
	readonly bytes: number;
}

/** Every tensor of the target with the stored tensors it is made of. */
export function planLines(target: TensorStore): PlanLine[] {
	return [...target.tensors].map(([name, type]) => ({
		from: [...new Set(sourcesOf(target, name).map((source) => source.name))],
		to: name,
		dtype: type.dtype,
		shape: type.shape,
		bytes: bytesOfType(type),
	}));
}

/** One line of the plan as text; many sources are abbreviated. */
export function formatPlanLine({ from, to, dtype, shape }: PlanLine): string {
	const sources =
		from.length === 0
			? "new values"
			: from.length <= 3
				? from.join(" + ")
				: `${from.length} tensors: ${from[0]} … ${from.at(-1)}`;
	return `${to}  [${shape.join(", ")}] ${dtype}  ← ${sources}`;
}

/**
 * Compares tensors of two stores byte by byte; every tensor of `expected` must be in `actual`. Throws on the first
 * difference and names it. Returns the number of tensors, and the names of those with infinite values or NaN.
 */
export function requireEqual(
	expected: TensorStore,
	actual: TensorStore,
	onBytes?: (bytes: number) => void,
): { readonly count: number; readonly notFinite: readonly string[] } {
	const notFinite: string[] = [];
	for (const [name, type] of expected.tensors) {
		const other = typeOf(actual, name);
		if (other.dtype !== type.dtype || other.shape.join() !== type.shape.join()) {
			throw new UserError(
				`${actual.path}: ${name} is [${other.shape}] ${other.dtype}, expected [${type.shape}] ${type.dtype}.`,
			);
		}
		const pieces = readPieces(actual, name);
		for (const piece of readPieces(expected, name)) {
			const read = pieces.next().value;
			if (!read || Buffer.compare(piece, read) !== 0) {
				throw new UserError(`${actual.path}: ${name} differs from the source's.`);
			}
			if (notFinite.at(-1) !== name && firstNotFinite(type.dtype, piece) >= 0) notFinite.push(name);
			onBytes?.(piece.byteLength);
		}
	}
	const surplus = [...actual.tensors.keys()].find((name) => !expected.tensors.has(name));
	if (surplus !== undefined) throw new UserError(`${actual.path} has a tensor ${surplus} that was not to be written.`);
	return { count: expected.tensors.size, notFinite };
}
