/**
 * The values that experts round to e4m3, by token: their rows, the routing weights that multiply the rows between the projections, and the
 * gradient of the experts' sum. Rounding turns the last bit of a number beside a tie into an eighth of it, so of two equally
 * right runs all that follows differs. A layout is therefore given the reference's values in place of its own at every layer of
 * experts: its own are compared before, and everything behind them differs by sums of fp32 alone.
 */
import type { LayerProbe, ProbedExpertRows, ProbedPass } from "../../models/language/layer-context.ts";
import type { HybridModel } from "../../models/language/model.ts";
import { isGatedActivation } from "../../native/activations.ts";
import type { Device } from "../../native/device.ts";
import { type Group, placeOf } from "../../parallel/index.ts";
import { copyInto, E4m3Rows, Tensor } from "../../tensor/index.ts";
import { reduceHost } from "../probe-sums.ts";

/** Each probed value as sentences name it; "<value> in layer.3". */
const operands = {
	normed: "the input of experts",
	routing: "the routing weight",
	routedGradient: "the gradient of the experts' sum",
} as const satisfies { readonly [Name in keyof LayerProbe]?: string };
const operandNames = Object.keys(operands) as (keyof typeof operands)[];

/** Values [tokens of the batch, width] of one process by name. */
export type Operands = ReadonlyMap<string, Float32Array>;

const nameOf = (operand: keyof typeof operands, { name }: ProbedPass) => `${operands[operand]} in ${name}`;

/** A probe that writes the operands of all tokens of a step into `to`. */
export function recordOperands(model: HybridModel, tokens: number, to: Map<string, Float32Array>): LayerProbe {
	return probeOf(model, (operand, value, pass) => {
		const name = nameOf(operand, pass);
		const all = to.get(name) ?? new Float32Array(tokens * value.width);
		to.set(name, all);
		const own = value.toFloat32();
		for (const { row, first, count } of runsOf(pass)) {
			all.set(own.subarray(row * value.width, (row + count) * value.width), first * value.width);
		}
	});
}

/** A number that rounds to another e4m3 value than the reference's. */
export interface RoundingTie {
	/** Which operand, such as "the input of experts in layer.3". */
	readonly operand: string;
	/** Index among the tokens of the global batch. */
	readonly token: number;
	readonly column: number;
}

export interface ReplayedOperands {
	/** Relative difference of each operand, root mean square, in the order of the reference's. */
	readonly errors: readonly number[];
	/** How many numbers round otherwise, and the first of them on every rank. */
	readonly ties: { readonly count: number; readonly first: readonly RoundingTie[] };
}

/** Gives a rank's experts the reference's operands in place of its own, and measures the difference. */
export class OperandReplay {
	readonly #names: readonly string[];
	/** Σ difference², Σ reference², elements; by operand. */
	readonly #sums: Float64Array;
	/** Numbers that round otherwise, by place: a pass that is recomputed meets them twice. */
	readonly #ties = new Map<string, RoundingTie>();

	constructor(private readonly reference: Operands) {
		this.#names = [...reference.keys()];
		this.#sums = new Float64Array(3 * this.#names.length);
	}

	probe(model: HybridModel): LayerProbe {
		return probeOf(model, (operand, value, pass) => this.#replace(operand, value, pass));
	}

	#replace(operand: keyof typeof operands, value: Tensor, pass: ProbedPass): void {
		const name = nameOf(operand, pass);
		const at = this.#names.indexOf(name);
		if (at < 0) throw new Error(`The reference has no record of ${name}.`);
		const [all, { width }] = [this.reference.get(name)!, value];
		const own = value.toFloat32();
		const wanted = new Float32Array(own.length);
		for (const { row, first, count } of runsOf(pass)) {
			wanted.set(all.subarray(first * width, (first + count) * width), row * width);
		}
		for (let i = 0; i < own.length; i++) {
			this.#sums[3 * at]! += (own[i]! - wanted[i]!) ** 2;
			this.#sums[3 * at + 1]! += wanted[i]! ** 2;
		}
		this.#sums[3 * at + 2]! += own.length;
		using given = Tensor.from(value.device, wanted, value.shape);
		// Routing weights multiply rows before these round.
		if (operand !== "routing") this.#findTies(name, value, given, pass);
		copyInto(given, value);
	}

	#findTies(operand: string, own: Tensor, given: Tensor, pass: ProbedPass): void {
		const [rounded, wanted] = [inE4m3(own), inE4m3(given)];
		for (const { row, first, count } of runsOf(pass)) {
			for (let i = row * own.width; i < (row + count) * own.width; i++) {
				if (rounded[i] === wanted[i]) continue;
				const [token, column] = [first + Math.floor(i / own.width) - row, i % own.width];
				this.#ties.set(`${operand} ${token} ${column}`, { operand, token, column });
			}
		}
	}

	/** Of all ranks of `world`, which call this together. */
	result(world: Group, device: Device): ReplayedOperands {
		const sums = this.#sums.slice();
		reduceHost(world, device, sums);
		const errors = this.#names.map((name, at) => {
			const [squares, size, elements] = sums.subarray(3 * at);
			// A token that no rank passes to the experts makes all of it unequal.
			if (elements! < this.reference.get(name)!.length) return Number.NaN;
			return squares === 0 ? 0 : Math.sqrt(squares! / size!);
		});
		const [first] = this.#ties.values();
		const place = first ? this.#names.indexOf(first.operand) : 0;
		const message = Int32Array.of(this.#ties.size, place, first?.token ?? 0, first?.column ?? 0);
		const found = world.exchange(message).filter(([count]) => count! > 0);
		return {
			errors,
			ties: {
				count: found.reduce((sum, [count]) => sum + count!, 0),
				first: found.map(([, place, token, column]) => ({
					operand: this.#names[place!]!,
					token: token!,
					column: column!,
				})),
			},
		};
	}
}

function probeOf(
	model: HybridModel,
	use: (operand: keyof typeof operands, value: Tensor, pass: ProbedPass) => void,
): LayerProbe {
	return Object.fromEntries(
		operandNames.map((name) => [
			name,
			(value: Tensor, pass: ProbedPass) => {
				if (model.routers.has(pass.layer)) use(name, value, pass);
			},
		]),
	);
}

/** Rows of a rank's run of tokens that are neighbours in the global batch. */
function* runsOf({ localTokens }: ProbedPass) {
	let row = 0;
	for (const { first, count } of localTokens.ranges) {
		yield { row, first, count };
		row += count;
	}
}

/** The numbers that rows [R, C] round to. */
function inE4m3(x: Tensor): Float64Array {
	using count = Tensor.from(x.device, Int32Array.of(x.rows));
	using rounded = E4m3Rows.of(x, count);
	const bytes = new Uint8Array(x.elements);
	x.device.copyToHost(bytes, rounded.values);
	const factors = rounded.factors.toFloat32();
	const stride = Math.ceil(x.rows / 4) * 4;
	return Float64Array.from(bytes, (byte, i) => {
		const [row, run] = [Math.floor(i / x.width), Math.floor((i % x.width) / 128)];
		return e4m3Number(byte) * factors[run * stride + row]!;
	});
}

/** The value of a byte (docs/spec/moe-performance.md §1.7). */
function e4m3Number(byte: number): number {
	const [exponent, mantissa] = [(byte >> 3) & 15, byte & 7];
	const magnitude = exponent === 0 ? mantissa * 2 ** -9 : (8 + mantissa) * 2 ** (exponent - 10);
	return byte & 128 ? -magnitude : magnitude;
}

// Values beyond the clamp of gated activations (docs/spec/moe-performance.md §1.2), counted by channel. A value at the clamp's edge
// that rounding moves to the other side changes its gradient from zero to its full size, or back: the counts find it.

/** Values beyond the clamp by place, such as "the MLP of layer.2": the gate's channels, then the linear half's. */
export type ClampCounts = ReadonlyMap<string, Float64Array>;

export interface ClampFlips {
	/** How many values are on another side than the reference's, as far as the counts of channels tell. */
	readonly count: number;
	/** null: none. */
	readonly first: {
		readonly place: string;
		readonly half: "gate" | "linear half";
		readonly channel: number;
		/** From the clamp to the channel's nearest value. */
		readonly distance: number;
	} | null;
}

/** Counts on one rank. */
export class ClampMeter {
	readonly counts = new Map<string, Float64Array>();
	/** From the clamp to the nearest value; as the counts. */
	readonly #distances = new Map<string, Float64Array>();

	/** A probe that counts; without a clamp it sees nothing. */
	probe(model: HybridModel): LayerProbe {
		const { activation, clamp } = model.config.mlp;
		if (!isGatedActivation(activation) || !Number.isFinite(clamp)) return {};
		return { preactivation: (z, pass, rows) => this.#add(model, z, pass, rows ?? null) };
	}

	#add(model: HybridModel, z: Tensor, { layer, name }: ProbedPass, rows: ProbedExpertRows | null): void {
		const { tensor, expertTensor, expert } = placeOf(model.parallel);
		const values = z.toFloat32();
		if (rows === null) {
			const part = model.routers.has(layer) ? "shared expert" : "MLP";
			this.#addRows(`the ${part} of ${name}`, values, z.width, { clamp: model.config.mlp.clamp, shard: tensor });
			return;
		}
		const { interleave } = model.config.moe;
		const offsets = rows.offsets.toInt32();
		for (let own = 0; own + 1 < offsets.length; own++) {
			const of = values.subarray(offsets[own]! * z.width, offsets[own + 1]! * z.width);
			const place = `expert ${expert.rank * (offsets.length - 1) + own} of ${name}`;
			this.#addRows(place, of, z.width, { clamp: model.config.mlp.clamp, shard: expertTensor, interleave });
		}
	}

	#addRows(
		place: string,
		values: Float32Array,
		width: number,
		{
			clamp,
			shard,
			interleave = 0,
		}: {
			readonly clamp: number;
			readonly shard: { readonly rank: number; readonly size: number };
			readonly interleave?: number;
		},
	): void {
		const [edge, own] = [Math.fround(clamp), width / 2];
		const all = 2 * own * shard.size;
		const counts = this.counts.get(place) ?? new Float64Array(all);
		const distances = this.#distances.get(place) ?? new Float64Array(all).fill(Number.POSITIVE_INFINITY);
		this.counts.set(place, counts);
		this.#distances.set(place, distances);
		for (let column = 0; column < width; column++) {
			const run = interleave === 0 ? own : interleave;
			const linear = Math.floor(column / run) % 2;
			const channel = Math.floor(column / run / 2) * run + (column % run);
			const at = linear * own * shard.size + shard.rank * own + channel;
			for (let i = column; i < values.length; i += width) {
				const value = linear === 1 ? Math.abs(values[i]!) : values[i]!;
				if (value > edge) counts[at]!++;
				distances[at] = Math.min(distances[at]!, Math.abs(value - edge));
			}
		}
	}

	/** Values on other sides than `reference` counts; every rank of `world` calls this together. */
	flips(reference: ClampCounts, world: Group, device: Device): ClampFlips {
		let count = 0;
		let first: ClampFlips["first"] = null;
		for (const [place, wanted] of reference) {
			const counts = this.counts.get(place)?.slice() ?? new Float64Array(wanted.length);
			const distances = this.#distances.get(place) ?? new Float64Array(wanted.length).fill(Number.POSITIVE_INFINITY);
			const nearest = distances.map((distance) => -distance);
			reduceHost(world, device, counts, "sum");
			reduceHost(world, device, nearest, "max");
			for (const [at, found] of counts.entries()) {
				if (found === wanted[at]) continue;
				count += Math.abs(found - wanted[at]!);
				const channels = wanted.length / 2;
				const half = at < channels ? "gate" : "linear half";
				first ??= { place, half, channel: at % channels, distance: -nearest[at]! };
			}
		}
		return { count, first };
	}
}
