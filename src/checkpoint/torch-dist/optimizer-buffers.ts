/**
 * The flat buffers of Megatron's distributed optimizer (`dp_reshardable`, docs/spec/checkpoint.md §3.6) as optimizer
 * state by parameter. Nothing in the checkpoint says which parameter lies where: the layout follows from the order of
 * registration (reversed), starts rounded up to 64 elements, and the shards of tensor and expert parallelism. It is
 * believed only if every size fits and the buffers' own copy of the parameters equals the model's weights.
 */
import { UserError } from "../../native/errors.ts";
import { type DtypeTag, dtypes, elementCount } from "../dtype.ts";
import { decodeFloats, encodeFloats } from "../floats.ts";
import { type Correspondence, CorrespondenceBuilder } from "../mapping.ts";
import type { TensorStore } from "../store.ts";
import { bufferKey } from "./keys.ts";
import { registrationOrder, type ShardRuns, shardOf } from "./shards.ts";

const ALIGNMENT = 64;
/** Elements of each parameter's part that are compared with the model's weights. */
const COMPARED = 1024;

const parameterDtypes: Readonly<Record<string, DtypeTag>> = {
	"torch.float32": "F32",
	"torch.bfloat16": "BF16",
	"torch.float16": "F16",
};

/** One buffer on disk. */
interface FlatBuffer {
	readonly key: string;
	readonly module: string;
	/** null: the optimizer is not chained. */
	readonly chain: number | null;
	readonly rank: number;
	readonly group: number;
	/** Dtype of the parameters that it updates. */
	readonly dtype: DtypeTag;
	readonly bucket: number;
	readonly state: string;
	readonly length: number;
}

/** The part of a parameter at an offset of a bucket. */
interface Piece {
	readonly name: string;
	readonly offset: number;
	readonly parts: readonly ShardRuns[];
	/** Another rank's buffer holds the same values, and that one is read. */
	readonly repeated: boolean;
}

/** Links every buffer to `optimizer.state.<state>.<parameter>`; `model` holds the weights under logical names. */
export function optimizerBuffers(stored: TensorStore, keys: readonly string[], model: TensorStore): Correspondence {
	const builder = new CorrespondenceBuilder(stored.path);
	const buffers = keys.map((key) => parseKey(stored, key));
	for (const { key, length } of buffers) builder.addForeign(key, [length]);
	for (const family of Map.groupBy(buffers, familyOf).values()) {
		const ranks = 1 + family.reduce((last, { rank }) => Math.max(last, rank), 0);
		for (const ofRank of Map.groupBy(family, (buffer) => buffer.rank).values()) {
			placeRank(builder, stored, model, ofRank, ranks);
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
		`${path}: the layout of the flat optimizer buffer ${key} is not understood, ${reason}; convert without the optimizer (--no-optimizer).`,
	);
}

/** Parameters an optimizer updates, by module and chain: experts have a chain of their own. */
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

function placeRank(
	builder: CorrespondenceBuilder,
	stored: TensorStore,
	model: TensorStore,
	buffers: readonly FlatBuffer[],
	ranks: number,
): void {
	for (const family of Map.groupBy(buffers, ({ group, dtype }) => `${group} ${dtype}`).values()) {
		const first = family[0]!;
		const names = parametersOf(model, first);
		const order = registrationOrder(names)?.reverse();
		if (!order) throw unclear(stored.path, first.key, "a parameter of the model has no known place");
		const buckets = [...Map.groupBy(family, ({ bucket }) => bucket)].sort(([a], [b]) => a - b);
		let next = 0;
		const mine = first.chain === 1 ? localExperts(order, model, first.rank, ranks) : order;
		for (const [, states] of buckets) {
			const length = states[0]!.length;
			if (states.some((state) => state.length !== length)) {
				throw unclear(stored.path, first.key, "its states differ in length");
			}
			const pieces: Piece[] = [];
			let end = 0;
			for (; next < mine.length; next++) {
				const name = mine[next]!;
				const part = shardOf(name, model.tensors, first.chain === 1 ? 0 : first.rank, first.chain === 1 ? 1 : ranks);
				if (!part) throw unclear(stored.path, first.key, `${name} cannot be cut into ${ranks} parts`);
				const offset = Math.ceil(end / ALIGNMENT) * ALIGNMENT;
				const size = part.parts.reduce((sum, { count, length: run }) => sum + count * run, 0);
				if (offset + size > length) break;
				const repeated = part.replicated && first.chain !== 1 && first.rank > 0;
				pieces.push({ name, offset, parts: part.parts, repeated });
				end = offset + size;
			}
			for (const buffer of states) linkBucket(builder, stored, model, buffer, pieces);
		}
		if (next < mine.length) throw unclear(stored.path, first.key, `there is no room for ${mine[next]}`);
	}
}

/** Experts of one expert-parallel rank: consecutive ones of every layer. */
function localExperts(order: readonly string[], model: TensorStore, rank: number, ranks: number): string[] {
	const number = (name: string) => Number(/(\d+)$/.exec(name)![1]);
	const experts = 1 + order.reduce((last, name) => Math.max(last, number(name)), 0);
	const local = experts / ranks;
	return order.filter((name) => Math.floor(number(name) / local) === rank && model.tensors.has(name));
}

function linkBucket(
	builder: CorrespondenceBuilder,
	stored: TensorStore,
	model: TensorStore,
	buffer: FlatBuffer,
	pieces: readonly Piece[],
): void {
	for (const { name, offset, parts, repeated } of pieces) {
		if (buffer.state === "param") requireEqualWeights(stored, model, buffer, name, offset, parts[0]!);
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

/** The master copy, rounded to the weights' dtype, must be the weights. */
function requireEqualWeights(
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
	// Copies of replicated parameters may differ in the last bits between ranks (atomics upstream).
	if (Buffer.compare(rounded, weights) !== 0 && !nearlyEqual(dtype, rounded, weights)) {
		throw unclear(stored.path, buffer.key, `what stands where ${name} should be is not that weight`);
	}
}

function nearlyEqual(dtype: DtypeTag, a: Uint8Array, b: Uint8Array): boolean {
	const [x, y] = [decodeFloats(dtype, a), decodeFloats(dtype, b)];
	return x.every((value, i) => Math.abs(value - y[i]!) <= 1e-5 * Math.abs(y[i]!) + 1e-6);
}
