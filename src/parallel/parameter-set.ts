/**
 * Memory of a model's parameters: flat buffers, one for each storage type and gradient-reduction group; every
 * parameter is a view of a buffer. Flat, because the optimizer, the gradient norm and (data parallel) reduce-scatter and all-gather
 * work on whole buffers.
 */
import type { Device } from "../native/device.ts";
import { Parameter } from "../tensor/parameter.ts";
import { elementCount, type FloatDtype, Tensor } from "../tensor/tensor.ts";

/** Place of a parameter in its buffer. */
export interface BufferEntry {
	readonly name: string;
	/** Shape of the local tensor. */
	readonly shape: readonly number[];
	/** First element in the flat buffer. */
	readonly offset: number;
	readonly elements: number;
	readonly decays: boolean;
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
	/** Expert parameters reduce over another group, so they live in a buffer of their own. */
	readonly expert: boolean;
	/** The same on every tensor-parallel rank: counted once in norms. */
	readonly replicated: boolean;
	/** Whether another stage holds it too: then gradients of both are summed, and one of both counts. */
	readonly copy: "none" | "counted" | "uncounted";
	readonly frozen: boolean;
}

/** Size of the buckets into which a module's gradients are cut: least elements of each, or their number. */
export type BucketSize = { readonly elements: number } | { readonly count: number };

// Entries and slices start at multiples of this many elements: kernels may use whole cache lines.
const alignment = 64;

/** One flat buffer: values that the model reads and their fp32 gradients (no gradients when frozen). */
export class ParameterBuffer implements Disposable {
	readonly entries: readonly BufferEntry[];
	readonly elements: number;
	readonly values: Tensor;
	readonly #gradients: Tensor | null;
	readonly #parameters: Parameter[] = [];
	/** Parameters whose gradients are forgotten, not cleared, and runs of elements of everything else. */
	readonly #matrices: Parameter[] = [];
	readonly #cleared: ElementRun[] = [];

	constructor(
		device: Device,
		readonly kind: Pick<ParameterRequest, "dtype" | "expert" | "replicated" | "copy" | "frozen">,
		requests: readonly ParameterRequest[],
		slices: number,
		/** Place of its first parameter among the module's: forward reads in that order, backward comes back in the other. */
		readonly firstParameter: number,
	) {
		// Decaying parameters first: the optimizer then needs two calls, not one a parameter.
		const ordered = [...requests.filter((r) => r.decays), ...requests.filter((r) => !r.decays)];
		let offset = 0;
		this.entries = ordered.map(({ name, shape, decays }) => {
			const entry = { name, shape, offset, elements: elementCount(shape), decays };
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

	/** The parameters' fp32 gradients, all of them written, and zeros between them; null: frozen. */
	get gradients(): Tensor | null {
		for (const parameter of this.#matrices) parameter.settleGradient();
		return this.#gradients;
	}

	get dtype(): FloatDtype {
		return this.kind.dtype;
	}

	get frozen(): boolean {
		return this.kind.frozen;
	}

	get parameters(): readonly Parameter[] {
		return this.#parameters;
	}

	/** Tells parameters that the memory of their values was written: copies that they made of it are old. */
	valuesChanged(): void {
		for (const parameter of this.#parameters) parameter.valueChanged();
	}

	/** All gradients are zero; those of matrices, nearly all of the memory, get their zeros when something needs them. */
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

/** Elements at which a bucket closes (docs/spec/runtime.md §3.6). */
function elementsOfBucket(requests: readonly ParameterRequest[], buckets: BucketSize | undefined): number {
	if (buckets === undefined) return Number.POSITIVE_INFINITY;
	if ("elements" in buckets) return buckets.elements;
	return Math.floor(requests.reduce((sum, { shape }) => sum + elementCount(shape), 0) / buckets.count);
}

/** Runs of neighbours that each have at least `least` elements, but for the last. */
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
		/** Equal slices a buffer can be cut into: the sizes of the groups that may share its optimizer state. */
		slices: { readonly dense: number; readonly expert: number } = { dense: 1, expert: 1 },
		/** Default: one buffer a kind. */
		buckets?: BucketSize,
	) {
		const flag = (value: boolean) => (value ? 1 : 0);
		const kinds = Map.groupBy(requests, (r) =>
			[flag(r.frozen), flag(r.expert), flag(r.replicated), r.dtype, r.copy].join(" "),
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
