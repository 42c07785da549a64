/**
 * Values beyond the clamp of gated activations (docs/spec/moe-performance.md §1.2), counted by channel. A value at the clamp's edge
 * that rounding moves to the other side changes its gradient from zero to its full size, or back: the counts find it.
 */
import type { LayerProbe, ProbedExpertRows, ProbedPass } from "../../models/language/layer-context.ts";
import type { HybridModel } from "../../models/language/model.ts";
import { isGatedActivation } from "../../native/activations.ts";
import type { Device } from "../../native/device.ts";
import { type Group, placeOf } from "../../parallel/index.ts";
import type { Tensor } from "../../tensor/index.ts";
import { reduceHost } from "../probe-sums.ts";

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
