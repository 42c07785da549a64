/**
 * The memory of a model's parameters: one flat buffer for each dtype and gradient-reduction group, with every parameter a view of
 * it. The optimizer, the gradient norm, reduce-scatter and all-gather work on whole buffers.
 */
import type { Device } from "../native/device.ts";
import { elementCount, type FloatDtype, Parameter, Tensor } from "../tensor/index.ts";

/** How whole matrices lie in a parameter, for an optimizer that updates each as a whole. */
export interface MatrixLayout {
	/** Axis along which tensor-parallel ranks hold equal parts of each; null: every rank holds it whole. */
	readonly cut: 0 | 1 | null;
	/** Heights of the blocks of rows that alternate, of each of which all repetitions make a matrix; null: one matrix. */
	readonly parts: readonly number[] | null;
}

/** A parameter's place in its buffer. */
export interface BufferEntry {
	readonly name: string;
	/** Shape of the local tensor. */
	readonly shape: readonly number[];
	/** First element in the flat buffer. */
	readonly offset: number;
	readonly elements: number;
	readonly decays: boolean;
	readonly matrix: MatrixLayout | null;
}

interface ElementRun {
	readonly begin: number;
	readonly end: number;
}

export interface ParameterRequest {
	readonly name: string;
	readonly shape: readonly number[];
	readonly dtype: FloatDtype;
	readonly decays: boolean;
	/** Whether it is an expert's: reduced over another group, and so in a buffer of its own. */
	readonly expert: boolean;
	/** Whether it is replicated over tensor-parallel ranks, and so counted once in norms. */
	readonly replicated: boolean;
	/** Whether another pipeline stage holds a copy: then both gradients are summed, and exactly one copy counts in norms. */
	readonly copy: "none" | "counted" | "uncounted";
	readonly frozen: boolean;
	/** null: an optimizer updates its elements one by one. Others lie in buffers of their own. Default null. */
	readonly matrix?: MatrixLayout | null;
}

/** How a module's gradients are bucketed: by the least number of elements, or by the number of buckets. */
export type BucketSize = { readonly elements: number } | { readonly count: number };

// In elements: entries and slices start at multiples of it, so that kernels may use whole cache lines.
const alignment = 64;

/** A flat buffer of values and their fp32 gradients (none if frozen). */
export class ParameterBuffer implements Disposable {
	readonly entries: readonly BufferEntry[];
	readonly elements: number;
	readonly values: Tensor;
	readonly #gradients: Tensor | null;
	readonly #parameters: Parameter[] = [];
	/** Parameters whose gradients are zeroed lazily, and the ranges of all other elements. */
	readonly #matrices: Parameter[] = [];
	readonly #cleared: ElementRun[] = [];

	constructor(
		device: Device,
		readonly kind: Pick<ParameterRequest, "dtype" | "expert" | "replicated" | "copy" | "frozen" | "matrix">,
		requests: readonly ParameterRequest[],
		slices: number,
		/** Index of its first parameter in the module's forward order. */
		readonly firstParameter: number,
	) {
		// Parameters with weight decay first, so that the optimizer makes two calls a buffer, not one a parameter.
		const ordered = [...requests.filter((r) => r.decays), ...requests.filter((r) => !r.decays)];
		let offset = 0;
		this.entries = ordered.map(({ name, shape, decays, matrix = null }) => {
			const entry = { name, shape, offset, elements: elementCount(shape), decays, matrix };
			offset = Math.ceil((offset + entry.elements) / alignment) * alignment;
			return entry;
		});
		offset = Math.ceil(offset / (alignment * slices)) * alignment * slices;
		this.elements = offset;
		this.values = Tensor.zeros(device, [offset], kind.dtype, "parameter");
		this.#gradients = kind.frozen ? null : Tensor.zeros(device, [offset], "f32", "gradient");
		let cleared = 0;
		for (const entry of this.entries) {
			const gradient = this.#gradients && slice(this.#gradients, entry);
			const parameter = new Parameter(entry.name, slice(this.values, entry), gradient);
			this.#parameters.push(parameter);
			if (entry.shape.length < 2) continue;
			this.#matrices.push(parameter);
			if (entry.offset > cleared) this.#cleared.push({ begin: cleared, end: entry.offset });
			cleared = entry.offset + entry.elements;
		}
		if (this.elements > cleared) this.#cleared.push({ begin: cleared, end: this.elements });
	}

	/** The fp32 gradients with lazy zeros written; null: frozen. */
	get gradients(): Tensor | null {
		for (const parameter of this.#matrices) parameter.settleGradient();
		return this.#gradients;
	}

	get dtype(): FloatDtype {
		return this.kind.dtype;
	}

	/** Whether its parameters are whole matrices to the optimizer. */
	get matrices(): boolean {
		return (this.kind.matrix ?? null) !== null;
	}

	get frozen(): boolean {
		return this.kind.frozen;
	}

	get parameters(): readonly Parameter[] {
		return this.#parameters;
	}

	/** Invalidates copies that parameters have made of their values, after the values were written. */
	valuesChanged(): void {
		for (const parameter of this.#parameters) parameter.valueChanged();
	}

	/** Zeroes all gradients; those of matrices, nearly all of the memory, lazily. */
	zeroGradients(): void {
		if (this.#gradients === null) return;
		for (const parameter of this.#matrices) parameter.forgetGradient();
		for (const { begin, end } of this.#cleared) {
			using run = this.#gradients.columns(begin, end - begin);
			run.device.setZero(run, run.bytes);
		}
	}

	[Symbol.dispose](): void {
		for (const parameter of this.#parameters) parameter[Symbol.dispose]();
		this.values[Symbol.dispose]();
		this.#gradients?.[Symbol.dispose]();
	}
}

function slice(flat: Tensor, entry: BufferEntry): Tensor {
	using window = flat.columns(entry.offset, entry.elements);
	return window.view(entry.shape);
}

/** Least number of elements of a bucket (docs/spec/runtime.md §3.6). */
function elementsOfBucket(requests: readonly ParameterRequest[], buckets: BucketSize | undefined): number {
	if (buckets === undefined) return Number.POSITIVE_INFINITY;
	if ("elements" in buckets) return buckets.elements;
	return Math.floor(requests.reduce((sum, { shape }) => sum + elementCount(shape), 0) / buckets.count);
}

/** Runs of neighbouring parameters with at least `least` elements each, except the last. */
function cut(requests: readonly ParameterRequest[], least: number): ParameterRequest[][] {
	const runs: ParameterRequest[][] = [];
	let open: ParameterRequest[] = [];
	let elements = 0;
	for (const request of requests) {
		open.push(request);
		elements += elementCount(request.shape);
		if (elements < least) continue;
		runs.push(open);
		open = [];
		elements = 0;
	}
	if (open.length > 0) runs.push(open);
	return runs;
}

export class ParameterSet implements Disposable {
	readonly buffers: readonly ParameterBuffer[];
	readonly #byName = new Map<string, Parameter>();

	constructor(
		readonly device: Device,
		requests: readonly ParameterRequest[],
		/** Number of equal slices that buffers are padded to: sizes of the groups that may share optimizer state. */
		slices: { readonly dense: number; readonly expert: number } = { dense: 1, expert: 1 },
		/** Default: one buffer for each kind. */
		buckets?: BucketSize,
	) {
		const flag = (value: boolean) => (value ? 1 : 0);
		const kinds = Map.groupBy(requests, (r) =>
			[flag(r.frozen), flag(r.expert), flag(r.replicated), r.dtype, r.copy, flag((r.matrix ?? null) !== null)].join(
				" ",
			),
		);
		const least = elementsOfBucket(requests, buckets);
		this.buffers = [...kinds.keys()].sort().flatMap((kind) =>
			cut(kinds.get(kind)!, least).map((group) => {
				const kindOfGroup = group[0]!;
				const parts = kindOfGroup.expert ? slices.expert : slices.dense;
				return new ParameterBuffer(device, kindOfGroup, group, parts, requests.indexOf(kindOfGroup));
			}),
		);
		for (const buffer of this.buffers) {
			for (const parameter of buffer.parameters) {
				if (this.#byName.has(parameter.name)) throw new Error(`Two parameters are named ${parameter.name}.`);
				this.#byName.set(parameter.name, parameter);
			}
		}
	}

	get(name: string): Parameter {
		const parameter = this.#byName.get(name);
		if (!parameter) throw new Error(`The model has no parameter ${name}.`);
		return parameter;
	}

	get names(): string[] {
		return [...this.#byName.keys()];
	}

	[Symbol.iterator](): IterableIterator<Parameter> {
		return this.#byName.values();
	}

	/** Number of local parameter elements, padding not counted. */
	get elements(): number {
		return this.buffers.reduce((sum, b) => sum + b.entries.reduce((s, entry) => s + entry.elements, 0), 0);
	}

	zeroGradients(): void {
		for (const buffer of this.buffers) buffer.zeroGradients();
	}

	[Symbol.dispose](): void {
		for (const buffer of this.buffers) buffer[Symbol.dispose]();
	}
}
