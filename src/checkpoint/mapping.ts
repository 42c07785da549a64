/**
 * Tensors made of parts of other tensors: the plan of every conversion, and a store that reads through it. Renaming,
 * concatenating, cutting out experts, interleaving heads and padding rows are all lists of equal runs of elements, so
 * one correspondence serves both directions. Values are read only when they are asked for.
 */
import { UserError } from "../system/errors.ts";
import { dtypes, elementCount } from "./dtype.ts";
import type { TensorStore, TensorType } from "./store.ts";

/** Run i of a dense tensor begins at element offset + i · stride, and its neighbours are `step` elements apart; default 1. */
export interface Runs {
	readonly offset: number;
	readonly stride: number;
	readonly step?: number;
}

/** `count` runs of `length` elements that two tensors share. */
export interface Link {
	readonly logical: string;
	readonly logicalRuns: Runs;
	readonly foreign: string;
	readonly foreignRuns: Runs;
	readonly count: number;
	readonly length: number;
}

/**
 * Which elements of logical tensors (Megatron's names and shapes) and of another format's tensors are equal. Elements of a
 * logical tensor that no link names are padding: zero when written, ignored when read.
 */
export interface Correspondence {
	readonly logical: ReadonlyMap<string, readonly number[]>;
	readonly foreign: ReadonlyMap<string, readonly number[]>;
	readonly links: readonly Link[];
	/** Logical tensors that may have padding. */
	readonly padded: ReadonlySet<string>;
}

/** `count` runs of `length` elements copied from a source tensor. */
export interface Copy {
	readonly source: string;
	readonly from: Runs;
	readonly to: Runs;
	readonly count: number;
	readonly length: number;
}

export interface MappedTensor extends TensorType {
	readonly name: string;
	readonly copies: readonly Copy[];
}

/** Tensors of a model with its optimizer, on either side: some times those of the largest. */
const MOST_TENSORS = 2 ** 20;
/** Runs of a plan. Experts whose gated rows are interleaved need some hundred each. */
const MOST_LINKS = 2 ** 23;

/**
 * Collects the tensors and links of a correspondence. Counts that a checkpoint claims (layers, experts, stacked axes)
 * become names here and nowhere else, so here they end: with a UserError that names `path`.
 */
export class CorrespondenceBuilder implements Correspondence {
	readonly logical = new Map<string, readonly number[]>();
	readonly foreign = new Map<string, readonly number[]>();
	readonly links: Link[] = [];
	readonly padded = new Set<string>();

	constructor(readonly path: string) {}

	/** A logical tensor. */
	addLogical(name: string, shape: readonly number[]): void {
		this.logical.set(name, shape);
		if (this.logical.size > MOST_TENSORS) this.#refuse(`${MOST_TENSORS} tensors`);
	}

	/** A tensor of the other format. */
	addForeign(name: string, shape: readonly number[]): void {
		this.foreign.set(name, shape);
		if (this.foreign.size > MOST_TENSORS) this.#refuse(`${MOST_TENSORS} tensors`);
	}

	#refuse(limit: string): never {
		throw new UserError(`${this.path}: a model of more than ${limit} is not converted.`);
	}

	/** The same tensor under two names. */
	same(logical: string, foreign: string, shape: readonly number[]): void {
		this.addLogical(logical, shape);
		this.addForeign(foreign, shape);
		this.link({ logical, foreign, count: 1, length: elementCount(shape)! });
	}

	/** Rows of two tensors: `count` blocks of `rows` rows of `width` elements; strides and offsets in rows. */
	rows(link: {
		readonly logical: string;
		readonly foreign: string;
		readonly width: number;
		readonly rows: number;
		readonly count?: number;
		readonly logicalRow?: number;
		readonly logicalStride?: number;
		readonly foreignRow?: number;
		readonly foreignStride?: number;
	}): void {
		const { width, rows } = link;
		this.link({
			logical: link.logical,
			logicalRuns: { offset: (link.logicalRow ?? 0) * width, stride: (link.logicalStride ?? rows) * width },
			foreign: link.foreign,
			foreignRuns: { offset: (link.foreignRow ?? 0) * width, stride: (link.foreignStride ?? rows) * width },
			count: link.count ?? 1,
			length: rows * width,
		});
	}

	link(link: Omit<Link, "logicalRuns" | "foreignRuns"> & Partial<Pick<Link, "logicalRuns" | "foreignRuns">>): void {
		const whole: Runs = { offset: 0, stride: link.length };
		this.links.push({ logicalRuns: whole, foreignRuns: whole, ...link });
		if (this.links.length > MOST_LINKS) this.#refuse(`${MOST_LINKS} runs of values`);
	}
}

export interface Mismatch {
	/** Needed, not there. */
	readonly missing: readonly string[];
	/** There, of no use. */
	readonly unexpected: readonly string[];
	/** There with another shape: "name has [2, 3], expected [3, 2]". */
	readonly misshaped: readonly string[];
}

/** Compares the tensors of a source with those that are needed. */
export function compareTensors(
	there: ReadonlyMap<string, TensorType>,
	needed: ReadonlyMap<string, readonly number[]>,
): Mismatch {
	const misshaped: string[] = [];
	for (const [name, shape] of needed) {
		const found = there.get(name)?.shape;
		if (found && (found.length !== shape.length || found.some((size, i) => size !== shape[i]))) {
			misshaped.push(`${name} has [${found.join(", ")}], expected [${shape.join(", ")}]`);
		}
	}
	return {
		missing: [...needed.keys()].filter((name) => !there.has(name)),
		unexpected: [...there.keys()].filter((name) => !needed.has(name)),
		misshaped,
	};
}

/** Names of one kind that an error lists; it counts the rest. */
const LONGEST_LIST = 50;

/** Throws one error that lists the tensors that do not fit, by name. */
export function requireMatch(path: string, { missing, unexpected, misshaped }: Mismatch): void {
	const parts: string[] = [];
	const list = (what: string, names: readonly string[]) => {
		const rest = names.length > LONGEST_LIST ? ` and ${names.length - LONGEST_LIST} more` : "";
		if (names.length > 0) parts.push(`${names.length} ${what}: ${names.slice(0, LONGEST_LIST).join(", ")}${rest}`);
	};
	list("missing", missing);
	list("unexpected", unexpected);
	list("of another shape", misshaped);
	if (parts.length > 0) throw new UserError(`The tensors of ${path} do not match the model; ${parts.join("; ")}.`);
}

/**
 * The tensors of one side, made of a store of the other side: its tensors must be exactly those of the correspondence.
 * The dtype of a tensor is that of its sources, which must agree.
 */
export function planTensors(
	source: Pick<TensorStore, "path" | "tensors">,
	correspondence: Correspondence,
	to: "logical" | "foreign",
): MappedTensor[] {
	const from = to === "logical" ? "foreign" : "logical";
	requireMatch(source.path, compareTensors(source.tensors, correspondence[from]));
	const copies = new Map<string, Copy[]>([...correspondence[to].keys()].map((name) => [name, []]));
	for (const link of correspondence.links) {
		copies.get(link[to])!.push({
			source: link[from],
			from: link[`${from}Runs`],
			to: link[`${to}Runs`],
			count: link.count,
			length: link.length,
		});
	}
	return [...correspondence[to]].map(([name, shape]) => {
		const parts = copies.get(name)!;
		const dtype = commonDtype(source, name, parts);
		const covered = filled({ copies: parts });
		if (covered !== elementCount(shape) && !(to === "logical" && correspondence.padded.has(name))) {
			throw new RangeError(`The plan fills ${covered} elements of ${name} of shape [${shape}].`);
		}
		return { name, dtype, shape, copies: parts };
	});
}

/** Elements that copies fill. */
function filled({ copies }: Pick<MappedTensor, "copies">): number {
	return copies.reduce((sum, { count, length }) => sum + count * length, 0);
}

function commonDtype(source: Pick<TensorStore, "path" | "tensors">, name: string, copies: readonly Copy[]) {
	const found = new Set(copies.map((copy) => source.tensors.get(copy.source)!.dtype));
	const [dtype] = found;
	if (dtype === undefined) throw new RangeError(`Nothing is the source of ${name}.`);
	if (found.size > 1) {
		throw new UserError(`${source.path} has parts of ${name} in different dtypes (${[...found].join(", ")}).`);
	}
	return dtype;
}

/** Runs shorter than this are read together with the bytes between them. */
const SHORT_RUN = 2 ** 15;
/** Memory of such a read. */
const LARGEST_SPAN = 2 ** 23;

type Elements = Uint8Array | Uint16Array | Uint32Array | BigUint64Array;

/** Memory of its own as elements of so many bytes. */
function elementsOf({ buffer }: Uint8Array<ArrayBuffer>, bytes: number): Elements {
	switch (bytes) {
		case 1:
			return new Uint8Array(buffer);
		case 2:
			return new Uint16Array(buffer);
		case 4:
			return new Uint32Array(buffer);
		default:
			return new BigUint64Array(buffer);
	}
}

/** A store of mapped tensors. Owns the store it reads from. */
export class MappedStore implements TensorStore {
	readonly tensors: ReadonlyMap<string, MappedTensor>;
	/** Tensors with elements that no copy fills: those are zero. */
	readonly #padded: ReadonlySet<string>;
	/** The last two blocks of sources that were read to be transposed: halves of an expert, which a reader asks for in pieces. */
	#blocks: readonly { readonly source: string; readonly begin: number; readonly elements: Elements }[] = [];

	constructor(
		readonly source: TensorStore,
		plan: readonly MappedTensor[],
	) {
		this.tensors = new Map(plan.map((tensor) => [tensor.name, tensor]));
		this.#padded = new Set(
			plan.filter((tensor) => filled(tensor) !== elementCount(tensor.shape)).map(({ name }) => name),
		);
	}

	get path(): string {
		return this.source.path;
	}

	originsOf(name: string): { store: TensorStore; name: string }[] {
		const sources = new Set(this.tensors.get(name)!.copies.map(({ source }) => source));
		return [...sources].map((source) => ({ store: this.source, name: source }));
	}

	readInto(name: string, offset: number, into: Uint8Array): void {
		const { dtype, copies } = this.tensors.get(name)!;
		const bytes = dtypes[dtype].bits / 8;
		if (this.#padded.has(name)) into.fill(0);
		for (const copy of copies) {
			const inOrder = (copy.from.step ?? 1) === 1 && (copy.to.step ?? 1) === 1;
			if (inOrder) this.#copy(copy, bytes, offset, into);
			else this.#transpose(copy, bytes, offset, into);
		}
	}

	/** As #copy, element by element. */
	#transpose({ source, from, to, count, length }: Copy, bytes: number, offset: number, into: Uint8Array): void {
		const [fromStep, toStep] = [from.step ?? 1, to.step ?? 1];
		const begin = Math.floor(offset / bytes);
		const end = Math.ceil((offset + into.byteLength) / bytes);
		const runs = { count, to: to.stride, from: from.stride };
		const neighbours = { count: length, to: toStep, from: fromStep };
		const [outer, inner] = to.stride > toStep ? [runs, neighbours] : [neighbours, runs];
		const last = to.offset + (count - 1) * to.stride + (length - 1) * toStep;
		if (last < begin || to.offset >= end) return;
		const block = this.#blockOf(source, from, (count - 1) * from.stride + (length - 1) * fromStep + 1, bytes);
		// Whole elements of the target. `into` may begin and end inside an element.
		const whole = new Uint8Array((end - begin) * bytes);
		whole.set(into, offset - begin * bytes);
		const target = elementsOf(whole, bytes);
		for (let i = 0; i < outer.count; i++) {
			const at = to.offset + i * outer.to - begin;
			const first = Math.max(0, Math.ceil(-at / inner.to));
			const stop = Math.min(inner.count, Math.ceil((end - begin - at) / inner.to));
			let read = from.offset + i * outer.from + first * inner.from - block.begin;
			for (let j = first; j < stop; j++) {
				target[at + j * inner.to] = block.elements[read]!;
				read += inner.from;
			}
		}
		into.set(whole.subarray(offset - begin * bytes, offset - begin * bytes + into.byteLength));
	}

	/** Elements of a source from `from` on, with those of its first and last row. */
	#blockOf(source: string, { offset, stride, step = 1 }: Runs, span: number, bytes: number) {
		const row = Math.max(stride, step);
		const begin = Math.floor(offset / row) * row;
		const end = Math.min(elementCount(this.source.tensors.get(source)!.shape)!, Math.ceil((offset + span) / row) * row);
		const kept = this.#blocks.find(
			(block) => block.source === source && block.begin === begin && block.elements.length === end - begin,
		);
		if (kept) return kept;
		const read = new Uint8Array((end - begin) * bytes);
		this.source.readInto(source, begin * bytes, read);
		const block = { source, begin, elements: elementsOf(read, bytes) };
		this.#blocks = [...this.#blocks.slice(-1), block];
		return block;
	}

	/** The part of a copy that falls into bytes [offset, offset + into.length) of the target. */
	#copy(copy: Copy, bytes: number, offset: number, into: Uint8Array): void {
		const end = offset + into.byteLength;
		const [begin, stride] = [copy.to.offset * bytes, copy.to.stride * bytes];
		const length = copy.length * bytes;
		// Run i covers [begin + i·stride, begin + i·stride + length).
		const first = Math.max(0, Math.floor((offset - begin - length) / stride) + 1);
		const last = Math.min(copy.count, Math.ceil((end - begin) / stride));
		const { offset: fromBegin, stride: fromStride } = copy.from;
		const packed = copy.to.stride === copy.length && fromStride === copy.length;
		if (packed && last > first) {
			const from = Math.max(offset, begin);
			const to = Math.min(end, begin + copy.count * length);
			const target = into.subarray(from - offset, to - offset);
			if (target.byteLength > 0) this.source.readInto(copy.source, fromBegin * bytes + from - begin, target);
		} else if (length >= SHORT_RUN || fromStride * bytes > SHORT_RUN * 4) {
			for (let i = first; i < last; i++) {
				const from = Math.max(offset, begin + i * stride);
				const to = Math.min(end, begin + i * stride + length);
				const position = (fromBegin + i * fromStride) * bytes + (from - begin - i * stride);
				if (to > from) this.source.readInto(copy.source, position, into.subarray(from - offset, to - offset));
			}
		} else {
			this.#copyShortRuns(copy, bytes, offset, into, first, last);
		}
	}

	#copyShortRuns(copy: Copy, bytes: number, offset: number, into: Uint8Array, first: number, last: number): void {
		const length = copy.length * bytes;
		const fromStride = copy.from.stride * bytes;
		const batch = Math.max(1, Math.floor(LARGEST_SPAN / Math.max(fromStride, 1)));
		for (let start = first; start < last; start += batch) {
			const stop = Math.min(last, start + batch);
			const span = new Uint8Array((stop - start - 1) * fromStride + length);
			this.source.readInto(copy.source, copy.from.offset * bytes + start * fromStride, span);
			for (let i = start; i < stop; i++) {
				const at = (copy.to.offset + i * copy.to.stride) * bytes - offset;
				const cut = Math.max(0, -at);
				const run = (i - start) * fromStride;
				const kept = Math.min(length, into.byteLength - at);
				if (kept > cut) into.set(span.subarray(run + cut, run + kept), at + cut);
			}
		}
	}

	[Symbol.dispose](): void {
		this.#blocks = [];
		this.source[Symbol.dispose]();
	}
}
