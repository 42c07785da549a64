/**
 * Reads the flat buffers of Megatron's distributed optimizer (`dp_reshardable`, docs/spec/checkpoint.md §3.6) as optimizer state
 * by parameter. The checkpoint does not record the positions of parameters: they follow from the reversed order of registration,
 * offsets rounded up to 64 elements, and the shards of tensor and expert parallelism. A layout is accepted only if every size
 * fits and the parameters in the buffers equal the model's weights.
 */
import { UserError } from "../../system/errors.ts";
import { type DtypeTag, decodeFloats, dtypes, elementCount, encodeFloats } from "../dtype.ts";
import { type Correspondence, CorrespondenceBuilder } from "../mapping.ts";
import type { TensorStore } from "../store.ts";
import { bufferKey } from "./keys.ts";
import { registrationOrder, type ShardRuns, shardOf } from "./metadata.ts";

const ALIGNMENT = 64;
/** Number of elements of each shard that are compared with the model's weights. */
const COMPARED = 1024;

const parameterDtypes: Readonly<Record<string, DtypeTag>> = {
	"torch.float32": "F32",
	"torch.bfloat16": "BF16",
	"torch.float16": "F16",
};

/** A flat buffer, by the parts of its key. */
interface FlatBuffer {
	readonly key: string;
	readonly module: string;
	/** null: the optimizer is not chained. */
	readonly chain: number | null;
	readonly rank: number;
	readonly group: number;
	/** Dtype of the buffer's parameters. */
	readonly dtype: DtypeTag;
	readonly bucket: number;
	readonly state: string;
	readonly length: number;
}

/** A parameter's shard at an offset of a bucket. */
interface Piece {
	readonly name: string;
	readonly offset: number;
	readonly parts: readonly ShardRuns[];
	/** Whether the buffer of another rank holds the same values; that buffer is read. */
	readonly repeated: boolean;
}

/** Links every buffer to `optimizer.state.<state>.<parameter>`; `model` holds the weights under logical names. */
export function optimizerBuffers(stored: TensorStore, keys: readonly string[], model: TensorStore): Correspondence {
	const builder = new CorrespondenceBuilder(stored.path);
	const buffers = keys.map((key) => parseKey(stored, key));
	for (const { key, length } of buffers) builder.addForeign(key, [length]);
	for (const family of Map.groupBy(buffers, familyOf).values()) {
		for (const { states, pieces } of placeFamily(stored, model, family)) {
			for (const buffer of states) linkBucket(builder, model, buffer, pieces);
		}
	}
	return builder;
}

function parseKey(stored: TensorStore, key: string): FlatBuffer {
	const [, module = "language", chain, rank, group, types, bucket, state] = bufferKey.exec(key)!;
	const dtype = parameterDtypes[types!.split(",")[0]!.trim()];
	if (!dtype) throw unclear(stored.path, key, "its dtype is unknown");
	return {
		key,
		module,
		chain: chain === undefined ? null : Number(chain),
		rank: Number(rank),
		group: Number(group),
		dtype,
		bucket: Number(bucket),
		state: state!,
		length: elementCount(stored.tensors.get(key)!.shape)!,
	};
}

function familyOf({ module, chain }: FlatBuffer): string {
	return `${module} ${chain}`;
}

function unclear(path: string, key: string, reason: string): UserError {
	return new UserError(
		`${path}: the layout of the flat optimizer buffer ${key} is unknown: ${reason}; convert without the optimizer (--no-optimizer).`,
	);
}

/** Parameters of a buffer's optimizer: those of its module, and of its chain, since experts have their own chain. */
function parametersOf(model: TensorStore, { module, chain, dtype }: FlatBuffer): string[] {
	const root = module === "language" ? "language_model." : `modality_submodules.${module}.`;
	return [...model.tensors]
		.filter(([name, type]) => {
			const expert = /\bmlp\.experts\.linear_fc/.test(name);
			const wanted = chain === null || (chain === 1) === expert;
			return name.startsWith(root) && wanted && type.dtype === dtype && !name.endsWith(".expert_bias");
		})
		.map(([name]) => name);
}

/** Positions of parameter parts in a bucket of a buffer. */
interface Placement {
	readonly states: readonly FlatBuffer[];
	readonly pieces: readonly Piece[];
}

/** The layers that a pipeline stage holds in one buffer: [begin, end), with what stands before and behind all layers. */
interface StageLayers {
	readonly begin: number;
	readonly end: number;
	readonly first: boolean;
	readonly last: boolean;
}

/**
 * Places the parameters in the buffers of one optimizer, whose ranks are the tensor-parallel ranks (for experts the expert-parallel
 * ranks) of each pipeline stage in order. The number of stages is not recorded: the smallest number that fits is accepted.
 */
function placeFamily(stored: TensorStore, model: TensorStore, family: readonly FlatBuffer[]): Placement[] {
	const ranks = 1 + family.reduce((last, { rank }) => Math.max(last, rank), 0);
	const most = family[0]!.module === "language" ? ranks : 1;
	let refusal: unknown = null;
	for (let stages = 1; stages <= most; stages++) {
		if (ranks % stages !== 0) continue;
		try {
			return [...Map.groupBy(family, ({ dtype }) => dtype).values()].flatMap((ofType) =>
				placeStages(stored, model, ofType, stages, ranks / stages),
			);
		} catch (error) {
			if (!(error instanceof UserError)) throw error;
			refusal ??= error;
		}
	}
	throw refusal;
}

/** Places the parameters of a stage: each virtual stage has a buffer, in order, and as many layers as fit it. */
function placeStages(
	stored: TensorStore,
	model: TensorStore,
	buffers: readonly FlatBuffer[],
	stages: number,
	ranksOfStage: number,
): Placement[] {
	const first = buffers[0]!;
	const order = registrationOrder(parametersOf(model, first))?.reverse();
	if (!order) throw unclear(stored.path, first.key, "the registration order of a parameter is unknown");
	const layers = 1 + order.reduce((last, name) => Math.max(last, layerOf(name) ?? -1), -1);
	const groups = [...new Set(buffers.map(({ group }) => group))].sort((x, y) => x - y);
	const placements: Placement[] = [];
	let begin = 0;
	for (let segment = 0; segment < stages * groups.length; segment++) {
		const group = groups[Math.floor(segment / stages)]!;
		const last = segment === stages * groups.length - 1;
		const place = (end: number): Placement[] | string => {
			const held = { begin, end, first: segment === 0, last };
			return placeSegment(model, buffers, order, held, { group, stage: segment % stages, ranksOfStage, stages });
		};
		let end = last ? layers : begin;
		let found = place(end);
		for (; !last && end < layers; end++) {
			const longer = place(end + 1);
			if (typeof longer === "string") break;
			found = longer;
		}
		if (typeof found === "string") throw unclear(stored.path, first.key, found);
		placements.push(...found);
		begin = end;
	}
	for (const { states, pieces } of placements) requireEqualWeights(stored, model, states, pieces);
	return placements;
}

/** The placements of a segment's parameters on all ranks of its stage; a string says why they do not fit. */
function placeSegment(
	model: TensorStore,
	buffers: readonly FlatBuffer[],
	order: readonly string[],
	held: StageLayers,
	at: { readonly group: number; readonly stage: number; readonly ranksOfStage: number; readonly stages: number },
): Placement[] | string {
	const { group, stage, ranksOfStage, stages } = at;
	const names = order.filter((name) => holds(held, name));
	// A tied output layer is a copy of the embedding. In the reversed order an output layer comes first.
	const untied = !order.includes(embedding) || order.includes("language_model.output_layer.weight");
	const copied = !untied && held.last && stages > 1 ? [embedding] : [];
	const placements: Placement[] = [];
	for (let rank = 0; rank < ranksOfStage; rank++) {
		const own = buffers.filter((one) => one.group === group && one.rank === stage * ranksOfStage + rank);
		const experts = own[0]?.chain === 1 || (own.length === 0 && buffers[0]!.chain === 1);
		const mine = experts ? localExperts(names, order, model, rank, ranksOfStage) : [...copied, ...names];
		const [part, parts] = experts ? [0, 1] : [rank, ranksOfStage];
		const buckets = [...Map.groupBy(own, ({ bucket }) => bucket)].sort(([x], [y]) => x - y);
		let next = 0;
		for (const [, states] of buckets) {
			const { length } = states[0]!;
			if (states.some((state) => state.length !== length)) return "its states differ in length";
			const pieces: Piece[] = [];
			let end = 0;
			for (; next < mine.length; next++) {
				const name = mine[next]!;
				const shard = shardOf(name, model.tensors, part, parts);
				if (!shard) return `${name} cannot be cut into ${parts} parts`;
				const offset = Math.ceil(end / ALIGNMENT) * ALIGNMENT;
				const size = shard.parts.reduce((sum, { count, length: run }) => sum + count * run, 0);
				if (offset + size > length) break;
				const repeated = (shard.replicated && !experts && rank > 0) || next < copied.length;
				pieces.push({ name, offset, parts: shard.parts, repeated });
				end = offset + size;
			}
			placements.push({ states, pieces });
		}
		if (next < mine.length) return `there is no room for ${mine[next]}`;
	}
	return placements;
}

const embedding = "language_model.embedding.word_embeddings.weight";

/** Layer of the language model that a parameter belongs to, or null. */
function layerOf(name: string): number | null {
	const found = /^language_model\.decoder\.layers\.(\d+)\./.exec(name)?.[1];
	return found === undefined ? null : Number(found);
}

function holds({ begin, end, first, last }: StageLayers, name: string): boolean {
	const layer = layerOf(name);
	if (layer !== null) return layer >= begin && layer < end;
	return name.includes("embedding.") ? first : last || !name.startsWith("language_model.");
}

/** The experts of an expert-parallel rank among `names`, which are consecutive in every layer. `all`: names of all layers. */
function localExperts(
	names: readonly string[],
	all: readonly string[],
	model: TensorStore,
	rank: number,
	ranks: number,
): string[] {
	const number = (name: string) => Number(/(\d+)$/.exec(name)![1]);
	const experts = 1 + all.reduce((last, name) => Math.max(last, number(name)), 0);
	const local = experts / ranks;
	return names.filter((name) => Math.floor(number(name) / local) === rank && model.tensors.has(name));
}

function linkBucket(
	builder: CorrespondenceBuilder,
	model: TensorStore,
	buffer: FlatBuffer,
	pieces: readonly Piece[],
): void {
	for (const { name, offset, parts, repeated } of pieces) {
		if (repeated) continue;
		const logical = `optimizer.state.${buffer.state}.${name}`;
		builder.addLogical(logical, model.tensors.get(name)!.shape);
		let at = offset;
		for (const { runs, count, length } of parts) {
			builder.link({
				logical,
				logicalRuns: runs,
				foreign: buffer.key,
				foreignRuns: { offset: at, stride: length },
				count,
				length,
			});
			at += count * length;
		}
	}
}

/** Throws a UserError unless the master parameters in a bucket, rounded to the weights' dtype, equal the weights. */
function requireEqualWeights(
	stored: TensorStore,
	model: TensorStore,
	states: readonly FlatBuffer[],
	pieces: readonly Piece[],
): void {
	for (const buffer of states.filter(({ state }) => state === "param")) {
		for (const { name, offset, parts } of pieces) requireEqualWeight(stored, model, buffer, name, offset, parts[0]!);
	}
}

function requireEqualWeight(
	stored: TensorStore,
	model: TensorStore,
	buffer: FlatBuffer,
	name: string,
	offset: number,
	{ runs, length }: ShardRuns,
): void {
	const count = Math.min(length, COMPARED);
	const { dtype } = model.tensors.get(name)!;
	const weights = new Uint8Array((count * dtypes[dtype].bits) / 8);
	model.readInto(name, (runs.offset * dtypes[dtype].bits) / 8, weights);
	const master = stored.tensors.get(buffer.key)!.dtype;
	const copy = new Uint8Array((count * dtypes[master].bits) / 8);
	stored.readInto(buffer.key, (offset * dtypes[master].bits) / 8, copy);
	const rounded = master === dtype ? copy : encodeFloats(dtype, decodeFloats(master, copy));
	// Copies of replicated parameters may differ between ranks in the last bits, because upstream sums with atomics.
	if (Buffer.compare(rounded, weights) !== 0 && !nearlyEqual(dtype, rounded, weights)) {
		throw unclear(stored.path, buffer.key, `its values at the position of ${name} differ from that weight`);
	}
}

function nearlyEqual(dtype: DtypeTag, a: Uint8Array, b: Uint8Array): boolean {
	const [x, y] = [decodeFloats(dtype, a), decodeFloats(dtype, b)];
	return x.every((value, i) => Math.abs(value - y[i]!) <= 1e-5 * Math.abs(y[i]!) + 1e-6);
}
