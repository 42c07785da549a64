/**
 * The operations that mix tokens under context parallelism, where every rank holds an equal run of the microbatch's tokens: attention,
 * scan and delta rule run on all tokens of this rank's part of the heads (DeepSpeed-Ulysses); the convolution reads the last tokens of
 * the rank before; rotary embeddings turn by the tokens' places in the whole sequences.
 */
import { dealsHeads } from "../../config/context-parallel.ts";
import type { Device } from "../../native/device.ts";
import {
	type ColumnRange,
	columnsForTokens,
	type Group,
	tokensForColumns,
	withRowsBefore,
} from "../../parallel/index.ts";
import {
	type AttentionOptions,
	attention,
	causalConv1d,
	copyInto,
	type GatedDeltaInputs,
	gatedDelta,
	type Parameter,
	rope,
	ropeLast,
	Sequences,
	splitColumns,
	ssdScan,
	type Tape,
	Tensor,
} from "../../tensor/index.ts";
import type { Mixing } from "./sequence-mixing.ts";

/** The sequences of a microbatch, and their parts in this rank's run of its tokens. */
export class ContextTokens implements Disposable {
	/** Of the whole microbatch. */
	readonly sequences: Sequences;
	/** Their parts here. */
	readonly own: Sequences;
	/** Place of each part's first token in its sequence, i32 [sequences]. */
	readonly firstPositions: Tensor;
	/** The parts with some tokens of the rank before, by the number of those. */
	readonly #behind = new Map<number, Sequences>();

	/** The tokens of `lengths` divide by cp.size. */
	constructor(
		private readonly device: Device,
		lengths: readonly number[],
		readonly cp: Group,
	) {
		this.sequences = Sequences.of(device, lengths);
		const count = this.sequences.tokens / cp.size;
		const first = cp.rank * count;
		this.own = Sequences.of(device, this.#lengthsWithin(first, first + count));
		let start = 0;
		const places = lengths.map((length) => {
			start += length;
			return Math.min(length, Math.max(0, first - (start - length)));
		});
		this.firstPositions = Tensor.from(device, Int32Array.from(places));
	}

	/** The parts in the `count` tokens before this rank's and in its own; before the first rank's are zeros, a sequence of their own. */
	behind(count: number): Sequences {
		const { own, cp, sequences } = this;
		const first = cp.rank * own.tokens;
		const earlier = this.#lengthsWithin(Math.max(0, first - count), first);
		const zeros = count - earlier.reduce((sum, length) => sum + length, 0);
		const lengths = [zeros, ...sequences.lengths.map((_, index) => earlier[index]! + own.lengths[index]!)];
		const made = this.#behind.get(count) ?? Sequences.of(this.device, lengths);
		this.#behind.set(count, made);
		return made;
	}

	/** Tokens of every sequence in [begin, end). */
	#lengthsWithin(begin: number, end: number): number[] {
		let start = 0;
		return this.sequences.lengths.map((length) => {
			start += length;
			return Math.max(0, Math.min(start, end) - Math.max(start - length, begin));
		});
	}

	[Symbol.dispose](): void {
		for (const owned of [this.sequences, this.own, this.firstPositions, ...this.#behind.values()])
			owned[Symbol.dispose]();
	}
}

/** The properties of a pass that operations depend on. */
interface Context {
	readonly tokens: ContextTokens;
	/** Index of the microbatch's first token in the step's global batch. */
	readonly firstToken: number;
}

/** A rank's part of heads in order, and of the groups whose keys or states these heads share. */
interface HeadPart {
	readonly heads: number;
	readonly firstHead: number;
	readonly groups: number;
	readonly firstGroup: number;
}

/** Where ranks outnumber groups, several ranks take the same group. Throws a RangeError where heads cannot be dealt to `size` ranks. */
function headPart({ heads, groups }: { heads: number; groups: number }, rank: number, size: number): HeadPart {
	if (!dealsHeads({ heads, groups }, size)) {
		throw new RangeError(`${heads} heads of ${groups} groups cannot be dealt to ${size} context-parallel ranks.`);
	}
	const own = heads / size;
	const first = Math.floor((rank * groups) / size);
	return { heads: own, firstHead: rank * own, groups: Math.max(1, groups / size), firstGroup: first };
}

/** The operations of a pass. `firstToken`: index of the microbatch's first token in the step's global batch. */
export function contextMixing(tokens: ContextTokens, firstToken: number): Mixing {
	const context = { tokens, firstToken };
	const placed = { sequences: tokens.own, firstPositions: tokens.firstPositions };
	const ofHeads: typeof attention = (tape, qkv, options) => attend(tape, qkv, options, context);
	return {
		rope: (tape, qkv, options) => rope(tape, qkv, options.firstPositions ? options : { ...options, ...placed }),
		ropeLast: (tape, x, options) => ropeLast(tape, x, { ...options, ...placed }),
		attention: ofHeads,
		latentAttention: ofHeads,
		convolution: (tape, x, weight, bias, _sequences, mask) => {
			const before = weight.value.width - 1;
			using longer = withRowsBefore(tape, x, before, tokens.cp);
			using y = causalConv1d(tape, longer, weight, bias, tokens.behind(before), mask);
			return rowsBehind(tape, y, before);
		},
		scan: (tape, inputs) => scan(tape, inputs, tokens),
		delta: (tape, inputs) => delta(tape, inputs, tokens),
	};
}

/** x without its first `count` rows. Backward: their gradient is zero. */
function rowsBehind(tape: Tape, x: Tensor, count: number): Tensor {
	using own = x.rowsFrom(count, x.rows - count);
	const y = tape.output(own.withGradient(null), x.gradient !== null);
	tape.record({
		name: "rows_behind",
		outputs: [y],
		backward: ([dy]) => {
			const dx = x.gradient!.contiguousTarget();
			using before = dx.rowsFrom(0, count);
			using rest = dx.rowsFrom(count, x.rows - count);
			dx.device.setZero(before, before.bytes);
			copyInto(dy!, rest);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/** A tensor of contiguous rows in another shape, with a gradient of that shape. */
function reshaped(tape: Tape, x: Tensor, shape: readonly number[]): Tensor {
	using seen = x.view(shape);
	const y = tape.output(seen.withGradient(null), x.gradient !== null);
	tape.record({
		name: "reshape",
		outputs: [y],
		backward: ([dy]) => {
			const dx = x.gradient!.contiguousTarget();
			using into = dx.view(shape);
			copyInto(dy!, into);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/** Parts of per-head parameters, released when the backward pass has left the operations that are recorded after this. */
function partsOfHeads(
	tape: Tape,
	parameters: readonly Parameter[],
	{ firstHead, heads }: HeadPart,
): { readonly of: Parameter[]; readonly [Symbol.dispose]: () => void } {
	const of = parameters.map((parameter) => parameter.part(firstHead, heads));
	if (tape.recording) tape.onReturn("parts of heads", () => {}, of);
	return {
		of,
		[Symbol.dispose]() {
			if (!tape.recording) for (const part of of) part[Symbol.dispose]();
		},
	};
}

/** Attention of this rank's heads over all tokens, and back to all heads of this rank's tokens. */
function attend(tape: Tape, qkv: Tensor, options: AttentionOptions, { tokens, firstToken }: Context): Tensor {
	const { cp, sequences } = tokens;
	const {
		queryHeads,
		keyHeads,
		headDim,
		valueDim = headDim,
		firstHead = 0,
		fullHeads = queryHeads,
		sinks = null,
	} = options;
	const perKey = queryHeads / keyHeads;
	const group = (perKey + 1) * headDim + valueDim;
	const partOf = (member: number) => headPart({ heads: queryHeads, groups: keyHeads }, member, cp.size);
	const ranges = (member: number): ColumnRange[] => {
		const part = partOf(member);
		if (part.groups > 1 || part.heads === perKey)
			return [{ first: part.firstGroup * group, count: part.groups * group }];
		const begin = part.firstGroup * group;
		return [
			{ first: begin + (part.firstHead % perKey) * headDim, count: part.heads * headDim },
			{ first: begin + perKey * headDim, count: headDim + valueDim },
		];
	};
	const part = partOf(cp.rank);
	using everyToken = tokensForColumns(tape, [{ x: qkv, ranges }], cp);
	using own = partsOfHeads(tape, sinks ? [sinks] : [], part);
	using attended = attention(tape, everyToken, {
		...options,
		...{ queryHeads: part.heads, keyHeads: part.groups, sequences, firstToken, fullHeads },
		...{ firstHead: firstHead + part.firstHead, sinks: own.of[0] ?? null },
	});
	return columnsForTokens(tape, attended, cp);
}

function scan(tape: Tape, inputs: Parameters<typeof ssdScan>[1], { cp, sequences }: ContextTokens): Tensor {
	const { heads, headDim, groups, stateDim } = inputs;
	if (inputs.zMask || inputs.finalState)
		throw new Error("A scan under context parallelism has no masks and no final states.");
	const [inner, states] = [heads * headDim, groups * stateDim];
	const partOf = (member: number) => headPart({ heads, groups }, member, cp.size);
	const columns = (width: number) => (member: number) => {
		const part = partOf(member);
		return [{ first: part.firstHead * width, count: part.heads * width }];
	};
	const xBC = (member: number) => {
		const part = partOf(member);
		const shared = { first: part.firstGroup * stateDim, count: part.groups * stateDim };
		return [
			...columns(headDim)(member),
			{ ...shared, first: inner + shared.first },
			{ ...shared, first: inner + states + shared.first },
		];
	};
	const part = partOf(cp.rank);
	const dealt = [
		{ x: inputs.xBC, ranges: xBC },
		{ x: inputs.z, ranges: columns(headDim) },
		{ x: inputs.dt, ranges: columns(1) },
	];
	using everyToken = tokensForColumns(tape, dealt, cp);
	const ownInner = part.heads * headDim;
	const [first, second, third] = splitColumns(tape, everyToken, [
		ownInner + 2 * part.groups * stateDim,
		ownInner,
		part.heads,
	]);
	using ownXBC = first!;
	using z = second!;
	using dt = third!;
	using own = partsOfHeads(tape, [inputs.dtBias, inputs.aLog, inputs.d], part);
	const [dtBias, aLog, d] = own.of as [Parameter, Parameter, Parameter];
	const ownHeads = { heads: part.heads, groups: part.groups, sequences };
	using scanned = ssdScan(tape, { ...inputs, ...ownHeads, ...{ xBC: ownXBC, z, dt, dtBias, aLog, d } });
	return columnsForTokens(tape, scanned, cp);
}

function delta(tape: Tape, inputs: GatedDeltaInputs, { cp, sequences }: ContextTokens): Tensor {
	const { qkv, ba, keyHeads, keyDim, valueHeads, valueDim } = inputs;
	if (inputs.finalState) throw new Error("A delta rule under context parallelism has no final states.");
	const keys = keyHeads * keyDim;
	const partOf = (member: number) => headPart({ heads: valueHeads, groups: keyHeads }, member, cp.size);
	const ofConvolution = (member: number) => {
		const part = partOf(member);
		const shared = { first: part.firstGroup * keyDim, count: part.groups * keyDim };
		return [
			shared,
			{ ...shared, first: keys + shared.first },
			{ first: 2 * keys + part.firstHead * valueDim, count: part.heads * valueDim },
		];
	};
	const ofGates = (member: number) => {
		const { firstHead: first, heads: count } = partOf(member);
		return [
			{ first, count },
			{ first: valueHeads + first, count },
		];
	};
	const part = partOf(cp.rank);
	const dealt = [
		{ x: qkv, ranges: ofConvolution },
		{ x: ba, ranges: ofGates },
	];
	using everyToken = tokensForColumns(tape, dealt, cp);
	const [first, second] = splitColumns(tape, everyToken, [
		2 * part.groups * keyDim + part.heads * valueDim,
		2 * part.heads,
	]);
	using ownQkv = first!;
	using ownBa = second!;
	using own = partsOfHeads(tape, [inputs.dtBias, inputs.aLog], part);
	const [dtBias, aLog] = own.of as [Parameter, Parameter];
	const ownHeads = { keyHeads: part.groups, valueHeads: part.heads, sequences };
	using o = gatedDelta(tape, { ...inputs, ...ownHeads, ...{ qkv: ownQkv, ba: ownBa, dtBias, aLog } });
	using ofTokens = reshaped(tape, o, [sequences.tokens, part.heads * valueDim]);
	using everyHead = columnsForTokens(tape, ofTokens, cp);
	return reshaped(tape, everyHead, [everyHead.rows * valueHeads, valueDim]);
}
